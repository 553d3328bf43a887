"""What can go wrong in the exchange, one type per failure.

Every error keeps its constructor's arguments as `args` (numbers, texts, tuples of them): with these it is made again on every
trainer rank.
"""

from __future__ import annotations


class WeightsError(RuntimeError):
    """Base of all errors of the exchange."""


class RecordError(WeightsError):
    """A record (manifest, request, ACK, registration) lacks a field or holds a wrong value."""

    def __init__(self, record: str, field: str, problem: str) -> None:
        super().__init__(record, field, problem)
        self.record = record
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.record}: field {self.field!r}: {self.problem}"


class PublishError(WeightsError):
    """A version could not be published; nothing of it is visible."""


class NoSpaceError(PublishError):
    """The filesystem of the run is full, or a quota is reached."""

    def __init__(self, folder: str, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(folder, wanted_bytes, available_bytes)
        self.folder = folder
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes

    def __str__(self) -> str:
        return (
            f"no space for a version of the weights in {self.folder}: wanted {self.wanted_bytes:,} bytes, "
            f"available {self.available_bytes:,} (a quota may allow less); free space, move launch.run_dir to a larger "
            f"filesystem, or lower weights.keep_versions"
        )


class VersionNotPublishedError(WeightsError):
    """The version has no manifest of this run: it does not exist (any more, or yet)."""

    def __init__(self, version: int, folder: str) -> None:
        super().__init__(version, folder)
        self.version = version

    def __str__(self) -> str:
        return f"version {self.args[0]} is not published: {self.args[1]} has no manifest of this run"


class NotInFullError(WeightsError):
    """Whole files are needed, and the version was published as a delta."""

    def __init__(self, version: int, base: int) -> None:
        super().__init__(version, base)
        self.version = version

    def __str__(self) -> str:
        version, base = self.args
        return (
            f"version {version} is published as a delta of version {base} (weights.delta=sparse): its folder holds no whole "
            f"tensors; `python -m stages.weights export RUN {version} FOLDER` makes a HF folder of it"
        )


class ManifestMismatchError(WeightsError):
    """The manifest found is a sound one, but not the one that was asked for."""

    def __init__(self, version: int, field: str, wanted: str, found: str) -> None:
        super().__init__(version, field, wanted, found)
        self.version = version
        self.field = field

    def __str__(self) -> str:
        version, field, wanted, found = self.args
        return f"manifest of version {version}: {field} is {found}, wanted {wanted}"


class SignatureMismatchError(WeightsError):
    """The published tensors do not fit the model that shall load them."""

    def __init__(self, tensor: str, problem: str) -> None:
        super().__init__(tensor, problem)
        self.tensor = tensor

    def __str__(self) -> str:
        return f"tensor {self.args[0]}: {self.args[1]}"


class SizeMismatchError(WeightsError):
    """A published file is missing or has another length than its manifest says."""

    def __init__(self, file: str, wanted_bytes: int, found_bytes: int | None) -> None:
        super().__init__(file, wanted_bytes, found_bytes)
        self.file = file
        self.tensor = ""

    def __str__(self) -> str:
        file, wanted, found = self.args
        return f"file {file}: {'missing' if found is None else f'{found:,} bytes'}, manifest says {wanted:,} bytes"


class DigestMismatchError(WeightsError):
    """Bytes read are not the bytes published. `tensor` is empty when the fault lies in a header or a small file."""

    def __init__(self, tensor: str, file: str, wanted: str, found: str) -> None:
        super().__init__(tensor, file, wanted, found)
        self.tensor = tensor
        self.file = file

    def __str__(self) -> str:
        tensor, file, wanted, found = self.args
        what = f"tensor {tensor} in {file}" if tensor else f"file {file}"
        return f"{what}: xxh3-128 of the bytes read is {found}, manifest says {wanted}"


class WeightRefreshError(WeightsError):
    """Not every instance proved that it serves the version. `instances` are those at fault."""

    def __init__(self, version: int, instances: tuple[str, ...], reason: str) -> None:
        super().__init__(version, instances, reason)
        self.version = version
        self.instances = instances
        self.reason = reason

    def __str__(self) -> str:
        return f"weight refresh to version {self.version} failed on {', '.join(self.instances)}: {self.reason}"


class InstanceSilentError(WeightsError):
    """The heartbeat counter of an instance stood still for too long."""

    def __init__(self, instance: str, silent_s: float, state: str) -> None:
        super().__init__(instance, silent_s, state)
        self.instance = instance

    def __str__(self) -> str:
        instance, silent_s, state = self.args
        return (
            f"instance {instance} (last state {state!r}) has not moved its heartbeat for {silent_s:.1f} s "
            f"(limit: rollout.heartbeat_timeout_s)"
        )


class InstanceLateError(WeightsError):
    """An instance that lives did not answer in its time."""

    def __init__(self, instance: str, waited_s: float) -> None:
        super().__init__(instance, waited_s)
        self.instance = instance
        self.waited_s = waited_s

    def __str__(self) -> str:
        return f"no ACK from {self.instance} within {self.waited_s:.1f} s"
