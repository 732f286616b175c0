"""The tolerances of all checks, each with its reason: the one table, which docs/certify.md shows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vapo_mcore.certify.record import Measurement


@dataclass(frozen=True)
class Tolerance:
    """The largest value that holds, by ``model.dtype``, or with ``least`` the smallest; ``reason``: where the number comes from."""

    name: str
    float32: float
    bfloat16: float
    reason: str
    least: bool = False

    def limit(self, dtype: str) -> float:
        return self.bfloat16 if dtype == "bfloat16" else self.float32


TABLE = (
    Tolerance(
        "trainer/mean",
        1e-4,
        0.08,
        "mean over positions and vocabulary of |dlogp| to transformers in float32. float32: sums of a few thousand products in another "
        "order, 1e-6 of logits of size 10, over tens of layers; bfloat16: 8 bits of mantissa (4e-3 relative) of logits of size 10, or "
        "3 times transformers' own rounding in bfloat16 where that is more (max and KL grow with it)",
    ),
    Tolerance("trainer/max", 5e-3, 2.0, "largest |dlogp| of the same: some 30 standard deviations, for the tails of the vocabulary"),
    Tolerance("trainer/kl", 1e-6, 0.02, "mean KL divergence of the same: half the square of a typical |dlogp| of likely tokens"),
    Tolerance(
        "trainer/top1",
        0.99,
        0.90,
        "share of positions with the same likeliest token; the rest are ties within rounding",
        least=True,
    ),
    Tolerance(
        "trainer/layer",
        1e-4,
        0.10,
        "difference of a layer's hidden states to those of transformers in float32, relative to their norm: rounding grows with the root "
        "of the number of layers",
    ),
    Tolerance(
        "engine/mean",
        5e-4,
        0.10,
        "mean |dlogp| of sampled tokens between engine and trainer: two implementations, each as far from the exact value as above; an "
        "ignored temperature is also found below it (log-probs of temperature 1 are then less than half as far)",
    ),
    Tolerance("engine/max", 1e-2, 1.5, "largest |dlogp| of sampled tokens: unlikely tokens, for which a rounded logit counts fully"),
    Tolerance("engine/kl", 1e-5, 0.02, "mean KL divergence of full distributions on fixed texts at temperature 1"),
    Tolerance(
        "invariance/loss",
        1e-4,
        0.02,
        "relative difference of a step's loss between packings and layouts: sums of signed terms, in another order",
    ),
    Tolerance("invariance/gradient_norm", 1e-4, 0.03, "the same of the gradient norm, which is summed in float32 in either dtype"),
    Tolerance(
        "critic/export",
        2e-5,
        0.05,
        "largest difference of values to transformers' token classifier with the exported weights in float32, relative to the root mean "
        "square of the values; or 3 times transformers' own rounding in bfloat16 where that is more",
    ),
    Tolerance(
        "critic/packing",
        2e-5,
        0.05,
        "largest difference of values between a sequence alone and packed with others, relative to the root mean square of the values: "
        "matrix products of other sizes sum in another order",
    ),
    Tolerance(
        "invariance/known_change",
        0.01,
        0.01,
        "relative difference of ratio, KL, importance weight and surrogate to their values for a known change of log-probs: rounding of "
        "float32 means over all tokens is far below; an ignored ratio or weight is off by 2 % or more",
    ),
    Tolerance(
        "critic/head_cosine",
        0.999,
        0.999,
        "cosine of the value head with each row of the policy's output layer: a copy has 1, also after rounding; unrelated rows have "
        "about 1 over the root of the hidden size",
    ),
    Tolerance(
        "graders/other_truths",
        0.05,
        0.05,
        "share of the truths of other rows that are graded right: different rows can have the same answer",
    ),
    Tolerance(
        "against/growth",
        2.0,
        2.0,
        "`--against`: factor by which a layer's difference to transformers may grow, on top of a tenth of `trainer/layer`: kernels differ "
        "by less in rounding; log-probs of tokens may move by `trainer/max` and `engine/max`",
    ),
    Tolerance(
        "rates/slower",
        2.0,
        2.0,
        "how many times slower than plan assumes a GPU may be before a warning: the assumptions are rough, and a fault (a slow link, "
        "throttled clocks) costs more",
    ),
)

BY_NAME = {tolerance.name: tolerance for tolerance in TABLE}


def judge(what: str, value: float, name: str, dtype: str, *, remedy: str, factor: float = 1.0, suffix: str = "") -> Measurement:
    """Compare a number with its tolerance (times ``factor``, at least); one that is not finite fails."""
    tolerance = BY_NAME[name]
    limit = tolerance.limit(dtype) if tolerance.least else tolerance.limit(dtype) * max(1.0, factor)
    good = math.isfinite(value) and (value >= limit if tolerance.least else value <= limit)
    relation = ">=" if tolerance.least else "<="
    return Measurement(
        what,
        "holds" if good else "fails",
        f"{value:.3g}{suffix}",
        f"{relation} {limit:.3g} ({dtype})",
        "" if good else remedy,
        value if math.isfinite(value) else None,
    )


def markdown() -> list[str]:
    """Rows of the table in docs/certify.md."""
    lines = ["| tolerance | float32 | bfloat16 | reason |", "|---|---|---|---|"]
    for tolerance in TABLE:
        relation = ">=" if tolerance.least else "<="
        reason = tolerance.reason.replace("|", r"\|")
        cells = (f"`{tolerance.name}`", f"{relation} {tolerance.float32:g}", f"{relation} {tolerance.bfloat16:g}", reason)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(markdown()))
