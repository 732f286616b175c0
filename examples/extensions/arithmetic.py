"""Example of all extension points in one file: a task, its reward, an advantage estimator and a loss term.

    vapo-mcore train examples/configs/extensions.yaml

Run from the root of the repository. ``examples/configs/extensions.yaml`` refers to these functions; docs/extending.md describes their
inputs and results. Verifiers run in processes without torch, so a file with a verifier imports torch only for type checking or inside the
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
    """Task: yield one row per problem of the quickstart's kind: "start with 37 and add 58 three times" is written ``_/c+58:730;``.

    The rows must be the same on every rank and at every start, so the generator is seeded.
    """
    generator = random.Random(seed)
    for _ in range(count):
        start, addend, times = generator.randint(0, 99), generator.randint(10, 60), generator.randint(0, longest)
        prompt = f"_/{LETTERS[times]}+{addend}:{f'{start:03d}'[::-1]};"
        yield {"prompt": prompt, "answer": str(start + times * addend), "times": times}


def nearly_right(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Reward with partial credit: 1 for the right number, 0.2 for a number with as many digits. Only 1 counts as correct.

    ``metadata`` contains the other columns of the row, here ``times``.
    """
    boxes = re.findall(r"\\boxed\{(\d+)\}", response)
    if not boxes:
        return 0.0
    return 1.0 if boxes[-1] == ground_truth else 0.2 * (len(boxes[-1]) == len(ground_truth))


def against_the_best_other(mask: Tensor, cu_seqlens: Tensor, rows: Rows, row_ids: Tensor, *, share: float = 1.0) -> Tensor:
    """Advantage estimator: reward minus ``share`` times the best reward of the other responses to the same prompt.

    ``rows`` is the whole rollout, replicated on all ranks, so groups are complete. ``row_ids`` maps this rank's packed sequences to rows.
    """
    from vapo_mcore.algorithm.segments import broadcast_to_tokens

    same = (rows.group[:, None] == rows.group[None, :]) & rows.graded[None, :]
    same.fill_diagonal_(False)
    others = rows.reward.expand(len(rows), -1).masked_fill(~same, float("-inf")).amax(1)
    baseline = others.where(same.any(1), rows.reward)  # alone in its group: advantage 0 for share = 1
    advantages = (rows.reward - share * baseline).where(rows.graded, 0.0)
    return broadcast_to_tokens(advantages[row_ids].to(mask.device), mask, cu_seqlens)


def distance_to_the_sampler(logprobs: Tensor, old_logprobs: Tensor, *, power: float = 2.0) -> Tensor:
    """Loss term: |log ratio| ** power of each response token, which keeps the policy close to the sampling policy.

    Return one value per token that depends only on this token's inputs. The trainer weights and sums the values, so the result does not
    depend on packing.
    """
    return (logprobs - old_logprobs).abs().pow(power)
