"""Training checkpoints: what they hold, how they are written while training goes on, and how a run continues from one."""
