"""Known cases with right values from an independent float64 oracle (tests/cases/*.json), in float32 at 1e-5."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vapo_mcore.algorithm.advantages import group_advantages, packed_gae, whiten
from vapo_mcore.algorithm.lambdas import length_adaptive_lambda
from vapo_mcore.algorithm.losses import explained_variance, policy_loss, value_loss
from vapo_mcore.algorithm.shaping import soft_overlong_penalty

CASES = Path(__file__).parents[2] / "cases"
TOLERANCE = 1e-5


def gae(rewards: Any, values: Any, mask: Any, cu_seqlens: Any, lam: Any, gamma: float, bootstrap: Any) -> dict[str, Any]:
    advantages, returns = packed_gae(rewards, values, mask, cu_seqlens, lam, gamma, bootstrap)
    assert advantages.dtype == returns.dtype == torch.float32
    return {"advantages": advantages, "returns": returns}


def policy(**inputs: Any) -> dict[str, Any]:
    loss, stats = policy_loss(**inputs)
    return {"loss": loss, **stats}


def value(values: Any, old_values: Any, returns: Any, mask: Any, clip: float | None) -> dict[str, Any]:
    loss, stats = value_loss(values, old_values, returns, mask, clip=clip)
    return {"loss": loss, **stats, "explained_variance": explained_variance(values, returns, mask)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "group_advantages": group_advantages,
    "length_adaptive_lambda": length_adaptive_lambda,
    "packed_gae": gae,
    "policy_loss": policy,
    "soft_overlong_penalty": soft_overlong_penalty,
    "value_loss": value,
    "whiten": whiten,
}
COUNTS = {
    "group_advantages": 3,
    "length_adaptive_lambda": 1,
    "packed_gae": 52,
    "policy_loss": 9,
    "soft_overlong_penalty": 9,
    "value_loss": 3,
    "whiten": 3,
}


def close(got: Any, expected: Any, name: str) -> None:
    got, expected = torch.as_tensor(got).double(), torch.as_tensor(expected, dtype=torch.float64)
    assert got.shape == expected.shape, name
    difference = (got - expected).abs().max().item() if got.numel() else 0.0
    assert difference <= TOLERANCE, f"{name} is off by {difference}"


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_shared_cases(name: str) -> None:
    cases = json.loads((CASES / f"{name}.json").read_text())
    assert len(cases) == COUNTS[name]
    for number, case in enumerate(cases):
        inputs = {key: torch.tensor(given) if isinstance(given, list) else given for key, given in case["inputs"].items()}
        got, expected = FUNCTIONS[name](**inputs), case["expected"]
        if isinstance(expected, dict):
            for key, want in expected.items():
                close(got[key], want, f"{name}[{number}].{key}")
        else:
            close(got, expected, f"{name}[{number}]")
