"""The walks through the maze of the maze_walk recipe, by hand, and the player that its model imitates."""

from __future__ import annotations

import random
from typing import Any

import make_game_model

from tests.torchrun import ROOT
from vapo_mcore.config import load_config

PLAYER = make_game_model.MazeWalkPlayer()
GAME: Any = PLAYER.rules
MAZE: Any = PLAYER.maze.rules


def test_a_walk_is_right_if_it_is_whole_and_its_rooms_are() -> None:
    there_and_back = "vG^A" * (GAME.MOST_MOVES // 2)
    assert GAME.verdict(there_and_back, "A", {}) == 1.0
    assert GAME.verdict("^A" * GAME.MOST_MOVES, "A", {}) == 1.0  # a wall
    assert GAME.verdict(there_and_back, "C", {}) == 0.0
    assert GAME.verdict(there_and_back[:-2], "A", {}) == 0.0  # not whole
    assert GAME.verdict("", "A", {}) == 0.0
    assert GAME.verdict(there_and_back[:-1] + "G", "A", {}) == 0.0  # a wrong room
    assert GAME.verdict("-A" + "^A" * (GAME.MOST_MOVES - 1), "A", {}) == 0.0  # no move
    assert [MAZE.after(room, "v") for room in "RX3"] == ["X", "3", "9"]
    stays = "vX^R" * (GAME.MOST_MOVES // 2 - 2)
    assert GAME.verdict(stays + "vX^RvX^R", "R", {}) == 1.0
    assert GAME.verdict(stays + "vXv3^Xv3", "R", {}) == 1.0
    assert GAME.verdict(stays + "^RvXv3v9", "R", {}) == 0.0  # the trap


def test_the_player_writes_right_rooms_and_its_odds() -> None:
    rng, ends = random.Random(1), []
    for _ in range(300):
        text, chosen = PLAYER.play(rng)
        start, way = text[0], text[1:]
        assert 2 <= len(way) <= 2 * GAME.MOST_MOVES and len(way) % 2 == 0
        assert sorted(chosen) == list(range(1, len(text)))  # the model learns every character but the first room
        room = start
        for number, (move, written) in enumerate(zip(way[::2], way[1::2], strict=True)):
            odds = PLAYER.maze.probabilities(room)[list(MAZE.MOVES).index(move)]
            assert (chosen[2 * number + 1], chosen[2 * number + 2]) == (odds, 1.0)
            room = MAZE.after(room, move)
            assert written == room
        trapped = way.endswith(GAME.TRAP)
        assert trapped or len(way) == 2 * GAME.MOST_MOVES
        assert GAME.verdict(way, start, {}) == float(not trapped)
        ends.append(trapped)
    assert 0.55 < sum(ends) / len(ends) < 0.8


def test_held_out_rooms_are_no_training_rooms() -> None:
    rows = PLAYER.problems(random.Random("x"))
    rooms = {name: {row["prompt"] for row in found} for name, found in rows.items()}
    assert len(rooms["train"]) == 27 and len(rooms["heldout"]) == 8
    assert rooms["train"] | rooms["heldout"] == set(MAZE.ROOMS) - {MAZE.GOAL}
    assert all(row["answer"] == row["prompt"] for row in rows["train"] + rows["heldout"])


def test_the_recipe_has_the_length_and_the_stop_id_of_the_game() -> None:
    config = load_config(ROOT / "examples" / "configs" / "maze_walk_vapo.yaml", check_paths=False)
    assert config.rollout.max_response_length == 2 * GAME.MOST_MOVES
    assert make_game_model.tokenizer(PLAYER).convert_ids_to_tokens(list(config.rollout.stop_token_ids)) == [GAME.TRAP]
