"""The maze of the maze recipes, by hand: doors, moves, the clock, and what the best critic could explain of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import make_game_model
import pytest

from tests.torchrun import ROOT
from vapo_mcore.extensions.loading import load_function

PLAYER = make_game_model.MazePlayer()
MAZE: Any = PLAYER.rules


def drawn() -> str:
    """The rooms of each row, with ``-`` for a door to the right and ``|`` for one below."""
    lines = []
    for row in range(6):
        rooms = MAZE.ROOMS[6 * row : 6 * row + 6]
        lines.append("".join(room + ("-" if MAZE.after(room, ">") != room else " ") for room in rooms).rstrip())
        lines.append("".join(("|" if MAZE.after(room, "v") != room else " ") + " " for room in rooms).rstrip())
    return "\n".join(lines).rstrip()


def steps_to_goal() -> dict[str, int]:
    found, rooms = {MAZE.GOAL: 0}, [MAZE.GOAL]
    for room in rooms:
        for other in {MAZE.after(room, move) for move in MAZE.MOVES} - set(found):
            found[other] = found[room] + 1
            rooms.append(other)
    return found


def test_the_maze_is_a_tree_with_one_goal() -> None:
    assert len(MAZE.ROOMS) == 36 and len(MAZE.DOORS) == 2 * 35  # a tree of 36 rooms, each door in both directions
    distances = steps_to_goal()
    assert set(distances) == set(MAZE.ROOMS) and max(distances.values()) == 15
    for room in MAZE.ROOMS:
        for move, back in zip("^>v<", "v<^>", strict=True):
            other = MAZE.after(room, move)
            assert other == room or MAZE.after(other, back) == room


def test_the_drawing_of_the_page_is_the_maze() -> None:
    page = (ROOT / "docs" / "critic.md").read_text(encoding="utf-8")
    assert drawn() in page, drawn()


def test_a_token_that_is_no_move_and_a_wall_leave_the_room() -> None:
    for room in MAZE.ROOMS:
        assert MAZE.after(room, "A") == MAZE.after(room, "") == room
    assert MAZE.after("A", "^") == MAZE.after("A", "<") == "A"
    assert MAZE.after("F", ">") == "F"  # the last room of a row is not beside the first of the next


@cache
def path(room: str) -> str:
    """The shortest moves from a room to the goal."""
    distances = steps_to_goal()
    if room == MAZE.GOAL:
        return ""
    move = next(move for move in MAZE.MOVES if distances[MAZE.after(room, move)] < distances[room])
    return move + path(MAZE.after(room, move))


@pytest.mark.parametrize("start", ["A", "F", "4", "8"])
def test_a_game_is_as_the_rules_say(start: str) -> None:
    moves, metadata = list(path(start)), {"moves": 24}
    wall = next(move for move in MAZE.MOVES if MAZE.after(start, move) == start)
    turns = [wall, *moves]
    room = start
    for number in range(1, len(turns) + 1):
        before, room = room, MAZE.after(room, turns[number - 1])
        observed = MAZE.play(turns[:number], start, metadata)
        if number == len(turns):
            assert room == MAZE.GOAL and observed is None
        else:
            assert observed.text == ("+" if room != before else "-") + room + "abcd"[(24 - number - 1) // 6]
    assert MAZE.verdict("\n".join(turns), start, metadata) == 1.0
    assert MAZE.verdict("\n".join(moves[:-1]), start, metadata) == 0.0


def test_a_game_ends_when_its_moves_are_used_up() -> None:
    walls = ["A"] * 24
    assert MAZE.play(walls[:23], "D", {"moves": 24}).text == "-Da"
    assert MAZE.play(walls, "D", {"moves": 24}) is None
    late = walls + list(path("8"))  # never happens: the environment has ended the game
    assert MAZE.verdict("\n".join(late), "8", {"moves": 24}) == 0.0
    assert [MAZE.clock(left) for left in (1, 6, 7, 24, 42, 60)] == ["a", "a", "b", "d", "g", "j"]


def test_the_recipe_loads_the_functions_as_environment_and_verifier() -> None:
    for name in ("play", "verdict"):
        assert callable(load_function(f"{ROOT}/examples/extensions/maze.py:{name}"))


def test_held_out_games_start_in_rooms_of_no_training_game(tmp_path: Path) -> None:
    make_game_model.write_problems(tmp_path, PLAYER, random.Random("x"))
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "heldout")}
    assert {name: len(found) for name, found in rows.items()} == {"train": 27 * 3, "heldout": 8 * 3}
    rooms = {name: {row["answer"] for row in found} for name, found in rows.items()}
    assert not rooms["train"] & rooms["heldout"] and rooms["train"] | rooms["heldout"] == set(MAZE.ROOMS) - {MAZE.GOAL}
    for row in rows["train"] + rows["heldout"]:
        assert row["prompt"] == row["answer"] + MAZE.clock(row["moves"])


def values(probabilities: Callable[[str], list[float]]) -> list[dict[str, float]]:
    """The probability of reaching the goal from each room, by the number of moves left (0 to 60): exact."""
    found = [{room: float(room == MAZE.GOAL) for room in MAZE.ROOMS}]
    for _ in range(60):
        last = found[-1]
        odds = {
            room: sum(p * last[MAZE.after(room, move)] for p, move in zip(probabilities(room), MAZE.MOVES, strict=True))
            for room in MAZE.ROOMS
        }
        found.append({**odds, MAZE.GOAL: 1.0})
    return found


def test_what_a_critic_can_explain() -> None:
    """The numbers of docs/critic.md: the random player wins 0.25; a critic explains at most 0.42 with the text, 0.09 without."""
    exact, rng = values(PLAYER.probabilities), random.Random(0)
    starts = [(room, budget) for room in MAZE.ROOMS[:-1] for budget in MAZE.BUDGETS]
    mean = sum(exact[budget][room] for room, budget in starts) / len(starts)
    assert mean == pytest.approx(0.25, abs=0.02), mean
    squares = {"nothing": 0.0, "prompt": 0.0, "text": 0.0}
    for _ in range(4000):
        start, budget = rng.choice(starts)
        room, seen, left = start, [], budget
        while left and room != MAZE.GOAL:
            seen.append(exact[left][room])
            (move,) = rng.choices(list(MAZE.MOVES), PLAYER.probabilities(room))
            room, left = MAZE.after(room, move), left - 1
        outcome = float(room == MAZE.GOAL)
        squares["nothing"] += len(seen) * (outcome - mean) ** 2
        squares["prompt"] += len(seen) * (outcome - seen[0]) ** 2
        squares["text"] += sum((outcome - value) ** 2 for value in seen)
    explained = {name: 1 - squares[name] / squares["nothing"] for name in ("text", "prompt")}
    assert explained == pytest.approx({"text": 0.42, "prompt": 0.09}, abs=0.02), explained
