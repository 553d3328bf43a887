"""A plan that cannot be made."""


class PlanError(ValueError):
    """No layout fits; the message names wanted, available and the option to change."""
