"""Logits of a prompt, recorded from a model as vLLM holds it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vapo_mcore.errors import RolloutError
from vapo_mcore.rollout.vllm_parameters import exclude_tokens, prompt_distribution, recorded_logits

VOCAB, EXCLUDED = 5, 3
IDS = [4, 0, 2]


class Model(nn.Module):
    """``compute_logits`` as in vLLM: [rows, VOCAB] of hidden states, in bfloat16."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ torch.linspace(-1, 1, 2 * VOCAB).view(2, VOCAB)).bfloat16()


@pytest.mark.parametrize("excluded", [(), (EXCLUDED,)])
def test_recording_leaves_the_model_as_it_was(excluded: tuple[int, ...]) -> None:
    model = Model()
    exclude_tokens(model, excluded)
    before = dict(vars(model))
    llm = SimpleNamespace(apply_model=lambda run: [run(model)])
    hidden = torch.tensor([[0.3, -1.0], [2.0, 0.5]])
    with recorded_logits(llm) as recorded:
        logits = model.compute_logits(hidden)
        kept = logits.clone()
        logits.zero_()  # samplers change logits in place
    assert len(recorded) == 1 and recorded[0].dtype == torch.float32
    assert torch.equal(recorded[0], kept.float())
    assert bool((recorded[0][:, EXCLUDED] == -torch.inf).all()) == bool(excluded)
    assert vars(model) == before
    model.compute_logits(hidden)
    assert len(recorded) == 1


def positions(own: list[float]) -> Any:
    """vLLM's flat log-probs of a prompt: nothing at its first token, one number at each other one."""
    return SimpleNamespace(logprobs=own, start_indices=[0, *range(len(own))])


@pytest.mark.parametrize("rows", [2, 3], ids=["without the last token's", "with the last token's"])
def test_the_logits_that_give_the_prompt_s_own_logprobs_are_taken(rows: int) -> None:
    torch.manual_seed(0)
    prompt, sampled = torch.randn(rows, VOCAB + 2), torch.randn(1, VOCAB + 2)  # two columns of padding
    expected = prompt[:2, :VOCAB].log_softmax(-1)
    own = [float(expected[0, IDS[1]]), float(expected[1, IDS[2]])]
    for recorded in ([sampled, prompt], [prompt, sampled], [prompt + torch.randn_like(prompt), prompt]):
        assert torch.equal(prompt_distribution(recorded, IDS, positions(own), VOCAB), expected)
    with pytest.raises(RolloutError, match=r"logits \(\(1, 7\)\) do not give the log-probs that it returns for a prompt of 3 tokens"):
        prompt_distribution([sampled], IDS, positions(own), VOCAB)
    with pytest.raises(RolloutError, match="do not give"):
        prompt_distribution([prompt], IDS, positions([own[0], own[1] - 0.01]), VOCAB)
