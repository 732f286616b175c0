"""State besides the models: what goes in comes out, nothing is executed, generators continue."""

from __future__ import annotations

import math
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from vapo_mcore.algorithm.replay import ReplayBuffer
from vapo_mcore.checkpoint.state import StateRegistry, decode, encode, random_state, restore_random_state
from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.host import import_megatron


def test_a_state_comes_back_bit_for_bit() -> None:
    value = {
        "number": 0.1 + 0.2,
        "large": 2**62,
        "none": None,
        "nan": math.nan,
        "flags": [True, False],
        "nested": {"a/b": [torch.arange(3), {"t": torch.tensor([1.5], dtype=torch.bfloat16)}]},
        "text": "ä # \n",
        "empty": torch.zeros(0, dtype=torch.bool),
    }
    back = decode(*encode(value))
    assert back["number"] == value["number"] and back["large"] == 2**62 and back["flags"] == [True, False] and math.isnan(back["nan"])
    assert back["text"] == value["text"] and back["none"] is None
    assert torch.equal(back["nested"]["a/b"][0], torch.arange(3))
    assert torch.equal(back["nested"]["a/b"][1]["t"], torch.tensor([1.5], dtype=torch.bfloat16))
    assert back["empty"].dtype == torch.bool


def test_what_is_no_plain_value_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="cannot hold a set"):
        encode({"seen": {1, 2}})


def test_damaged_state_is_told() -> None:
    text, tensors = encode({"t": torch.arange(4)})
    for bad in ((text[:-3], tensors), (text, tensors[:10]), (text, encode({})[1]), (pickle.dumps({}), tensors)):
        with pytest.raises(CheckpointError, match="damaged"):
            decode(*bad)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_registry_names_what_is_missing_and_surplus_and_loads_nothing_then() -> None:
    saved, other = StateRegistry(), StateRegistry()
    for name in ("prompts", "replay"):
        saved.register(name, Counter())
    counter = Counter()
    other.register("prompts", counter)
    other.register("watch", Counter())
    state = saved.state_dict()
    state["prompts"]["count"] = 9
    with pytest.raises(CheckpointError, match=r"missing: watch; surplus: replay"):
        other.load_state_dict(state)
    assert counter.count == 0


def test_a_replay_buffer_goes_through_a_checkpoint() -> None:
    def filled() -> ReplayBuffer:
        buffer = ReplayBuffer(3, top_k=2)
        tokens = torch.arange(10)
        mask = torch.tensor([False, True, True, True, True, False, True, True, True, True])
        bounds, rewards, verdicts = torch.tensor([0, 5, 10]), torch.tensor([1.0, 0.5]), torch.tensor([True, True])
        buffer.add(tokens, mask, tokens / 10, bounds, rewards, verdicts, ["a#0", "b#0"], step=4)
        return buffer

    registry, fresh = StateRegistry(), ReplayBuffer(3, top_k=2)
    registry.register("replay", filled())
    target = StateRegistry()
    target.register("replay", fresh)
    target.load_state_dict(decode(*encode(registry.state_dict())))
    one, other = (buffer.sample(2, torch.Generator().manual_seed(1)) for buffer in (filled(), fresh))
    assert torch.equal(one.tokens, other.tokens) and torch.equal(one.response_mask, other.response_mask)
    assert one.prompt_ids == other.prompt_ids and torch.equal(one.rewards, other.rewards) and torch.equal(one.returns, other.returns)
    assert fresh.ages(6).tolist() == [2, 2]


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


def test_all_generators_continue() -> None:
    import_megatron()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.gauss(0, 1)  # leaves the second of a pair behind
    np.random.randn()
    saved = random_state()
    expected = draws()
    tracked = {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert draws() != expected
    restore_random_state(saved)
    assert draws() == expected
    assert all(torch.equal(state, tracked[name]) for name, state in get_cuda_rng_tracker().get_states().items())
    with pytest.raises(CheckpointError, match="damaged"):
        restore_random_state(saved[:100])
