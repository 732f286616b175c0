"""Make the starting model and prompts of the critic_game or maze recipes: a tiny language model that plays the game badly.

    python tools/make_game_model.py --output models/tiny_game [--seed 0] [--steps 400]
    python tools/make_game_model.py --game maze --output models/tiny_maze
    python tools/make_game_model.py --game maze_walk --output models/tiny_maze_walk

A Qwen2-architecture model of 20,000 parameters with a character tokenizer is trained, supervised, on the games of a bad player. In
doors_and_dice it answers a door correctly with probability 0.30 and with one fixed wrong answer with probability 0.40; in maze and
maze_walk it walks at random, and into a wall rarely (rules: examples/extensions/GAME.py). The folder contains the model, the tokenizer,
and disjoint ``train.jsonl`` and ``heldout.jsonl``; it is written atomically. Prints the cross-entropy of the model's answers and that of
the player.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from make_tiny_model import EOS, PAD, require_own_folder
from toolkit import folder_written_atomically, run

from vapo_mcore.extensions.loading import load_function

EXTENSIONS = Path(__file__).parent.parent / "examples" / "extensions"
SEQUENCES, LEARNING_RATE = 32, 3e-3


class Player(ABC):
    """A bad player of a game, and the game's prompts. ``rules`` is the module of the game as the recipes load it."""

    name: ClassVar[str]
    entry: ClassVar[str] = "play"
    """Name of the game's environment or verifier."""
    positions: ClassVar[int] = 256
    """``max_position_embeddings`` of the model."""

    def __init__(self) -> None:
        self.rules: Any = sys.modules[load_function(f"{EXTENSIONS / self.name}.py:{self.entry}").__module__]

    @property
    @abstractmethod
    def characters(self) -> str:
        """All characters of the game's texts; each is a token."""

    @abstractmethod
    def play(self, rng: random.Random) -> tuple[str, dict[int, float]]:
        """Play a game. Returns its text, and the probability with which the character at each position was chosen, of the player's own."""

    @abstractmethod
    def problems(self, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of ``heldout`` and ``train``, which share no prompt."""


class DoorsAndDicePlayer(Player):
    name = "doors_and_dice"
    HELDOUT_FIRST_DOORS = "ADGJMPSV"
    """First doors, in either case, reserved for held-out games, so that no training prompt equals a held-out one."""
    RIGHT_PROBABILITY, FAVOURITE_PROBABILITY = 0.30, 0.40
    ROWS: ClassVar[dict[str, int]] = {"heldout": 200, "train": 8000}

    @property
    def characters(self) -> str:
        return self.rules.DOORS + "".join(self.rules.LEVELS) + self.rules.ANSWERS + "+-*."

    def probabilities(self, door: str) -> list[float]:
        """Return the probabilities of the four answers to a door: the right one, a wrong favourite, and two rare ones."""
        right = int(self.rules.RIGHT[door])
        favourite = (right + 1 + ord(door) % 3) % 4
        known = {right: self.RIGHT_PROBABILITY, favourite: self.FAVOURITE_PROBABILITY}
        return [known.get(answer, (1 - sum(known.values())) / 2) for answer in range(4)]

    def play(self, rng: random.Random) -> tuple[str, dict[int, float]]:
        game, chosen = self.rules, {}
        text = rng.choice(list(game.LEVELS))
        for turn in range(game.TURNS):
            door = rng.choice(game.DOORS)
            (answer,) = rng.choices(game.ANSWERS, self.probabilities(door))
            chosen[len(text) + 1] = self.probabilities(door)[int(answer)]
            die = rng.choice("*.") if turn < game.THROWS else "."
            text += door + answer + ("+" if answer == game.RIGHT[door] else "-") + die
        return text, chosen

    def problems(self, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
        game = self.rules
        reserved = [door for door in game.DOORS if door.upper() in self.HELDOUT_FIRST_DOORS]
        first_doors = {"heldout": reserved, "train": [door for door in game.DOORS if door not in reserved]}
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in self.ROWS}
        for name, count in self.ROWS.items():
            for _ in range(count):
                level, first = rng.choice(list(game.LEVELS)), rng.choice(first_doors[name])
                doors = first + "".join(rng.choices(game.DOORS, k=game.TURNS - 1))
                rows[name].append({"prompt": level + first, "answer": doors, "level": level})
        return rows


class MazePlayer(Player):
    name = "maze"
    ANY_MOVE = 0.15
    """Probability of a move that ignores the walls."""
    HELDOUT_ROOMS = 8

    @property
    def characters(self) -> str:
        return self.rules.ROOMS + self.rules.CLOCK + "".join(self.rules.MOVES) + "+-"

    def probabilities(self, room: str) -> list[float]:
        """Return the probabilities of the four moves: equal among those that a wall does not stop."""
        possible = [self.rules.after(room, move) != room for move in self.rules.MOVES]
        return [self.ANY_MOVE / 4 + (1 - self.ANY_MOVE) * free / sum(possible) for free in possible]

    def play(self, rng: random.Random) -> tuple[str, dict[int, float]]:
        game, chosen = self.rules, {}
        room, budget = rng.choice(game.ROOMS[:-1]), rng.choice(game.BUDGETS)
        text, turns, reply = "", [], room + game.clock(budget)
        first = room
        while reply:
            text += reply
            (move,) = rng.choices(list(game.MOVES), self.probabilities(room))
            chosen[len(text)] = self.probabilities(room)[list(game.MOVES).index(move)]
            text, room = text + move, game.after(room, move)
            turns.append(move)
            observed = game.play(turns, first, {"moves": budget})
            reply = observed.text if observed else ""
        return text, chosen

    def problems(self, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
        game = self.rules
        reserved = set(rng.sample(game.ROOMS[:-1], self.HELDOUT_ROOMS))
        rows: dict[str, list[dict[str, Any]]] = {"heldout": [], "train": []}
        for room in game.ROOMS[:-1]:
            for budget in game.BUDGETS:
                row = {"prompt": room + game.clock(budget), "answer": room, "moves": budget}
                rows["heldout" if room in reserved else "train"].append(row)
        return rows


class MazeWalkPlayer(Player):
    """The player of the maze, who also writes the room after each move."""

    name, entry, positions = "maze_walk", "verdict", 512

    def __init__(self) -> None:
        super().__init__()
        self.maze = MazePlayer()

    @property
    def characters(self) -> str:
        return self.maze.rules.ROOMS + "".join(self.maze.rules.MOVES)

    def play(self, rng: random.Random) -> tuple[str, dict[int, float]]:
        maze, chosen = self.maze.rules, {}
        text = room = rng.choice(maze.ROOMS[:-1])
        for _ in range(self.rules.MOST_MOVES):
            probabilities = self.maze.probabilities(room)
            (move,) = rng.choices(list(maze.MOVES), probabilities)
            chosen[len(text)] = probabilities[list(maze.MOVES).index(move)]
            chosen[len(text) + 1] = 1.0
            room = maze.after(room, move)
            text += move + room
            if room == maze.GOAL:
                break
        return text, chosen

    def problems(self, rng: random.Random) -> dict[str, list[dict[str, Any]]]:
        rooms = list(self.maze.rules.ROOMS[:-1])
        reserved = set(rng.sample(rooms, self.maze.HELDOUT_ROOMS))
        rows = [{"prompt": room, "answer": room} for room in rooms]
        return {
            "heldout": [row for row in rows if row["prompt"] in reserved],
            "train": [row for row in rows if row["prompt"] not in reserved],
        }


PLAYERS = {player.name: player for player in (DoorsAndDicePlayer, MazePlayer, MazeWalkPlayer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--game", choices=list(PLAYERS), default="doors_and_dice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the supervised run")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    require_own_folder(arguments.output)
    player = PLAYERS[arguments.game]()
    with folder_written_atomically(arguments.output) as folder:
        loss, own = train(folder, player, random.Random(arguments.seed), arguments.seed, arguments.steps)
        write_problems(folder, player, random.Random(f"{arguments.seed}/problems"))
    print(f"{arguments.output}: answers at {loss:.3f} nats (the imitated player's own: {own:.3f}, uniform {math.log(4):.3f})")


def tokenizer(player: Player) -> Any:
    """Build a tokenizer with one token per character. Without an ``unk_token`` transformers adds its own, an id that the model lacks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys(player.characters)
    text = Tokenizer(models.WordLevel({token: number for number, token in enumerate([PAD, EOS, *characters])}, unk_token=PAD))
    text.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    text.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=text, pad_token=PAD, eos_token=EOS, unk_token=PAD)


def train(folder: Path, player: Player, rng: random.Random, seed: int, steps: int) -> tuple[float, float]:
    """Train a model on the player's games and save it. Returns the mean cross-entropy of model and player in the last 20 steps."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = tokenizer(player)
    config = Qwen2Config(
        vocab_size=len(text),
        hidden_size=32,  # one head of 32, the minimum of vLLM's CPU attention
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=player.positions,
        rope_theta=1000.0,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for _ in range(steps):
        games = [player.play(rng) for _ in range(SEQUENCES)]
        longest = max(len(characters) for characters, _ in games)
        tokens = torch.tensor([text.encode(characters.ljust(longest, " ")) for characters, _ in games])  # a space is unknown: padding
        own = torch.tensor([[chosen.get(position, 0.0) for position in range(1, longest)] for _, chosen in games])
        mask = own > 0
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append((float(loss.detach()), -float(own[mask].log().mean())))
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    last = losses[-20:]
    return sum(loss for loss, _ in last) / len(last), sum(own for _, own in last) / len(last)


def write_problems(folder: Path, player: Player, rng: random.Random) -> None:
    """Write ``heldout.jsonl`` and ``train.jsonl``, one problem a line."""
    for name, rows in player.problems(rng).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    run(main)
