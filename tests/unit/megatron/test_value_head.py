"""The value head of two layers: its formula, and dropout that acts in training steps alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vapo_mcore.config.schema import ParallelConfig
from vapo_mcore.megatron.host import megatron_scope
from vapo_mcore.megatron.model import MlpValueHead
from vapo_mcore.planning.catalog import find_architecture
from vapo_mcore.planning.state import chunk_parameters


def head(dropout: float, stream: int = 0) -> MlpValueHead:
    with megatron_scope():
        made = MlpValueHead(8, sequence_parallel=False, group=None, dropout=dropout, stream=stream)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def values(made: MlpValueHead, hidden: Tensor) -> Tensor:
    return made(hidden)[0].detach()


HIDDEN = torch.randn(500, 1, 8, generator=torch.Generator().manual_seed(1))


def test_value_is_linear_in_the_tanh_of_a_linear_layer() -> None:
    made = head(0.0)
    expected = torch.tanh(HIDDEN @ made.dense.weight.T + made.dense.bias) @ made.weight.T + made.bias
    assert torch.allclose(values(made, HIDDEN.bfloat16().float()), values(made, HIDDEN.bfloat16()))  # in float32 whatever comes in
    assert torch.allclose(values(made, HIDDEN), expected, atol=1e-6)


def test_dropout_acts_where_gradients_are_recorded_and_keeps_the_mean() -> None:
    made, plain = head(0.25), values(head(0.0), HIDDEN)
    with torch.no_grad():
        assert torch.equal(made(HIDDEN)[0], plain)
    first, second = values(made, HIDDEN), values(made, HIDDEN)
    assert not torch.equal(first, second)
    ones = torch.ones(4000)
    kept = made._drop(ones)
    assert set(kept.tolist()) == {0.0, 4 / 3} or torch.allclose(kept[kept > 0], torch.tensor(4 / 3))
    assert abs(float((kept == 0).double().mean()) - 0.25) < 0.03
    assert abs(float(kept.mean()) - 1.0) < 0.05


def test_ranks_with_the_same_tokens_drop_the_same_and_others_do_not() -> None:
    assert torch.equal(values(head(0.5, stream=3), HIDDEN), values(head(0.5, stream=3), HIDDEN))
    assert not torch.equal(values(head(0.5, stream=3), HIDDEN), values(head(0.5, stream=4), HIDDEN))


def test_trap_15_a_zero_head_gives_what_is_below_it_no_gradient_at_first() -> None:
    hidden = HIDDEN.clone().requires_grad_(True)
    made = head(0.0)
    with torch.no_grad():
        made.weight.zero_()
        made.bias.zero_()
    (made(hidden)[0] - 1.0).square().mean().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert made.dense.weight.grad is not None and not made.dense.weight.grad.any()
    assert made.weight.grad is not None and made.weight.grad.any()  # so that it is not zero after the first update


def test_plan_counts_its_parameters_in_megatrons_order() -> None:
    """Of the last pipeline rank's parameters, which go into its float32 buffer."""
    critic = replace(find_architecture("smollm2-135m"), hidden_size=8, mlp_value_head=True)
    reckoned = chunk_parameters(critic, "critic", "bfloat16", ParallelConfig(), first=False, last=True)
    real = [(f"output_layer.{name}", parameter.numel(), 4) for name, parameter in head(0.0).named_parameters()]
    assert [(p.name, p.numel, p.item_bytes) for p in reckoned if p.name.startswith("output_layer.")] == real
