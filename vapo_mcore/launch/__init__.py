"""Starting the processes of a run."""

STAGES = ("doctor", "pretrain", "train", "eval")
"""Names of the jobs of a run, in the order in which they run."""
