"""The trainer's reading of answers: each record once, each field compared with what request and manifest say it must be."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from conf.schema import LibraConfig
from stages.files import DamagedRecordError, list_inodes
from stages.rundir import RunDir
from stages.weights.errors import RecordError, WeightRefreshError
from stages.weights.manifest import Manifest
from stages.weights.records import Loaded, Nack, Prepared, RefreshRequest

KINDS: dict[str, type[Prepared | Loaded | Nack]] = {"nack": Nack, "prepared": Prepared, "loaded": Loaded}
"""By the phase in the file's name, in the order in which they are looked at."""
_READERS = 16
_ALONE = 16
"""So many new records are read by one thread; more by several, because each is a few round trips to a file server."""


@dataclass
class Acks:
    """What has been answered so far. `refused` holds refusals of the present retry that nobody has dealt with."""

    run: RunDir
    config: LibraConfig
    manifest: Manifest
    request: RefreshRequest
    loaded: dict[str, Loaded] = field(default_factory=dict)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    refused: dict[str, Nack] = field(default_factory=dict)
    _refusals: dict[str, Nack] = field(default_factory=dict)
    _seen: dict[tuple[str, str], int] = field(default_factory=dict)
    _damaged: dict[str, str] = field(default_factory=dict)

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.request.instances if name not in self.loaded)

    def look(self) -> None:
        """List the answers once and read the new ones. Raises WeightRefreshError for one that no sound instance writes."""
        inodes = list_inodes(self.run.acks(self.request.version))
        new = [
            (instance, phase)
            for instance in self.missing()
            for phase in KINDS
            if self._is_new(instance, phase, inodes.get(f"{instance}.{phase}.json"))
        ]
        for (instance, phase), (inode, answer) in zip(new, self._read_all(new), strict=True):
            self._seen[instance, phase] = inode
            self._take(instance, phase, answer)

    def state_of(self, instance: str) -> str:
        """For error messages."""
        state = "prepared, not loaded" if instance in self.prepared else "no answer"
        state += f", for {self._damaged[instance]}" if instance in self._damaged else ""
        refusal = self._refusals.get(instance)
        return state if refusal is None else f"{state} since it was asked again; it had refused: {refusal.error}"

    def _is_new(self, instance: str, phase: str, inode: int | None) -> bool:
        """A record appears by rename, so a new one has a new inode number; filesystems that tell none (0) are read each time."""
        return inode is not None and (inode == 0 or self._seen.get((instance, phase)) != inode)

    def _read_all(self, new: Sequence[tuple[str, str]]) -> list[tuple[int, Prepared | Loaded | Nack | None]]:
        if len(new) <= _ALONE:
            return [self._read(*item) for item in new]
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(lambda item: self._read(*item), new))

    def _take(self, instance: str, phase: str, answer: Prepared | Loaded | Nack | None) -> None:
        if isinstance(answer, Prepared):
            self.prepared[instance] = answer
        elif isinstance(answer, Nack) and answer.retry == self.request.retries.get(instance, 0):
            self.refused[instance] = self._refusals[instance] = answer
        elif isinstance(answer, Loaded):
            if instance in self.prepared:
                self.loaded[instance] = answer
                self.refused.pop(instance, None)
            else:
                del self._seen[instance, phase]  # the listing showed the later one first

    def _read(self, instance: str, phase: str) -> tuple[int, Prepared | Loaded | Nack | None]:
        """A checked answer of this attempt, or None. Raises WeightRefreshError naming the field that is wrong.

        One that is no JSON may be what a crash of the host left of an older attempt's: it is looked at again each time.
        """
        what = f"{phase} of {instance} for version {self.request.version}"
        try:
            inode, record = self.run.read_inode(self.run.ack_json(self.request.version, instance, phase))
            if record is None:
                return inode, None
            answer = KINDS[phase].from_record(record, what)
            self._compare(what, {**asdict(answer), "writer": record["writer"]}, instance)
        except DamagedRecordError as damage:
            self._damaged[instance] = str(damage)
            return 0, None
        except (RecordError, ValueError) as problem:
            raise WeightRefreshError(self.request.version, (instance,), f"wrong answer: {problem}") from problem
        return inode, answer

    def _compare(self, what: str, answer: dict[str, Any], instance: str) -> None:
        """Every field that the request or the manifest determines must equal it."""
        wanted = {
            "writer": instance,
            "instance": instance,
            "version": self.request.version,
            "digest": self.request.digest,
            "method": self.request.method,
            "strategy": self.request.strategy,
            "bytes": self.manifest.weight_bytes,
        }
        for name in wanted.keys() & answer.keys():
            if answer[name] != wanted[name]:
                raise RecordError(what, name, f"wanted {wanted[name]!r}, got {answer[name]!r}")
        asked = self.request.retries.get(instance, 0)
        if answer["retry"] > asked:
            raise RecordError(what, "retry", f"wanted at most {asked}, got {answer['retry']}")
        if "proof" in answer:
            self._compare_proof(what, answer["proof"])

    def _compare_proof(self, what: str, proof: dict[str, Any]) -> None:
        tokens, tolerance = len(self.manifest.probe.logprobs), self.config.weights.proof_tolerance
        if proof["tokens"] != tokens:
            raise RecordError(what, "proof.tokens", f"wanted {tokens}, got {proof['tokens']}")
        if proof["tolerance"] > tolerance:
            raise RecordError(what, "proof.tolerance", f"wanted at most {tolerance}, got {proof['tolerance']}")
