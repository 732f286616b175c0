"""The commands ``eval`` and ``replay-step``, which reuse the trainer's parts."""
