"""Options of ``vapo-mcore pretrain-critic``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PretrainOptions:
    """Options of the command. ``fraction``: share of the prompts of ``data`` held out when ``held_out`` is empty."""

    data: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    fraction: float = 0.1
    passes: int = 10
    patience: int = 2
    min_rise: float = 0.01
    clean: bool = False
