"""User-facing errors: the command line prints only their message and exits with 2.

Invalid input from a user, a file or a machine raises one of these, with a message that states what is wrong, where, the value, and the
remedy. ``assert`` is for invariants of this package.
"""

EXIT_REQUEUE = 75
"""Exit code of a run that saved and stopped on a signal (SIGTERM, SIGUSR1), or because only a new process can create a rollout engine.

Restart it with ``--resume`` (EX_TEMPFAIL of sysexits.h).
"""


EXIT_HANG = 76
"""Exit code of a run that the watchdog ended because no rank made progress (``faults.hang_minutes``)."""


class VapoError(Exception):
    """Base class of user-facing errors; the CLI prints the message and exits with ``exit_code``, without a traceback."""

    exit_code = 2


class ConfigError(VapoError):
    """The configuration, the command line or the layout is invalid. One error lists all faults."""


class DataError(VapoError):
    """A data file, a row or a field is missing or malformed."""


class CheckpointError(VapoError):
    """A model folder or a checkpoint is missing, damaged or does not match the model."""


class RecordError(VapoError):
    """The records of a run (metrics, samples, evaluation reports) cannot be written, for example because the disk is full."""


class RolloutError(VapoError):
    """Generation or weight synchronisation failed (engine missing, wrong state, wrong names)."""


class EngineFailure(RolloutError):
    """The rollout engine failed while generating; a new engine may succeed."""


class EngineStuck(RolloutError):
    """The engine failed on this rank while the other ranks of its replica wait inside it. Raised on this rank only, which must end.

    ``exit_code``: EXIT_REQUEUE if a restart continues from a newer checkpoint than this one did.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineRemains(RolloutError):
    """The memory of a failed rollout engine was not freed, so only a new process can create another engine."""

    exit_code = EXIT_REQUEUE


class RewardError(VapoError):
    """The verifiers cannot be started or kept alive."""


class TrainingError(VapoError):
    """Training cannot continue (for example NaN log-probs at response tokens); the message names the response."""


class StepBroken(TrainingError):
    """A step has invalid numbers. Raised on all ranks together; the run ends after publishing a checkpoint in progress."""


class StepAbandoned(TrainingError):
    """A step cannot be run. Raised on all ranks before it changes a model; the run stops with a checkpoint of the previous step.

    ``exit_code``: EXIT_REQUEUE if a restart may succeed.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunStopped(VapoError):
    """The run stopped early and cleanly: between two steps, with a checkpoint to resume from. ``exit_code`` gives the reason."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
