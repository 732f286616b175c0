"""Start the processes of a run: on this machine, by torchrun, or as Slurm jobs with nemo-run. Handle their signals and hangs."""

STAGES = ("doctor", "pretrain", "train", "eval")
"""Names of the jobs of a run, in execution order."""
