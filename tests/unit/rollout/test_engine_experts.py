"""The engine's choices of experts on their way into a rollout batch: over turns, on ranks without rows, in the exchange, in a dump."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.unit.trainer.rollouts import make_rows
from vapo_mcore.commands.replay import with_choices
from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES, RolloutBatch, Rows, exchange
from vapo_mcore.errors import CheckpointError, RolloutError
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round
from vapo_mcore.experience.step_dump import StepDump, load_step, save_step
from vapo_mcore.rollout.base import Generation, GenerationRequest, Trajectory
from vapo_mcore.rollout.multi_turn import Episode
from vapo_mcore.rollout.stateful import StatefulEngine

SMALL, LARGE = ExpertChoices(3, 2, 8), ExpertChoices(2, 2, 300)


def choices(tokens: int, shape: ExpertChoices = SMALL, seed: int = 0) -> Tensor:
    scores = torch.rand(tokens, shape.layers, shape.experts, generator=torch.Generator().manual_seed(seed))
    return scores.topk(shape.topk, dim=-1).indices.to(torch.uint8 if shape.itemsize == 1 else torch.int16)


def batch_of(lengths: list[int], shape: ExpertChoices = SMALL, prompt: int = 2) -> RolloutBatch:
    rows = make_rows(lengths, [1.0] * len(lengths), prompt_length=prompt)
    ids = [list(range(length)) for length in lengths]
    experts = [choices(prompt + length - 1, shape, row) for row, length in enumerate(lengths)]
    logprobs = [[-1.0] * length for length in lengths]
    return RolloutBatch.from_responses(rows, [[7] * prompt] * len(lengths), ids, logprobs, experts=experts, choices=shape)


@pytest.mark.parametrize(("shape", "dtype", "size"), [(SMALL, torch.uint8, 6), (LARGE, torch.int16, 8)])
def test_every_token_has_its_choices_and_the_last_one_none(shape: ExpertChoices, dtype: torch.dtype, size: int) -> None:
    batch = batch_of([3, 1, 5], shape)
    found = batch[ENGINE_CHOICES]
    assert found.dtype == dtype
    assert found[0].numel() * found.element_size() == shape.bytes_a_token == size
    for row, (part, length) in enumerate(zip(found.split(batch.lengths.tolist()), (5, 3, 7), strict=True)):
        assert torch.equal(part[:-1], choices(length - 1, shape, row))
        assert not part[-1].any()


def test_a_rank_without_rows_has_the_same_tensors() -> None:
    full, empty = batch_of([3, 2]), RolloutBatch.from_responses(Rows.empty(), [], [], [], experts=[], choices=SMALL)
    assert {name: (x.dtype, x.shape[1:]) for name, x in empty.tensors.items()} == {
        n: (x.dtype, x.shape[1:]) for n, x in full.tensors.items()
    }
    assert torch.equal(RolloutBatch.concat([empty, full])[ENGINE_CHOICES], full[ENGINE_CHOICES])


@pytest.mark.parametrize("wrong", [choices(3), choices(5), choices(4)[:, :2], choices(4)[..., :1]])
def test_other_numbers_of_tokens_layers_or_experts_are_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=r"row 0 has choices of experts \[.*\], expected \[4, 3, 2\]"):
        RolloutBatch.from_responses(make_rows([3], [1.0]), [[7, 7]], [[1, 2, 3]], [[-1.0] * 3], experts=[wrong], choices=SMALL)


def test_choices_go_with_their_tokens_in_the_exchange() -> None:
    batch = batch_of([3, 1, 5, 2])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        holder, owner = torch.zeros(4, dtype=torch.int64), torch.tensor([0, -1, 0, 0])
        got = exchange(batch, batch.rows, holder=holder, owner=owner, dp_rank_of_rank=[0])
    finally:
        dist.destroy_process_group()
    assert torch.equal(got[ENGINE_CHOICES], batch.select([0, 2, 3])[ENGINE_CHOICES])


def test_turns_keep_the_choices_with_which_a_token_was_read_first() -> None:
    """A later turn prefills everything again: it adds the last token before it, the observation, and its own tokens but the last."""
    request = GenerationRequest("p", 0, [5, 6], 1)
    episode = Episode(request, request.seed, 20)

    class Texts:
        def decode(self, ids: list[int], **_: Any) -> str:
            return str(ids)

    first, second = choices(2 + 3 - 1, seed=1), choices(2 + 3 + 2 + 4 - 1, seed=2)
    episode.take(Generation(request, [1, 2, 3], [-1.0] * 3, "stop", first), Texts(), None, 20)
    episode.observe([8, 9], cut=False)
    episode.take(Generation(request, [1, 2, 3, 4], [-1.0] * 4, "stop", second), Texts(), None, 20)
    found = episode.trajectory().experts
    assert found is not None
    assert torch.equal(found, torch.cat([first, second[4:]]))
    assert len(found) == 2 + 9 - 1
    assert Trajectory.of_one_turn(Generation(request, [1, 2, 3], [-1.0] * 3, "stop", first)).experts is first
    assert Episode(request, request.seed, 20).trajectory().experts is None


def test_a_dump_has_them_and_a_replay_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([3, 1])
    sampled = Round(batch.rows, torch.zeros(2, dtype=torch.int64), batch, {})
    dump = StepDump("rl", 1, 1, sampled, SamplingCounts(1, 2))
    known = torch.ones(200, dtype=torch.bool)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert save_step(tmp_path, dump, 0) is None
    finally:
        dist.destroy_process_group()
    loaded = load_step(tmp_path, "rl", 1, rank=0, world_size=1, known=known)
    assert torch.equal(loaded.sampled.local[ENGINE_CHOICES], batch[ENGINE_CHOICES])
    idle = load_step(tmp_path, "rl", 1, rank=1, world_size=2, known=known).sampled.local  # a rank without rows, with the same tensors
    assert len(idle) == 0
    assert idle[ENGINE_CHOICES].shape == (0, 3, 2)

    class Settings:
        class model:
            path = tmp_path

            class router:
                replay = "engine"

    config: Any = Settings
    shapes: Any = replace
    for shape, fault in ((SMALL, None), (ExpertChoices(4, 2, 8), "2 experts of 3 layers for each token, but model.path has 2 of 4")):
        monkeypatch.setattr("vapo_mcore.commands.replay.read_architecture", lambda _, s=shape: type("A", (), {"expert_choices": s}))
        if fault is None:
            assert with_choices(config, loaded) is loaded
        else:
            with pytest.raises(CheckpointError, match=fault):
                with_choices(config, loaded)
    without = RolloutBatch(batch.rows, batch.cu_seqlens, {n: x for n, x in batch.tensors.items() if n != ENGINE_CHOICES})
    with pytest.raises(CheckpointError, match="the dump has no choices of experts"):
        with_choices(config, shapes(dump, sampled=shapes(sampled, local=without)))
    Settings.model.router.replay = "trainer"
    assert ENGINE_CHOICES not in with_choices(config, loaded).sampled.local


class Engine(StatefulEngine):
    """Only what the check of a generation reads."""

    def __init__(self, shape: ExpertChoices) -> None:
        self.expert_choices = shape


Engine.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "are missing, expected torch.uint8 of 4 tokens x 3 layers x 2 experts"),
        (choices(3), "are torch.uint8 of 3 tokens x 3 layers x 2 experts, expected torch.uint8 of 4 tokens x 3 layers x 2 experts"),
        (choices(4)[:, :2], "are torch.uint8 of 4 tokens x 2 layers x 2 experts, expected"),
        (choices(4).short(), "are torch.int16 of 4 tokens"),
        (choices(4) + 8, "have numbers from .* to .*; the model has 8 experts"),
        (choices(4) * 0, "name an expert twice"),
    ],
)
def test_an_engine_that_returns_something_else_is_told_the_counts(experts: Tensor | None, message: str) -> None:
    request = GenerationRequest("p", 3, [5, 6], 1)
    engine = Engine(SMALL)
    engine._check_experts(Generation(request, [1, 2, 3], [-1.0] * 3, "stop", choices(4)))
    with pytest.raises(RolloutError, match=rf"experts of the response to 'p' \(sample 3\) {message}"):
        engine._check_experts(Generation(request, [1, 2, 3], [-1.0] * 3, "stop", experts))
