"""From rewards to what the updates read: token rewards, lambda, advantages, returns, whitening, importance weights.

Reads and writes tensors of an ``Experience``; the formulas are in ``vapo_mcore.algorithm``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.advantages import (
    group_advantages,
    normalised_step_rewards,
    packed_gae_decoupled,
    reward_to_go,
    rewards_of_own_and_later_steps,
    whiten,
)
from vapo_mcore.algorithm.checks import check_finite
from vapo_mcore.algorithm.importance import importance_weights
from vapo_mcore.algorithm.kl import kl_estimate
from vapo_mcore.algorithm.lambdas import lambda_statistics, length_adaptive_lambda, sigmoid_lambda
from vapo_mcore.algorithm.segments import broadcast_to_tokens, keep_responses, place_rewards, place_terminal_rewards
from vapo_mcore.algorithm.shaping import kl_penalised_rewards, shape_rewards
from vapo_mcore.collectives import fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience
from vapo_mcore.extensions.points import CustomEstimator
from vapo_mcore.records.metrics import StepMetrics


def shaped_rewards(config: Config, rows: Rows) -> Tensor:
    """float32 [n]: the verifier's scores after scaling, the factor on cut responses and the overlong punishment."""
    reward = config.reward
    overlong = None if reward.overlong is None else (config.rollout.max_response_length, reward.overlong.cache, reward.overlong.penalty)
    return shape_rewards(
        rows.score,
        rows.response_length,
        rows.truncated,
        scale=None if reward.scale is None else (reward.scale.source, reward.scale.target),
        truncated_factor=reward.truncated_factor,
        overlong=overlong,
    )


def trainable_rows(config: Config, rows: Rows) -> Tensor:
    """bool [n]: responses whose tokens carry a loss: graded, and with ``truncation: mask`` not cut by the length limit."""
    masked = config.algorithm.advantage.truncation == "mask"
    return rows.graded & ~rows.truncated if masked else rows.graded.clone()


class AdvantageEstimator:
    """Fills ``rewards``, ``advantages`` and, with a critic, ``returns`` of an experience, as configured."""

    def __init__(self, config: Config, data_parallel_group: dist.ProcessGroup) -> None:
        self.settings = config.algorithm.advantage
        self.kl = config.algorithm.kl
        self.correction = config.algorithm.policy_loss.importance_correction
        self.group = data_parallel_group
        assert self.settings.estimator != "custom" or self.settings.custom is not None, "the configuration requires a function"
        self.custom = CustomEstimator(self.settings.custom) if self.settings.custom is not None else None

    def place_rewards(self, experience: Experience, *, kl: bool = True) -> None:
        """The reward of each response on its last trained token, those of its steps and turns where these end, less the KL penalty
        of each token if it belongs to the reward."""
        per_response = experience.on_rows(experience.rows.reward)
        rewards = place_terminal_rewards(per_response, experience.mask, experience.cu_seqlens)
        batch = experience.batch
        steps = experience.steps(experience.trainable)
        if len(steps):
            positions, mine = experience.positions(steps)
            rewards += place_rewards(steps.rewards[mine].to(rewards), positions, experience.mask, experience.cu_seqlens)
        if kl and self.kl.place == "reward":
            rewards = kl_penalised_rewards(
                rewards, batch["old_logprobs"], batch["ref_logprobs"], experience.mask, kind=self.kl.kind, coef=self.kl.coef
            )
        batch["rewards"] = rewards

    def lambdas(self, experience: Experience) -> Tensor:
        """float64 [n], replicated: lambda of the policy's GAE for each response."""
        settings = self.settings.lambda_policy
        lengths = experience.trained_lengths
        if settings.kind == "length_adaptive":
            return length_adaptive_lambda(lengths, settings.alpha)
        if settings.kind == "sigmoid":
            # The statistics are of the whole rollout: a cut response that carries no loss counts too.
            rollout = experience.rows.response_length[experience.rows.graded].double()
            if rollout.numel() == 0:
                return torch.zeros(lengths.numel(), dtype=torch.float64)
            return sigmoid_lambda(lengths, settings.min, settings.max, float(rollout.mean()), float(rollout.std(correction=0)))
        return torch.full((lengths.numel(),), settings.value, dtype=torch.float64)

    def returns(self, experience: Experience, *, monte_carlo: bool = False) -> None:
        """The critic's targets, from the values predicted before its update; ``monte_carlo``: lambda_critic = 1 whatever is configured."""
        lam = 1.0 if monte_carlo else self.settings.lambda_critic
        batch = experience.batch
        _, batch["returns"] = packed_gae_decoupled(
            batch["rewards"],
            batch["values"],
            experience.mask,
            experience.cu_seqlens,
            lam,
            lam,
            self.settings.gamma,
            self._bootstrap(experience),
        )

    def advantages(self, experience: Experience, metrics: StepMetrics) -> None:
        """The policy's advantages, whitened as configured; a collective over data parallelism."""
        batch, mask, cu_seqlens = experience.batch, experience.mask, experience.cu_seqlens
        estimator = self.settings.estimator
        if estimator == "gae":
            lam = self.lambdas(experience)
            self._record_lambdas(lam[experience.trainable], metrics)
            advantages, _ = packed_gae_decoupled(
                batch["rewards"],
                batch["values"],
                mask,
                cu_seqlens,
                experience.on_rows(lam),
                self.settings.lambda_critic,
                self.settings.gamma,
                self._bootstrap(experience),
            )
        elif self.custom is not None:
            advantages = self.custom(self._custom_inputs(experience))
        elif estimator in ("reinforce", "reinforce_pp"):
            advantages = reward_to_go(batch["rewards"], mask, cu_seqlens, self.settings.gamma)
        elif estimator == "grpo_process":
            advantages = self._process_advantages(experience)
        else:
            # Rewards of cut responses that are masked from the losses stay in their group's statistics.
            rows = experience.rows
            per_response = group_advantages(rows.total_reward, rows.group, estimator, rows.graded)  # type: ignore[arg-type]
            advantages = broadcast_to_tokens(experience.on_rows(per_response), mask, cu_seqlens)
        for name in ("mean", "std", "min", "max"):
            metrics.add_tokens(f"advantages/{name}", advantages, mask)
        batch["advantages"] = self._whiten(experience, advantages)

    def _custom_inputs(self, experience: Experience) -> dict[str, Any]:
        """What a user's estimator may ask for; the names are ``extensions.points.ESTIMATOR_INPUTS``."""
        batch = experience.batch
        return {
            "rewards": batch["rewards"],
            "mask": experience.mask,
            "cu_seqlens": experience.cu_seqlens,
            "tokens": batch["tokens"],
            "rollout_logprobs": batch["rollout_logprobs"],
            "rows": experience.rows,
            "row_ids": batch.row_ids,
            "trainable": experience.trainable,
            "gamma": self.settings.gamma,
            "group": self.group,
            "values": batch.tensors.get("values"),
            "bootstrap": self._bootstrap(experience),
        }

    def _process_advantages(self, experience: Experience) -> Tensor:
        """GRPO with process supervision. Like the rewards of responses, those of steps are normalised over the whole group or
        rollout, which every rank knows; cut responses that are masked from the losses stay in the statistics."""
        rows, settings = experience.rows, self.settings.process
        steps = experience.steps(rows.graded)
        if settings.outcome:
            steps = steps.with_outcomes(rows, rows.graded & (rows.response_length > 0))
        labels = rows.group[steps.row] if settings.normalise == "group" else torch.zeros_like(steps.row)
        normalised = normalised_step_rewards(steps.rewards, labels)
        positions, mine = experience.positions(steps)
        tokens = torch.zeros(experience.batch.num_tokens, dtype=torch.float64, device=experience.cu_seqlens.device)
        tokens.index_add_(0, positions, normalised[mine].to(tokens))
        return rewards_of_own_and_later_steps(tokens, experience.mask, experience.cu_seqlens).float()

    def correct_importance(self, experience: Experience) -> None:
        """``importance_weights`` of the policy loss, if a correction is configured."""
        if self.correction.kind == "off":
            return
        batch = experience.batch
        batch["importance_weights"] = importance_weights(
            batch["old_logprobs"],
            batch["rollout_logprobs"],
            experience.mask,
            experience.cu_seqlens,
            kind=self.correction.kind,
            cap=self.correction.cap,
            low=self.correction.low if self.correction.kind.endswith("_mask") else 0.0,
        )

    def record_reference_kl(self, experience: Experience, metrics: StepMetrics) -> None:
        """KL estimate to the reference before the updates, if there is a reference."""
        if "ref_logprobs" in experience.batch:
            estimate = kl_estimate(experience.batch["old_logprobs"], experience.batch["ref_logprobs"], self.kl.kind, experience.mask)
            metrics.add_tokens("kl/reference", estimate, experience.mask)

    def _bootstrap(self, experience: Experience) -> Tensor | None:
        """V of the state after a cut response, 0 after a finished one; None where cut responses end like finished ones."""
        if self.settings.truncation != "bootstrap":
            return None
        assert experience.bootstrap_values is not None, "the critic's pass stores bootstrap values"
        return torch.where(experience.on_rows(experience.rows.truncated), experience.bootstrap_values, 0.0)

    def _whiten(self, experience: Experience, advantages: Tensor) -> Tensor:
        mask = experience.mask
        if self.settings.whiten == "batch":
            return whiten(advantages, mask, self.group)
        if self.settings.whiten == "off":
            return advantages
        result = torch.zeros_like(advantages)
        for minibatch in experience.minibatches:
            members = torch.zeros(len(experience.batch), dtype=torch.bool)
            for microbatch in minibatch.microbatches:
                members[microbatch.rows] = True
            inside = keep_responses(mask, experience.cu_seqlens, members.to(mask.device))
            result = torch.where(inside, whiten(advantages, inside, self.group), result)
        return result

    @staticmethod
    def _record_lambdas(lam: Tensor, metrics: StepMetrics) -> None:
        statistics = lambda_statistics(lam)
        metrics.put("gae/lambda_mean", statistics["mean"] if lam.numel() else None)
        metrics.put("gae/lambda_zero_frac", statistics["zero_frac"] if lam.numel() else None)
        metrics.put("gae/lambda_histogram", statistics["histogram"])


def check_experience(experience: Experience) -> None:
    """Stop on all ranks, naming the response, if a tensor that training reads is not finite at a token that carries a loss."""
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "rewards", "values", "returns", "advantages", "importance_weights")
    present = {name: experience.batch[name] for name in names if name in experience.batch}
    with fail_together():
        check_finite(present, experience.mask, experience.cu_seqlens, experience.response_ids())
