"""Verifier of ``examples/configs/maze_walk_vapo.yaml``: a long walk, in one response, that stays out of one room of the maze of maze.py.

The prompt is a room. The response writes moves, each with the room in which it ends: ``vG>H``. A wall leaves the player in place: ``^A``.
The verdict is 1 if the response has ``MOST_MOVES`` moves, every room is the one that the maze gives, and none is the trap, which ends the
response; else 0. Nothing answers a move: the model has to know the doors. A player who walks at random falls into the trap two times in
three, after 9 moves or after 200, so that responses differ widely in length; good ones are long.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAZE = runpy.run_path(str(Path(__file__).with_name("maze.py")))
TRAP = MAZE["GOAL"]
MOST_MOVES = 220
"""Moves of a whole response: ``rollout.max_response_length`` / 2."""


def verdict(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Verifier: return 1 if ``response`` is a whole walk from ``ground_truth`` that never enters the trap, else 0."""
    room = ground_truth
    if len(response) != 2 * MOST_MOVES:
        return 0.0
    for move, written in zip(response[::2], response[1::2], strict=True):
        room = MAZE["after"](room, move)
        if move not in MAZE["MOVES"] or room != written or room == TRAP:
            return 0.0
    return 1.0
