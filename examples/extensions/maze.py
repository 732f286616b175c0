"""Environment and verifier of ``examples/configs/maze_vapo.yaml``: a search with dead ends.

A maze of 36 rooms without loops, the same in all games. The prompt states the room in which a game starts and how many moves it has;
each turn the model moves ``^``, ``>``, ``v`` or ``<``. The environment writes whether there was a door (``+`` or ``-``), the room, and the
time left. A game ends in the goal, with a verdict of 1, or when its moves are used up, with 0.

Up to 60 moves share one verdict. A group baseline credits all of them alike; the value of a room, which the text states before each move,
credits a move with what it changed. Nothing but the model's own moves is random.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_mcore.environments import Observation

SIDE = 6
ROOMS = string.ascii_uppercase + string.digits
"""Names of the rooms, row by row."""
GOAL = ROOMS[-1]
MOVES = {"^": -SIDE, ">": 1, "v": SIDE, "<": -1}
BUDGETS = (24, 42, 60)
"""Moves of a game, stated by the prompt."""
MOVES_PER_TICK = 6
CLOCK = "abcdefghij"


def _doors() -> frozenset[tuple[str, str]]:
    """Return the pairs of rooms with a door between them: the tree of a random depth-first walk."""
    rng, doors, seen, path = random.Random(0), set(), {0}, [0]
    while path:
        room = path[-1]
        near = [other for other in map(room.__add__, MOVES.values()) if _adjacent(room, other) and other not in seen]
        if not near:
            path.pop()
            continue
        found = rng.choice(near)
        doors |= {(ROOMS[room], ROOMS[found]), (ROOMS[found], ROOMS[room])}
        seen.add(found)
        path.append(found)
    return frozenset(doors)


def _adjacent(room: int, other: int) -> bool:
    """Return whether two rooms, by number, share a wall: ``other`` is one step away in a row or column of the square."""
    return 0 <= other < SIDE * SIDE and (abs(other - room) == SIDE or other // SIDE == room // SIDE)


DOORS = _doors()


def after(room: str, move: str) -> str:
    """Return the room after a move. A wall, or a token that is no move, leaves the player in place."""
    number = ROOMS.index(room) + MOVES.get(move, 0)
    return ROOMS[number] if 0 <= number < len(ROOMS) and (room, ROOMS[number]) in DOORS else room


def clock(moves_left: int) -> str:
    """Return the symbol of the time left, 1 to 60 moves."""
    return CLOCK[(moves_left - 1) // MOVES_PER_TICK]


def play(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Observation | None:
    """Environment: answer a move with three characters, or end the game. ``ground_truth`` is the first room."""
    before = room = ground_truth
    for move in turns:
        before, room = room, after(room, move)
    moves_left = metadata["moves"] - len(turns)
    if room == GOAL or moves_left < 1:
        return None
    return Observation(("-" if room == before else "+") + room + clock(moves_left))


def verdict(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Verifier: return 1 if the moves lead from ``ground_truth`` to the goal, else 0."""
    room = ground_truth
    for move in response.split("\n")[: metadata["moves"]]:
        room = after(room, move)
        if room == GOAL:
            return 1.0
    return 0.0
