"""The game of the critic_game recipes, by hand: points, dice from the sample's seed, and what the best critic could explain of it."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

import make_game_model
import pytest

from tests.torchrun import ROOT
from vapo_mcore.extensions.loading import load_function

GAME: Any = make_game_model.DoorsAndDicePlayer().rules
DOORS = "ABCDEFGHIJKL"
RIGHT = [GAME.RIGHT[door] for door in DOORS]


def played(turns: list[str], seed: int, level: str = "!") -> tuple[list[str | None], float]:
    """What the environment says after each turn, and the verdict."""
    metadata = {"level": level, "sample_seed": seed}
    replies = [GAME.play(turns[: number + 1], DOORS, metadata) for number in range(len(turns))]
    return [None if reply is None else reply.text for reply in replies], GAME.verdict("\n".join(turns), DOORS, metadata)


def seed_with(favourable: int) -> int:
    return next(seed for seed in range(100) if sum(GAME.favourable(throw, seed) for throw in range(3)) == favourable)


def test_a_game_is_as_the_rules_say() -> None:
    wrong = [str((int(answer) + 1) % 4) for answer in RIGHT]
    seed = seed_with(1)
    replies, verdict = played(RIGHT[:2] + wrong[2:], seed, "!")  # 2 x 2 + 16 points for a level of 20
    assert verdict == 1.0
    assert replies[-1] is None
    dice = "".join("*" if GAME.favourable(throw, seed) else "." for throw in range(12))
    assert dice.count("*") == 1 and "*" not in dice[3:]
    assert replies[:-1] == [("+" if turn < 2 else "-") + dice[turn] + DOORS[turn + 1] for turn in range(11)]
    assert played(RIGHT[:1] + wrong[1:], seed, "!")[1] == 0.0  # 18 points
    assert played(RIGHT[:2] + wrong[2:], seed, "@")[1] == 0.0


@pytest.mark.parametrize(("favourable", "levels"), [(0, "!"), (1, "!@#"), (2, "!@#$"), (3, "!@#$")])
def test_points_of_a_perfect_game(favourable: int, levels: str) -> None:
    """24 points for the answers and 16 a favourable die, against levels of 20, 28, 36 and 44."""
    seed = seed_with(favourable)
    assert [level for level in GAME.LEVELS if played(RIGHT, seed, level)[1] == 1.0] == list(levels)


def test_an_unfinished_game_is_lost() -> None:
    assert played(RIGHT[:11], seed_with(3))[1] == 0.0


def test_the_die_is_fair_and_is_the_samples() -> None:
    throws = [[GAME.favourable(throw, seed) for throw in range(3)] for seed in range(4000)]
    for throw in range(3):
        assert sum(one[throw] for one in throws) / 4000 == pytest.approx(0.5, abs=0.03)
    assert all(sum(one == [bool(bits & k) for k in (1, 2, 4)] for one in throws) > 400 for bits in range(8))  # of 500: independent


def test_the_recipes_load_the_functions_as_environment_and_verifier() -> None:
    for name in ("play", "verdict"):
        assert callable(load_function(f"{ROOT}/examples/extensions/doors_and_dice.py:{name}"))


def test_data_of_held_out_games_begin_with_doors_of_their_own(tmp_path: Path) -> None:
    make_game_model.write_problems(tmp_path, make_game_model.DoorsAndDicePlayer(), random.Random("x"))
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "heldout")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 8000, "heldout": 200}
    prompts = {name: {row["prompt"].casefold() for row in found} for name, found in rows.items()}
    assert not prompts["train"] & prompts["heldout"]
    for row in rows["train"] + rows["heldout"]:
        assert row["prompt"] == row["level"] + row["answer"][0] and len(row["answer"]) == 12 and row["level"] in GAME.LEVELS


@cache
def value_of(turn: int, right: int, dice: int, level: int, rate: float) -> float:
    """Probability of a verdict of 1 before answer ``turn``, for a policy that is right with probability ``rate``: exact."""
    answers, throws = 12 - turn, max(3 - turn, 0)
    return sum(
        math.comb(answers, a) * rate**a * (1 - rate) ** (answers - a) * math.comb(throws, d) * 0.5**throws
        for a in range(answers + 1)
        for d in range(throws + 1)
        if 2 * (right + a) + 16 * (dice + d) >= level
    )


def test_what_a_critic_can_explain() -> None:
    """The ceilings that docs/critic.md states for the untrained policy: 0.78 with the text, 0.23 with the prompt alone."""
    rng = random.Random(0)
    squares = {"nothing": 0.0, "prompt": 0.0, "text": 0.0}
    games, mean = 4000, sum(value_of(0, 0, 0, level, 0.3) for level in GAME.LEVELS.values()) / 4
    for _ in range(games):
        level, right, dice, seen = rng.choice(list(GAME.LEVELS.values())), 0, 0, []
        for turn in range(12):
            seen.append(value_of(turn, right, dice, level, 0.3))
            right += rng.random() < 0.3
            dice += turn < 3 and rng.random() < 0.5
        outcome = float(2 * right + 16 * dice >= level)
        squares["nothing"] += 12 * (outcome - mean) ** 2
        squares["prompt"] += 12 * (outcome - seen[0]) ** 2
        squares["text"] += sum((outcome - value) ** 2 for value in seen)
    assert 1 - squares["text"] / squares["nothing"] == pytest.approx(0.78, abs=0.02)
    assert 1 - squares["prompt"] / squares["nothing"] == pytest.approx(0.23, abs=0.03)
