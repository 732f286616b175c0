"""Write the tutorial's data set: tutorial/train.jsonl and tutorial/heldout.jsonl (docs/tutorial.md).

    python examples/tutorial/data.py

A row has a prompt, its ground truth, and one further column by which the evaluation is split. The problems are in the language of
models/tiny, "start with 37 and add 58 three times", written ``_/c+58:730;``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS = "_abcdefghijklmn"
SIZES = {"train": 600, "heldout": 100}


def problems() -> list[dict[str, str]]:
    """Return distinct problems in a fixed random order."""
    rows = {}
    generator = random.Random(7)
    while len(rows) < sum(SIZES.values()):
        start, addend, times = generator.randint(0, 99), generator.randint(10, 60), generator.randint(2, 8)
        prompt = f"_/{LETTERS[times]}+{addend}:{f'{start:03d}'[::-1]};"
        rows[prompt] = {"prompt": prompt, "answer": str(start + times * addend), "length": "short" if times < 5 else "long"}
    return list(rows.values())


def main() -> None:
    rows = problems()
    Path("tutorial").mkdir(exist_ok=True)
    for name, size in SIZES.items():
        path = Path("tutorial") / f"{name}.jsonl"
        path.write_text("".join(json.dumps(rows.pop()) + "\n" for _ in range(size)), encoding="utf-8")
        print(f"{path}: {size} problems")


if __name__ == "__main__":
    main()
