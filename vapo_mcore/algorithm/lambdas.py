"""GAE's lambda per response: length-adaptive (VAPO), sigmoid of the length (from a review of VAPO), and their statistics."""

import torch
from torch import Tensor


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Compute lambda_i = 1 - 1/(alpha l_i), so that the weights of the TD errors sum to 1/(1 - lambda) = alpha l (VAPO, Eqs. 4 and 5).

    lengths: [n], response tokens. Returns float64 [n], clamped to [0, 1]: responses of up to 1/alpha tokens, including empty ones,
    get 0. float64, because rounding a lambda near 1 to float32 is visible after thousands of tokens. Raises ``ValueError`` for
    alpha <= 0 and for negative lengths.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    lengths = torch.as_tensor(lengths).double()
    if bool((lengths < 0).any()):
        raise ValueError("lengths must not be negative")
    return (1.0 - 1.0 / (alpha * lengths)).clamp(0.0, 1.0)  # length 0: 1 - inf, clamped to 0


def sigmoid_lambda(
    lengths: Tensor, lam_min: float = 0.3, lam_max: float = 0.95, mean: float | None = None, std: float | None = None
) -> Tensor:
    """Compute lambda_i = lam_min + (lam_max - lam_min) sigmoid((l_i - mean) / max(std, 1)); float64 [n].

    From a published review of VAPO, not from the paper. ``mean`` and ``std`` (population) are those of the whole rollout batch over all
    ranks; with None they are computed from ``lengths``, which must then hold the whole batch.
    """
    if not 0.0 <= lam_min <= lam_max <= 1.0:
        raise ValueError(f"0 <= lam_min <= lam_max <= 1 is required, got {lam_min} and {lam_max}")
    lengths = torch.as_tensor(lengths).double()
    if lengths.numel() == 0:
        return lengths
    centre = lengths.mean() if mean is None else torch.tensor(mean, dtype=torch.float64, device=lengths.device)
    spread = lengths.std(correction=0) if std is None else torch.tensor(std, dtype=torch.float64, device=lengths.device)
    return lam_min + (lam_max - lam_min) * torch.sigmoid((lengths - centre) / spread.clamp(min=1.0))


def lambda_statistics(lam: Tensor) -> dict[str, float | list[int]]:
    """Compute ``mean``, ``min``, ``max``, ``zero_frac`` (fraction at exactly 0) and ``histogram`` (20 equal bins of [0, 1]).

    Needs no reduction over ranks: rows are replicated. Without responses all numbers are 0.
    """
    lam = torch.as_tensor(lam).double().cpu()
    histogram = [int(count) for count in torch.histc(lam, bins=20, min=0.0, max=1.0)]
    if lam.numel() == 0:
        return {"mean": 0.0, "min": 0.0, "max": 0.0, "zero_frac": 0.0, "histogram": histogram}
    summary = torch.stack([lam.mean(), lam.min(), lam.max(), (lam == 0).double().mean()]).tolist()
    return {**dict(zip(("mean", "min", "max", "zero_frac"), summary, strict=True)), "histogram": histogram}
