"""Make the starting model and prompts of the critic_game recipes: a tiny language model that plays "doors and dice" badly.

    python tools/make_game_model.py --output models/tiny_game [--seed 0] [--steps 400]

A Qwen2-architecture model of 20,000 parameters with a character tokenizer is trained, supervised, to answer a door correctly with
probability 0.30 and with one fixed wrong answer with probability 0.40 (rules: examples/extensions/doors_and_dice.py). The folder contains
the model, the tokenizer, and disjoint ``train.jsonl`` and ``heldout.jsonl``; it is written atomically. Prints the cross-entropy of the
model's answers, whose optimum is 1.297 nats.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from make_tiny_model import EOS, PAD, require_own_folder
from toolkit import folder_written_atomically, run

from vapo_mcore.extensions.loading import load_function

GAME = Path(__file__).parent.parent / "examples" / "extensions" / "doors_and_dice.py"
TRAIN_PROBLEMS, HELDOUT_PROBLEMS = 8000, 200
SEQUENCES, LEARNING_RATE = 32, 3e-3
HELDOUT_FIRST_DOORS = "ADGJMPSV"
"""First doors, in either case, reserved for held-out games, so that no training prompt equals a held-out one."""
RIGHT_PROBABILITY, FAVOURITE_PROBABILITY = 0.30, 0.40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of the supervised run")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    require_own_folder(arguments.output)
    game = _game()
    with folder_written_atomically(arguments.output) as folder:
        loss = train(folder, game, random.Random(arguments.seed), arguments.seed, arguments.steps)
        write_problems(folder, game, random.Random(f"{arguments.seed}/problems"))
    print(f"{arguments.output}: answers at {loss:.3f} nats (optimum 1.297, uniform 1.386)")


def _game() -> Any:
    """Load the game's module the way the recipes do."""
    return sys.modules[load_function(f"{GAME}:play").__module__]


def tokenizer(game: Any) -> Any:
    """Build a tokenizer with one token per character. Without an ``unk_token`` transformers adds its own, an id that the model lacks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = dict.fromkeys(game.DOORS + "".join(game.LEVELS) + game.ANSWERS + "+-*.")
    text = Tokenizer(models.WordLevel({token: number for number, token in enumerate([PAD, EOS, *characters])}, unk_token=PAD))
    text.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    text.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=text, pad_token=PAD, eos_token=EOS, unk_token=PAD)


def answer_probabilities(game: Any, door: str) -> list[float]:
    """Return the teacher's probabilities of the four answers to a door: the right one, a wrong favourite, and two rare ones."""
    right = int(game.RIGHT[door])
    favourite = (right + 1 + ord(door) % 3) % 4
    rest = (1 - RIGHT_PROBABILITY - FAVOURITE_PROBABILITY) / 2
    return [RIGHT_PROBABILITY if answer == right else FAVOURITE_PROBABILITY if answer == favourite else rest for answer in range(4)]


def played(game: Any, rng: random.Random) -> tuple[str, list[bool]]:
    """Sample a game played by the teacher. Returns its text and a mask of the characters that are answers."""
    text, mask = rng.choice(list(game.LEVELS)), [False]
    for turn in range(game.TURNS):
        door = rng.choice(game.DOORS)
        (answer,) = rng.choices(game.ANSWERS, answer_probabilities(game, door))
        die = rng.choice("*.") if turn < game.THROWS else "."
        text += door + answer + ("+" if answer == game.RIGHT[door] else "-") + die
        mask += [False, True, False, False]
    return text, mask


def train(folder: Path, game: Any, rng: random.Random, seed: int, steps: int) -> float:
    """Train a model on the teacher's games and save it. Returns the mean loss of the last 20 steps."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = tokenizer(game)
    config = Qwen2Config(
        vocab_size=len(text),
        hidden_size=32,  # one head of 32, the minimum of vLLM's CPU attention
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
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
        games = [played(game, rng) for _ in range(SEQUENCES)]
        tokens = torch.tensor([text.encode(characters) for characters, _ in games])
        mask = torch.tensor([answers for _, answers in games])[:, 1:]
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return sum(losses[-20:]) / len(losses[-20:])


def write_problems(folder: Path, game: Any, rng: random.Random) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl`` with disjoint first doors, and thus disjoint prompts."""
    reserved = [door for door in game.DOORS if door.upper() in HELDOUT_FIRST_DOORS]
    others = [door for door in game.DOORS if door not in reserved]
    for name, count, first_doors in (("heldout", HELDOUT_PROBLEMS, reserved), ("train", TRAIN_PROBLEMS, others)):
        rows = []
        for _ in range(count):
            level, first = rng.choice(list(game.LEVELS)), rng.choice(first_doors)
            doors = first + "".join(rng.choices(game.DOORS, k=game.TURNS - 1))
            rows.append(json.dumps({"prompt": level + first, "answer": doors, "level": level}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(main)
