"""Commands built on the trainer: replay-step, eval."""
