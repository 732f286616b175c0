"""All metrics of a step are the same for any packing and layout, and those over tokens are what plain loops over all tokens give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forks import run_ranks
from tests.rollout_models import write_model, write_reward_model
from tests.training_setup import assert_same_means, read_metrics, write_setup, write_tokenizer

WORKER = Path(__file__).with_name("metrics_worker.py")
OF_THE_LAYOUT = ("time/", "memory/", "packing/", "generate/", "tokens/per_second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("metrics"))
    write_model("qwen3_moe", folder / "mixture")
    write_tokenizer(folder / "mixture")
    write_reward_model(folder / "model", folder / "reward_model")
    result = run_ranks(WORKER, 2, str(folder), timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found = read_metrics(folder / name)
    assert [row["stage"] for row in found] == ["value_pretraining", "rl"]
    return found


PAIRS = [("dp2", "cp2_large"), ("dp2", "pp2_small"), ("rollout_dp2", "rollout_tp2_small")]
OF_THE_CRITIC = [
    ("dp2", "critic_tp2"),
    ("dp2", "critic_pp2"),
    ("dp2", "critic_cp2"),
    ("rollout_dp2", "rollout_tp2_critic_dp2"),
    ("rollout_tp2_small", "rollout_tp2_critic_pp2"),
]
"""A critic in another layout than its policy."""


@pytest.mark.parametrize(("one", "other"), PAIRS + OF_THE_CRITIC)
def test_every_metric_is_the_same(folder: Path, one: str, other: str) -> None:
    assert_same(rows(folder, one), rows(folder, other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("segments_dp2", "segments_critic_tp2"),
        ("segments_dp2", "segments_tp2_critic_dp2"),
        ("mixtures_dp2", "mixtures_ep2_critic_pp2"),
        ("dense_critic_dp2", "ep2_dense_critic_tp2"),
        ("dense_critic_dp2", "ep2_tp2_dense_critic_dp2"),
    ],
)
def test_two_layouts_with_segments_and_beside_a_mixture(folder: Path, one: str, other: str) -> None:
    """Critics of the policy's architecture in another layout, and a dense one beside a mixture; two RL steps."""
    mine = read_metrics(folder / one)
    assert [row["stage"] for row in mine] == ["value_pretraining", "rl", "rl"]
    shown = {"segments_dp2": "horizon/cuts_ended", "mixtures_dp2": "critic/experts_replayed_frac"}.get(one, "policy/experts_replayed_frac")
    assert mine[2][shown] > 0
    assert ("critic/experts_replayed_frac" in mine[2]) == (one == "mixtures_dp2")
    assert_same(mine, read_metrics(folder / other), abs=1e-5)  # explained variance of a few tokens, after two steps


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]], abs: float = 2e-6) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            if isinstance(mine[name], list):
                assert_same_means(mine[name], theirs[name], name, rel=2e-4, abs=abs)
            elif not name.startswith(OF_THE_LAYOUT):
                expected = pytest.approx(theirs[name], rel=2e-4, abs=abs) if isinstance(mine[name], float) else theirs[name]
                assert mine[name] == expected, name


def test_the_step_shows_something_in_every_metric(folder: Path) -> None:
    """Else equal numbers would say little."""
    row = rows(folder, "dp2")[1]
    for name in ("clip_frac_high", "clip_frac_low", "clip_frac_dual", "approx_kl", "kl_loss", "nll_loss", "entropy", "term/distance"):
        assert row[f"policy/{name}"] > 1e-5, name
    for name in ("critic/clip_frac", "mismatch/beyond_cap_frac", "gae/lambda_zero_frac", "response/truncated_frac", "imitation/nll"):
        assert row[name] > 0.01, name
    assert row["gae/lambda_zero_frac"] < 1 and abs(row["policy/ratio_mean"] - 1) > 1e-5
    assert (row["policy/updates"], row["critic/updates"]) == (6, 12)
    packs = {name: rows(folder, name)[1]["packing/microbatches"] for name in ("pp2_small", "dp2", "cp2_large")}
    assert packs["pp2_small"] > packs["dp2"] > packs["cp2_large"] == 3, packs


def tokens(folder: Path, case: str) -> dict[str, Tensor]:
    """The response tokens of both data-parallel ranks, in float64."""
    parts = [torch.load(folder / f"{case}_rank{rank}.pt", weights_only=True) for rank in range(2)]
    return {name: torch.cat([part[name][part["response_mask"]] for part in parts]).double() for name in parts[0]}


def test_metrics_over_tokens_are_plain_means_over_all_tokens(folder: Path) -> None:
    row, found = rows(folder, "dp2")[1], tokens(folder, "dp2")
    count = found["old_logprobs"].numel()
    difference = found["old_logprobs"] - found["rollout_logprobs"]
    ratio = difference.exp()
    reference = found["ref_logprobs"] - found["old_logprobs"]
    values, returns = found["values"], found["returns"]
    expected = {
        "tokens/trained": count,
        "mismatch/logprob_abs_mean": difference.abs().sum() / count,
        "mismatch/logprob_abs_max": difference.abs().max(),
        "mismatch/kl": (ratio - 1 - difference).sum() / count,
        "mismatch/ess": ratio.sum() ** 2 / (count * (ratio**2).sum()),
        "mismatch/beyond_cap_frac": (ratio > 1.5).sum() / count,
        "policy/entropy": found["entropy"].sum() / count,
        "kl/reference": (reference.exp() - 1 - reference).sum() / count,
        "critic/values_mean": values.sum() / count,
        "critic/values_min": values.min(),
        "critic/values_max": values.max(),
        "critic/returns_mean": returns.sum() / count,
        "critic/returns_std": ((returns - returns.mean()) ** 2).mean().sqrt(),
        "critic/explained_variance": 1 - (returns - values).var(correction=0) / returns.var(correction=0),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value), rel=1e-5, abs=1e-7), name
    assert math.isclose(float(difference.abs().max()), 0.625, abs_tol=1e-4)  # as the worker moves them


def test_mismatch_of_rollout_logprobs_is_of_the_first_update(folder: Path) -> None:
    """There the trainer's own log-probs are first seen; they are the unmoved ones of the sampler."""
    first, all_tokens = rows(folder, "rollout_dp2")[1], rows(folder, "dp2")[1]
    assert first["mismatch/logprob_abs_mean"] == pytest.approx(all_tokens["mismatch/logprob_abs_mean"], rel=0.2)
    assert first["mismatch/logprob_abs_max"] == pytest.approx(0.625, abs=1e-4)
    assert first["mismatch/kl"] == pytest.approx(first["policy/approx_kl_first"], rel=1e-5)
    assert first["policy/entropy"] == pytest.approx(all_tokens["policy/entropy"], rel=0.1)
