"""Everything that a user can add, in one file: a task, its reward, an advantage estimator and a loss term.

    vapo-mcore train examples/configs/extensions.yaml

Run from the repository's root. ``examples/configs/extensions.yaml`` names these functions; docs/extending.md says what each gets and
must return. Verifiers run in processes without torch: a file that holds one imports torch for the type checker alone, or inside the
functions that need it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from vapo_mcore.data.rollout_batch import Rows

LETTERS = "_abcdefghijklmn"


def repeated_sums(*, count: int, seed: int = 0, longest: int = 14) -> Iterator[dict[str, Any]]:
    """A task: one row a problem, here of the quickstart's kind, "start with 37 and add 58 three times", written ``_/c+58:730;``.

    The same rows on every rank and at every start, so the randomness has a seed of its own.
    """
    generator = random.Random(seed)
    for _ in range(count):
        start, addend, times = generator.randint(0, 99), generator.randint(10, 60), generator.randint(0, longest)
        prompt = f"_/{LETTERS[times]}+{addend}:{f'{start:03d}'[::-1]};"
        yield {"prompt": prompt, "answer": str(start + times * addend), "times": times}


def nearly_right(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """A reward with partial credit: 1 for the right number, 0.2 for one with as many digits. (1 alone counts as correct.)

    ``metadata`` holds the row's other columns, here ``times``.
    """
    boxes = re.findall(r"\\boxed\{(\d+)\}", response)
    if not boxes:
        return 0.0
    return 1.0 if boxes[-1] == ground_truth else 0.2 * (len(boxes[-1]) == len(ground_truth))


def against_the_best_other(mask: Tensor, cu_seqlens: Tensor, rows: Rows, row_ids: Tensor, *, share: float = 1.0) -> Tensor:
    """An advantage estimator: reward minus ``share`` times the best reward of the other responses to the same prompt.

    ``rows`` is the whole rollout, the same on all ranks, so that groups are complete wherever their responses are trained;
    ``row_ids`` says which rows the packed sequences of this rank are.
    """
    from vapo_mcore.algorithm.segments import broadcast_to_tokens

    same = (rows.group[:, None] == rows.group[None, :]) & rows.graded[None, :]
    same.fill_diagonal_(False)
    others = rows.reward.expand(len(rows), -1).masked_fill(~same, float("-inf")).amax(1)
    baseline = others.where(same.any(1), rows.reward)  # alone in its group: advantage 0 for share = 1
    advantages = (rows.reward - share * baseline).where(rows.graded, 0.0)
    return broadcast_to_tokens(advantages[row_ids].to(mask.device), mask, cu_seqlens)


def distance_to_the_sampler(logprobs: Tensor, old_logprobs: Tensor, *, power: float = 2.0) -> Tensor:
    """A loss term: |log ratio| ** power of each response token, which holds the policy near the one that sampled.

    One number a token from that token's own inputs; weights and sums are the trainer's, so that the result does not depend on packing.
    """
    return (logprobs - old_logprobs).abs().pow(power)
