"""Environment and verifier of ``examples/configs/critic_game_vapo.yaml``: a game of twelve turns in which a critic helps.

Each turn shows a door, one of 48 symbols; the model answers 0, 1, 2 or 3. The right answer earns 2 points. In each of the first three turns
a die earns 16 points or none, independently of the answer. The environment writes the outcome (``+`` or ``-`` for the answer, ``*`` or
``.`` for the die) and the next door. At the end the verdict is 1 if the points reach the level of the prompt.

The dice cause much of the variance of verdicts but do not depend on the policy. A group baseline credits them to all twelve answers; a
critic reads them from the text and subtracts them. They depend on the seed of each sample, so responses to one prompt differ in their dice.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_mcore.environments import Observation

DOORS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuv"
ANSWERS = "0123"
LEVELS = {"!": 20, "@": 28, "#": 36, "$": 44}
"""Points required for a verdict of 1, by the prompt's first character."""
TURNS, THROWS = 12, 3
ANSWER_POINTS, DIE_POINTS = 2, 16

_rng = random.Random(42)
RIGHT = {door: _rng.choice(ANSWERS) for door in DOORS}


def favourable(throw: int, sample_seed: int) -> bool:
    """Return whether the die of turn ``throw`` (from 0) earns points: half of those in the first three turns, by the sample's seed."""
    return throw < THROWS and hashlib.blake2b(f"{sample_seed}/{throw}".encode(), digest_size=1).digest()[0] < 128


def play(turns: Sequence[str], ground_truth: str, metadata: Mapping[str, Any]) -> Observation | None:
    """Environment: answer a turn with three characters, or end the game after the last. ``ground_truth`` contains the twelve doors."""
    turn = len(turns) - 1
    if turn >= TURNS - 1:
        return None
    mark = "+" if turns[turn] == RIGHT[ground_truth[turn]] else "-"
    die = "*" if favourable(turn, metadata["sample_seed"]) else "."
    return Observation(mark + die + ground_truth[turn + 1])


def verdict(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Verifier: return 1 if all turns were played and the points reach ``LEVELS[metadata["level"]]``, else 0."""
    turns = response.split("\n")
    if len(turns) != TURNS:
        return 0.0
    answers = sum(turn == RIGHT[door] for turn, door in zip(turns, ground_truth, strict=True))
    dice = sum(favourable(throw, metadata["sample_seed"]) for throw in range(THROWS))
    return float(ANSWER_POINTS * answers + DIE_POINTS * dice >= LEVELS[metadata["level"]])
