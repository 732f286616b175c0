"""Errors that are for people: the command line prints their message alone and exits with 2.

``assert`` is for invariants of this package. Everything that a user, a file or a machine can get wrong raises one
of these, with a message that says what is wrong, where, with which value, and what would be right.
"""


class VapoError(Exception):
    """Base of all errors whose message is meant for the user; the CLI exits with ``exit_code`` and no traceback."""

    exit_code = 2


class ConfigError(VapoError):
    """The configuration, the command line or the layout is wrong. One error carries all faults found."""


class DataError(VapoError):
    """A data file, a row or a field is missing or malformed."""


class CheckpointError(VapoError):
    """A model folder or a checkpoint is missing, damaged or does not match the model."""


class RolloutError(VapoError):
    """Generation or weight synchronisation cannot do what was asked (engine missing, wrong state, wrong names)."""


class RewardError(VapoError):
    """The verifiers cannot be started or kept alive."""


class TrainingError(VapoError):
    """The training itself cannot go on (for example NaN log-probs at response tokens); names the response."""
