"""GAE's lambda for each response: length-adaptive (VAPO), sigmoid of the length (a review's variant), and their statistics."""

import torch
from torch import Tensor


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """lambda_i = 1 - 1/(alpha l_i), so that the weights of the TD errors sum to 1/(1 - lambda) = alpha l (VAPO, Eqs. 4 and 5).

    lengths: [n], response tokens. Returns float64 [n], clamped to [0, 1]: responses of up to 1/alpha tokens, empty ones too, get
    0 and never a negative number. float64 because near 1 the rounding of a float32 lambda is visible after thousands of tokens.
    ``ValueError`` for alpha <= 0 and for negative lengths.
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
    """lambda_i = lam_min + (lam_max - lam_min) sigmoid((l_i - mean) / max(std, 1)); float64 [n].

    The variant of a published review of VAPO, not of the paper. ``mean`` and ``std`` (population) are those of the whole rollout
    batch over all ranks; None takes them from ``lengths``, which is then that whole batch.
    """
    if not 0.0 <= lam_min <= lam_max <= 1.0:
        raise ValueError(f"0 <= lam_min <= lam_max <= 1 is required, got {lam_min} and {lam_max}")
    lengths = torch.as_tensor(lengths).double()
    if lengths.numel() == 0:
        return lengths
    centre = lengths.mean() if mean is None else torch.tensor(mean, dtype=torch.float64, device=lengths.device)
    spread = lengths.std(correction=0) if std is None else torch.tensor(std, dtype=torch.float64, device=lengths.device)
    return lam_min + (lam_max - lam_min) * torch.sigmoid((lengths - centre) / spread.clamp(min=1.0))


def lambda_statistics(lam: Tensor, bins: int = 20) -> dict[str, float | list[int]]:
    """``mean``, ``min``, ``max``, ``zero_frac`` (share at exactly 0) and ``histogram`` (counts in ``bins`` equal bins of [0, 1]).

    Over all responses given; rows are known on every rank, so no reduction is needed. Without responses the numbers are 0.
    """
    lam = torch.as_tensor(lam).double().cpu()
    histogram = [int(count) for count in torch.histc(lam, bins=bins, min=0.0, max=1.0)]
    if lam.numel() == 0:
        return {"mean": 0.0, "min": 0.0, "max": 0.0, "zero_frac": 0.0, "histogram": histogram}
    summary = torch.stack([lam.mean(), lam.min(), lam.max(), (lam == 0).double().mean()]).tolist()
    return {**dict(zip(("mean", "min", "max", "zero_frac"), summary, strict=True)), "histogram": histogram}
