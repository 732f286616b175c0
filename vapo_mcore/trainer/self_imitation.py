"""Self-imitation learning: keep correct responses in a replay buffer and train on them in separate steps.

Every rank holds the same buffer, built from the replicated rows and from tokens gathered once, and draws the same responses from it.
Their micro-batches are distributed over the data-parallel ranks like those of a rollout.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.advantages import reward_to_go
from vapo_mcore.algorithm.replay import ReplayBuffer, ReplaySample
from vapo_mcore.algorithm.weights import token_weights
from vapo_mcore.config.schema import Config, SelfImitationConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.ragged import cumulative, token_index
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows
from vapo_mcore.experience.batches import Experience, pack_microbatches, plan_rows
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.losses import CriticLoss, SupervisedLoss
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.advantages import imitable_rows

_TENSORS = ("tokens", "response_mask", "returns")


class SelfImitation:
    """Holds the replay buffer and trains on it. ``remember`` and the training steps are collectives over all ranks."""

    def __init__(self, config: Config, parallel: ParallelContext) -> None:
        settings = config.algorithm.self_imitation
        assert settings is not None, "requires algorithm.self_imitation"
        self.settings: SelfImitationConfig = settings
        self.config = config
        self.parallel = parallel
        self.buffer = ReplayBuffer(settings.capacity, eviction=settings.keep, top_k=settings.top_k)

    def remember(self, experience: Experience, rollout: int, *, pretraining: bool) -> None:
        """Add the rollout's correct responses; token rewards must be placed. With ``pretraining`` only a frozen buffer adds them."""
        if pretraining and self.settings.keep != "frozen":
            return
        imitable = imitable_rows(self.config, experience.rows, skip_overlong=self.settings.skip_overlong)
        chosen = best_rows(experience.rows, experience.trainable & imitable, self.settings.top_k)
        batch = experience.batch
        gamma = self.config.algorithm.advantage.gamma
        returns = reward_to_go(batch["rewards"], experience.mask, experience.cu_seqlens, gamma)
        local = torch.isin(batch.row_ids, chosen).nonzero().flatten()
        index = token_index(batch.cu_seqlens, local).to(experience.cu_seqlens.device)
        held = zip(_TENSORS, (batch["tokens"], experience.mask, returns), strict=True)
        own = {name: tensor.index_select(0, index).cpu() for name, tensor in held}
        parts = _gather({**own, "row": batch.row_ids[local], "lengths": batch.lengths[local]}, self.parallel.data_parallel_group)
        row = torch.cat([part["row"] for part in parts])
        order = torch.argsort(row)
        bounds = cumulative(torch.cat([part["lengths"] for part in parts]))
        sorted_tokens = token_index(bounds, order)
        tensors = {name: torch.cat([part[name] for part in parts]).index_select(0, sorted_tokens) for name in _TENSORS}
        rows = experience.rows.select(row[order])
        self.buffer.add(
            tensors["tokens"],
            tensors["response_mask"],
            tensors["returns"],
            cumulative(bounds.diff()[order]),
            rows.total_reward,
            torch.ones(len(rows), dtype=torch.bool),
            [prompt_id.rsplit("#", 1)[0] for prompt_id in rows.prompt_id],  # strip the number of the epoch
            rollout,
        )

    def end_of_pretraining(self) -> None:
        """Freeze a ``keep: frozen`` buffer that value pretraining filled, so that RL steps add nothing."""
        if self.settings.keep == "frozen" and len(self.buffer) > 0:
            self.buffer.freeze()

    def draw(self, number: int, rollout: int) -> ReplaySample | None:
        """Draw the responses of RL step ``number``; None if no imitation is due or the buffer is empty."""
        if number % self.settings.every_steps or len(self.buffer) == 0:
            return None
        digest = hashlib.sha256(f"self-imitation/{self.config.seed}/{rollout}".encode()).digest()
        # The CPU generator uses only 32 bits of the seed: two steps draw alike with probability 2**-32.
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return self.buffer.sample(self.settings.batch_size, generator)

    def imitate(self, policy: MegatronModel, sample: ReplaySample, metrics: StepMetrics) -> bool:
        """Run one NLL update of the policy at the rollout's temperature, with ``lr`` if set. Returns False if the update was skipped."""
        assert policy.optimizer is not None
        loss = SupervisedLoss(self.config.rollout.temperature)
        rate = self.settings.lr if self.settings.lr is not None else policy.optimizer.learning_rate
        result = policy.train_step(self._microbatches(policy, sample, "loss_weights", self.settings.coef), loss, unscheduled_lr=rate)
        tokens = result.metrics["tokens"]
        metrics.put("imitation/responses", len(sample.prompt_ids))
        metrics.put("imitation/nll", result.metrics["nll"] / tokens)
        metrics.put("imitation/grad_norm", result.grad_norm)
        metrics.put("imitation/lr", rate)
        return result.skipped is None

    def learn_values(self, critic: MegatronModel, sample: ReplaySample, metrics: StepMetrics) -> bool:
        """Fit the critic to the returns from sampling time, at its current learning rate. Returns False if the update was skipped."""
        assert critic.optimizer is not None
        coef = self.settings.value_coef
        loss = CriticLoss(None, critic.architecture.value_bins)
        microbatches = self._microbatches(critic, sample, "value_weights", coef)
        result = critic.train_step(microbatches, loss, unscheduled_lr=critic.optimizer.learning_rate)
        metrics.put("imitation/value_loss", result.metrics["loss"] / coef)
        return result.skipped is None

    def record(self, rollout: int, metrics: StepMetrics) -> None:
        """Record the size of the buffer and the age of its responses."""
        metrics.put("imitation/buffer", len(self.buffer))
        if len(self.buffer):
            ages = self.buffer.ages(rollout).double()
            metrics.put("imitation/age_mean", float(ages.mean()))
            metrics.put("imitation/age_max", int(ages.max()))

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's contents: tensors, strings and numbers only."""
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved contents, except those that the current settings would not keep."""
        self.buffer.load_state_dict(state)

    def _microbatches(self, model: MegatronModel, sample: ReplaySample, weights: str, coef: float) -> list[MicroBatch]:
        """Return this rank's micro-batches of the responses, with weight coef / (number of response tokens) at each response token."""
        batch = replay_batch(sample)
        count = len(batch)
        batch[weights] = coef * token_weights(batch["response_mask"], batch.cu_seqlens, "token")
        plan = plan_rows(self.config, model.architecture, model.parallel, batch.lengths, torch.arange(count), count, seed=0)
        return pack_microbatches(
            plan.minibatches[0], batch, torch.arange(count), model.parallel, ("tokens", "response_mask", "returns", weights)
        )


def best_rows(rows: Rows, trainable: Tensor, top_k: int) -> Tensor:
    """Return int64, ascending: in each group the ``top_k`` correct rows with the highest reward that carry a loss; ties go to the first."""
    eligible = (rows.verdict & rows.graded & trainable & (rows.response_length > 0)).nonzero().flatten()
    rewards, groups = rows.total_reward[eligible], rows.group[eligible]
    order = torch.argsort(rewards, descending=True, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]  # by group, then descending reward
    _, sizes = torch.unique_consecutive(groups[order], return_counts=True)
    rank = torch.arange(order.numel()) - torch.repeat_interleave(cumulative(sizes)[:-1], sizes)
    return eligible[order[rank < top_k]].sort().values


def replay_batch(sample: ReplaySample) -> RolloutBatch:
    """Convert drawn responses to a rollout batch with ``tokens``, ``response_mask`` and ``returns``."""
    n = len(sample.prompt_ids)
    lengths = sample.cu_seqlens.diff()
    sampled = torch.stack([part.sum() for part in sample.response_mask.split(lengths.tolist())]) if n else lengths
    prompts = torch.stack([part.long().argmax() for part in sample.response_mask.split(lengths.tolist())]) if n else lengths
    known = torch.ones(n, dtype=torch.bool)
    rows = Rows(
        prompt_id=sample.prompt_ids,
        group=torch.arange(n),
        sample_index=torch.zeros(n, dtype=torch.int64),
        verdict=known,
        graded=known,
        ungraded=[""] * n,
        score=sample.rewards,
        reward=sample.rewards,
        finish_reason=["stop"] * n,
        prompt_length=prompts,
        response_length=sampled,
        tool_length=lengths - prompts - sampled,
        turns=torch.ones(n, dtype=torch.int64),
        observations_cut=torch.zeros(n, dtype=torch.int64),
        missed_end=torch.zeros(n, dtype=torch.bool),
        source=["replay"] * n,
        step_rewards=[()] * n,
        segments=[()] * n,
        observations=[()] * n,
    )
    tensors = {"tokens": sample.tokens, "response_mask": sample.response_mask, "returns": sample.returns}
    return RolloutBatch(rows, sample.cu_seqlens, tensors)


def _gather(part: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[dict[str, Tensor]]:
    """Gather the parts of all data-parallel ranks."""
    if group is None or dist.get_world_size(group) == 1:
        return [part]
    parts: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(parts, part, group=group)
    return parts
