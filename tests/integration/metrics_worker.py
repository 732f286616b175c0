"""One step with every part of the algorithm at once, in several layouts and packings: metrics_worker.py FOLDER.

test_metrics_of_layouts.py compares what they log. The sampler's log-probs are moved, by the token and its place alone, so that mismatch and
importance weights are more than rounding; each rank keeps what its models learned from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.forks import ROOT
from tests.process_groups import release_groups
from tests.training_setup import HORIZON, training_config
from vapo_mcore.data.ragged import segment_positions
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer import step as step_module
from vapo_mcore.trainer.main import train

FOLDER = Path(sys.argv[1])
CP2, PP2, TP2 = (f"parallel.{name}_parallel_size=2" for name in ("context", "pipeline_model", "tensor_model"))
CRITIC_CP2, CRITIC_PP2, CRITIC_TP2 = (f"critic.{setting}" for setting in (CP2, PP2, TP2))
SMALL_PACKS, PACKS, LARGE_PACKS = (f"batch.max_tokens_per_microbatch={tokens}" for tokens in (48, 96, 400))

EVERYTHING = (
    "run.steps=1",
    "data.eval=[]",
    "data.train.0.verifier=tests.integration.grading:every_fourth_character",
    "export.at_end=false",
    "batch.mini_batch_size=6",  # the last one is partial
    "policy.epochs=2",
    "critic={epochs: 2, value_pretraining: {steps: 1}}",
    "algorithm.advantage={truncation: bootstrap, whiten: minibatch, clip: [-1.0, 1.5], lambda_policy: {alpha: 0.03}}",  # some at 0
    "algorithm.policy_loss={clip_low: 0.02, clip_high: 0.03, dual_clip: 1.05, aggregation: sequence}",
    "algorithm.value_loss.clip=0.02",
    "algorithm.kl={place: loss, kind: k3, coef: 0.1, clamp: 10.0}",
    "algorithm.entropy.coef=0.01",
    f"algorithm.loss_terms=[{{name: distance, function: '{ROOT}/examples/extensions/arithmetic.py:distance_to_the_sampler', coef: 0.05}}, "
    f"{{name: share, function: '{ROOT}/tests/integration/sequence_terms.py:share', coef: 0.05}}]",
    "algorithm.self_imitation={top_k: 2, batch_size: 6, value_coef: 1.0}",
    "reward.overlong={cache: 10, penalty: 0.5}",
    "rollout.temperature=0.9",
)
CORRECTED = "algorithm.policy_loss.importance_correction={kind: token_truncate, cap: 1.5}"
CLIP_COV = "{kind: clip_cov, clip_low: null, clip_high: null, dual_clip: null, covariance: {fraction: 0.2, low: 0.02, high: 2.0}}"
ROLLOUT_LOGPROBS = (
    "rollout.old_logprobs=rollout",
    "algorithm.kl={place: off, kind: null, coef: null, clamp: null}",
    f"algorithm.policy_loss={CLIP_COV}",
)

CASES: dict[str, tuple[str, ...]] = {
    "dp2": (CORRECTED, PACKS),
    "cp2_large": (CORRECTED, CP2, LARGE_PACKS),
    "pp2_small": (CORRECTED, PP2, SMALL_PACKS),
    "critic_tp2": (CORRECTED, PACKS, CRITIC_TP2, "model.offload=true"),
    "critic_pp2": (CORRECTED, PACKS, CRITIC_PP2, "critic.optimizer.cpu_offload=true"),
    "critic_cp2": (CORRECTED, PACKS, CRITIC_CP2),
    "rollout_dp2": (*ROLLOUT_LOGPROBS, PACKS),
    "rollout_tp2_small": (*ROLLOUT_LOGPROBS, TP2, SMALL_PACKS),
    "rollout_tp2_critic_dp2": (*ROLLOUT_LOGPROBS, TP2, SMALL_PACKS, "critic.parallel={}"),
    "rollout_tp2_critic_pp2": (*ROLLOUT_LOGPROBS, TP2, SMALL_PACKS, CRITIC_PP2),
}

SEGMENTS = (
    *HORIZON,
    "run.steps=2",
    "checkpoint={at_end: false, every_minutes: 0, every_steps: 0}",
    "rollout.horizon={tokens: 7, in_flight: 20, train: segments, critic: ended}",
    "critic={head: mlp, head_init: small, head_bias: mean_return, epochs: 2, value_pretraining: {steps: 1, head_only: true, lr: 0.01}}",
    "critic.categorical={low: -3.0, high: 3.0}",
    "algorithm.advantage={truncation: bootstrap, values: after_update}",
)
"""Segments of responses, a critic that learns from whole ones, and one that is built anew after value pretraining."""
EP2 = "parallel.expert_model_parallel_size=2"
MIXTURE = (
    f"model.path={FOLDER / 'mixture'}",
    "model.router={replay: trainer, balance_coef: 0.01}",
    "run.steps=2",
    "data.eval=[]",
    "critic.value_pretraining.steps=1",
)
DENSE_CRITIC = f"critic={{init: reward_model, path: {FOLDER / 'reward_model'}, head_init: null}}"
"""A mixture as policy, with a critic of the same architecture, or with a dense one of another."""
OTHER_CASES: dict[str, tuple[str, ...]] = {
    "segments_dp2": SEGMENTS,
    "segments_critic_tp2": (*SEGMENTS, CRITIC_TP2),
    "segments_tp2_critic_dp2": (*SEGMENTS, TP2, "critic.parallel={}", "model.offload=true"),
    "mixtures_dp2": MIXTURE,
    "mixtures_ep2_critic_pp2": (*MIXTURE, EP2, CRITIC_PP2),
    "dense_critic_dp2": (*MIXTURE, DENSE_CRITIC),
    "ep2_dense_critic_tp2": (*MIXTURE, EP2, DENSE_CRITIC, CRITIC_TP2),
    "ep2_tp2_dense_critic_dp2": (*MIXTURE, EP2, TP2, "parallel.expert_tensor_parallel_size=1", DENSE_CRITIC, "critic.parallel={}"),
}


@contextmanager
def sampler_moved() -> Iterator[None]:
    original = step_module.distribute

    def moved(*arguments: Any, **more: Any) -> Any:
        experience = original(*arguments, **more)
        batch = experience.batch
        place = segment_positions(batch.cu_seqlens.diff())
        shift = ((batch["tokens"] * 7 + place * 3) % 11 - 5) / 8
        batch["rollout_logprobs"] = torch.where(experience.mask, batch["rollout_logprobs"] + shift, 0.0)
        return experience

    with mock.patch.object(step_module, "distribute", moved):
        yield


@contextmanager
def batches_kept(name: str) -> Iterator[None]:
    """What the first policy update reads, by rank."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        batch = experience.batch
        names = ("response_mask", "rollout_logprobs", "old_logprobs", "values", "returns", "entropy", "ref_logprobs")
        found = {key: batch[key].clone() for key in names if key in batch}
        torch.save(found, FOLDER / f"{name}_rank{dist.get_rank()}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        yield


@contextmanager
def critics_laid_out() -> Iterator[None]:
    """Whether each critic has the layout, and the rows, that its configuration gives it."""
    original = step_module.update_critic

    def checked(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        layout, built = config.critic_parallel, model.chunks[0].config
        for degree in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            assert getattr(built, degree) == getattr(layout, degree) == getattr(model.parallel, degree), degree
        owners = experience.owners.data_parallel_rank
        assert model.parallel.data_parallel_size == layout.data_parallel_size > int(owners.max())
        assert len(experience.batch) == int((owners == model.parallel.data_parallel_rank).sum())
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_critic", checked):
        yield


if __name__ == "__main__":
    for name, settings in CASES.items():
        config = training_config(FOLDER, name, *EVERYTHING, *settings)
        with sampler_moved(), batches_kept(name), critics_laid_out():
            train(config, initialize_parallel(config.parallel), clean=False)
        release_groups()
        if dist.get_rank() == 0:
            print(f"case {name} ok", flush=True)
    for name, settings in OTHER_CASES.items():
        config = training_config(FOLDER, name, *settings)
        with critics_laid_out():
            train(config, initialize_parallel(config.parallel), clean=False)
        release_groups()
        if dist.get_rank() == 0:
            print(f"case {name} ok", flush=True)
    dist.destroy_process_group()
