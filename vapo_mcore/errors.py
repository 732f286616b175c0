"""Errors that are for people: the command line prints their message alone and exits with 2.

``assert`` is for invariants of this package. Everything that a user, a file or a machine can get wrong raises one
of these, with a message that says what is wrong, where, with which value, and what would be right.
"""

EXIT_REQUEUE = 75
"""Exit code of a run that saved and stopped because of a signal (SIGTERM, SIGUSR1), or because only a new process can have a rollout
engine: start it again with ``--resume`` (EX_TEMPFAIL of sysexits.h)."""


EXIT_HANG = 76
"""Exit code of a run that the watchdog ended because no rank showed a sign of life (``faults.hang_minutes``)."""


class VapoError(Exception):
    """Base of all errors whose message is meant for the user; the CLI exits with ``exit_code`` and no traceback."""

    exit_code = 2


class ConfigError(VapoError):
    """The configuration, the command line or the layout is wrong. One error carries all faults found."""


class DataError(VapoError):
    """A data file, a row or a field is missing or malformed."""


class CheckpointError(VapoError):
    """A model folder or a checkpoint is missing, damaged or does not match the model."""


class RecordError(VapoError):
    """The records of a run (metrics, samples, an evaluation's report) cannot be written: the disk is full, a quota is used up, ..."""


class RolloutError(VapoError):
    """Generation or weight synchronisation cannot do what was asked (engine missing, wrong state, wrong names)."""


class EngineFailure(RolloutError):
    """The rollout engine broke down while generating; a new one may well do it."""


class EngineRemains(RolloutError):
    """The memory of a failed rollout engine was not released: this process can have no other one, a new process can."""

    exit_code = EXIT_REQUEUE


class RewardError(VapoError):
    """The verifiers cannot be started or kept alive."""


class TrainingError(VapoError):
    """The training itself cannot go on (for example NaN log-probs at response tokens); names the response."""


class StepBroken(TrainingError):
    """A step whose numbers cannot be trained on, raised on all ranks together: the run ends, with the checkpoint that was under way."""


class StepAbandoned(TrainingError):
    """A step that cannot be done, raised on all ranks before it changed a model: the run stops with a checkpoint of the step before.

    ``exit_code``: EXIT_REQUEUE where a new start may well do the step.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunStopped(VapoError):
    """The run ended early in good order: between two steps, with a checkpoint to continue from. ``exit_code`` says why."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
