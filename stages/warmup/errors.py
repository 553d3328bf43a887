"""Why a starter policy could not be made."""


class WarmupError(ValueError):
    """The options can not make a policy."""


class WarmupBusyError(TimeoutError):
    """Another process has been making the same policy for too long."""
