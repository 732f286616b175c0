"""The commands ``eval``, ``replay-step`` and ``pretrain-critic``, which reuse the trainer's parts."""
