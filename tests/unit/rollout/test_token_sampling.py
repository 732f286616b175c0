"""Drawing from given logits: hand-computed values and a plain float64 oracle, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vapo_mcore.rollout.base import SamplingConfig
from vapo_mcore.rollout.token_sampling import draw, processed_logprobs, uniform_numbers


def settings(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> SamplingConfig:
    return SamplingConfig(temperature, top_p, top_k, max_tokens=1)


def oracle(logits: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """Probabilities of one row: temperature, then top-k, then top-p, by sorting and adding up."""
    p = np.exp((logits - logits.max()) / sampling.temperature)
    order = np.argsort(-p, kind="stable")
    if sampling.top_k > 0:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass >= sampling.top_p or p[token] == 0:
            break
        kept.append(token)
        mass += p[token]
    q = np.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


def test_scenario_16_temperature() -> None:
    """Logits 2 and 0 at T = 0.5: token 0 has -.0181; the raw log-prob is -.1269, and dividing that by T is wrong."""
    logits = torch.tensor([[2.0, 0.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.3], dtype=torch.float64), settings(temperature=0.5))
    assert tokens.tolist() == [0]
    assert logprobs.item() == pytest.approx(-0.0181, abs=5e-5)
    assert processed_logprobs(logits, settings())[0, 0].item() == pytest.approx(-0.1269, abs=5e-5)


@pytest.mark.parametrize(
    "sampling", [settings(), settings(0.6), settings(1.5, 0.9), settings(1.0, 0.3), settings(1.0, 1.0, 5), settings(0.8, 0.7, 9)]
)
def test_distribution_is_the_oracles(sampling: SamplingConfig) -> None:
    logits = torch.randn((6, 40), generator=torch.Generator().manual_seed(3)) * 2
    got = processed_logprobs(logits, sampling).exp()
    expected = np.stack([oracle(row, sampling) for row in logits.double().numpy()])
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)
    assert ((got == 0).numpy() == (expected == 0)).all()


@pytest.mark.parametrize("sampling", [settings(), settings(0.7, 0.8, 12)])
def test_tokens_come_as_often_as_they_should(sampling: SamplingConfig) -> None:
    logits = torch.randn((1, 20), generator=torch.Generator().manual_seed(5))
    n = 20_000
    tokens, logprobs = draw(logits.expand(n, -1), uniform_numbers([77], n)[0], sampling)
    p = oracle(logits[0].double().numpy(), sampling)
    counts = np.bincount(tokens.numpy(), minlength=20)
    assert (counts[p == 0] == 0).all()
    expected = n * p[p > 0]
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    assert chi_square < 3 * len(expected)  # mean len - 1, standard deviation sqrt(2 len)
    np.testing.assert_allclose(logprobs.numpy(), np.log(p[tokens.numpy()]), atol=1e-5)


def test_extreme_uniforms_never_draw_what_has_no_probability() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits.expand(2, -1), ends, settings())
    assert tokens.tolist() == [1, 2]
    assert logprobs.tolist() == pytest.approx([-np.log(2)] * 2)


def test_greedy_is_the_argmax_with_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.99], dtype=torch.float64), settings(temperature=0.0, top_p=0.5))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(3 - np.log(np.exp([1, 2, 3]).sum()))


def test_uniform_numbers_of_a_seed_do_not_depend_on_the_others() -> None:
    seeds = [2**63 - 1, 5, 0]
    together = uniform_numbers(seeds, 9)
    for row, seed in enumerate(seeds):
        assert torch.equal(together[row], uniform_numbers([seed], 9)[0])
        assert torch.equal(together[row, :4], uniform_numbers([seed], 4)[0])
    assert torch.unique(together).numel() == 27
    assert not torch.equal(together[1], uniform_numbers([5 + 2**32], 9)[0])  # all 63 bits count
