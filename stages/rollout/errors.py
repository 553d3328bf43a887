"""What can go wrong in a rollout instance, one type per failure."""

from __future__ import annotations

import signal


class RolloutError(RuntimeError):
    """Base of the failures that end a rollout instance."""


class RolloutOptionError(ValueError):
    """An option cannot be used as it is; the message says wanted, available and the option to change."""


class VllmStartError(RolloutError):
    """The server did not become ready. The message ends with the last lines of its log."""

    def __init__(self, why: str, log_tail: str, log_path: str) -> None:
        super().__init__(f"vLLM did not start: {why}\nlast lines of {log_path}:\n{quoted(log_tail)}")
        self.log_tail = log_tail


class ServerDiedError(RolloutError):
    """The server ended although nobody asked it to."""

    def __init__(self, exit_code: int | None, log_tail: str, log_path: str, what: str = "the vLLM server") -> None:
        super().__init__(f"{what} {describe_exit(exit_code)}\nlast lines of {log_path}:\n{quoted(log_tail)}")
        self.exit_code = exit_code
        self.log_tail = log_tail


class ProcessesLeftError(RolloutError):
    """Processes of a stopped server could not be ended."""


class UnprovedWeightsError(RolloutError):
    """The server holds weights that it could not prove; it answers nothing any more."""


class RefusedAgainError(RolloutError):
    """The instance could take none of the last versions, although it runs."""


class ReplacedError(RolloutError):
    """A later start of the same instance has taken its place."""


class GuardOpenError(RolloutError):
    """The server answered a request that carried no token: something stands in front of the guard."""


class UnguardedTokenError(RolloutOptionError):
    """The token file can be read by others, or has no usable token."""


class ReloadRefusedError(Exception):
    """An order to the reload endpoints is not carried out; the server goes on as before unless a subtype says otherwise.

    `status` is the HTTP status of the answer, `kind` names the reason for programs, `tensor` the one at fault if any.
    """

    status = 400
    kind = "bad_request"

    def __init__(self, message: str, *, tensor: str = "") -> None:
        super().__init__(message)
        self.tensor = tensor


class TooLargeError(ReloadRefusedError):
    status = 413
    kind = "too_large"


class WrongRunError(ReloadRefusedError):
    """The order comes from another run or from an older or newer attempt of this one."""

    status = 403
    kind = "wrong_run"


class OutsideWeightsError(ReloadRefusedError):
    """The path of the order is not the folder of its version inside RUN/weights."""

    status = 403
    kind = "outside_weights"


class VersionNotNewerError(ReloadRefusedError):
    status = 409
    kind = "version_not_newer"


class ReloadBusyError(ReloadRefusedError):
    """Another reload is under way."""

    status = 409
    kind = "busy"


class NotPreparedError(ReloadRefusedError):
    status = 409
    kind = "not_prepared"


class UnfitWeightsError(ReloadRefusedError):
    """The published version is damaged, or does not fit the model that the engine was started with."""

    status = 422
    kind = "unfit_weights"


class SwapFailedError(ReloadRefusedError):
    """The engine failed while its weights were being replaced: it may hold a mixture and serves nothing any more."""

    status = 500
    kind = "swap_failed"


class ProofFailedError(ReloadRefusedError):
    """The engine does not say what the published weights say: it serves nothing any more."""

    status = 500
    kind = "proof_failed"


class NotServingError(Exception):
    """An answer may not leave the server: it holds no proved weights."""


def quoted(log_tail: str) -> str:
    """Marked line by line, so that a traceback in the log is not taken for that of the error which quotes it."""
    return "\n".join(f"  | {line}" for line in log_tail.splitlines())


def describe_exit(exit_code: int | None) -> str:
    """`exit_code` as from `subprocess.Popen.returncode`; negative for a signal, None for still running."""
    if exit_code is None:
        return "stopped answering"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
