"""Compute token rewards, lambda, advantages, returns and importance weights of a rollout.

The functions read and write tensors of an ``Experience``; the formulas are in ``vapo_mcore.algorithm``.
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
from vapo_mcore.algorithm.importance import importance_rejections, importance_weights
from vapo_mcore.algorithm.kl import kl_estimate
from vapo_mcore.algorithm.lambdas import lambda_statistics, length_adaptive_lambda, sigmoid_lambda
from vapo_mcore.algorithm.segments import (
    all_reduce_sum,
    broadcast_to_tokens,
    keep_responses,
    masked_moments,
    place_rewards,
    place_terminal_rewards,
    sequence_ids,
)
from vapo_mcore.algorithm.shaping import kl_penalised_rewards, shape_rewards
from vapo_mcore.collectives import fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import Rows
from vapo_mcore.experience.batches import Experience
from vapo_mcore.extensions.points import CustomEstimator
from vapo_mcore.records.metrics import StepMetrics


def shaped_rewards(config: Config, rows: Rows) -> Tensor:
    """Return float32 [n]: the verifier's scores after scaling, the factor for truncated responses, and the overlong penalty.

    A response that was cut has no reward yet: 0.
    """
    reward = config.reward
    overlong = None if reward.overlong is None else (config.rollout.max_response_length, reward.overlong.cache, reward.overlong.penalty)
    shaped = shape_rewards(
        rows.score,
        rows.response_length,
        rows.truncated,
        scale=None if reward.scale is None else (reward.scale.source, reward.scale.target),
        truncated_factor=reward.truncated_factor,
        overlong=overlong,
    )
    return torch.where(rows.cut, 0.0, shaped)


def trainable_rows(config: Config, rows: Rows) -> Tensor:
    """Return bool [n]: responses whose tokens carry a loss.

    They are graded and, with ``truncation: mask``, not truncated; with ``horizon.stale: drop`` no token is too old.
    """
    masked = config.algorithm.advantage.truncation == "mask"
    kept = rows.graded & ~rows.truncated if masked else rows.graded.clone()
    horizon = config.rollout.horizon
    if horizon is not None and horizon.max_staleness is not None and horizon.stale == "drop":
        kept &= rows.stale_tokens(horizon.max_staleness) == 0
    return kept


def skipped_tokens(config: Config, rows: Rows) -> Tensor | None:
    """Return int64 [n]: leading response tokens without a policy loss; None if there cannot be any.

    They are too old (``horizon.stale: mask``), or of earlier steps (``horizon.train: segments``).
    """
    horizon = config.rollout.horizon
    if config.rollout.trains_segments:
        return rows.stale_tokens(0)
    if horizon is None or horizon.max_staleness is None or horizon.stale == "drop":
        return None
    return rows.stale_tokens(horizon.max_staleness)


def imitable_rows(config: Config, rows: Rows, *, skip_overlong: bool) -> Tensor:
    """Return bool [n]: correct responses (raw verdict); with ``skip_overlong`` only those neither truncated nor penalised for length."""
    overlong = config.reward.overlong
    if not skip_overlong:
        return rows.verdict.clone()
    unpunished = config.rollout.max_response_length - (overlong.cache if overlong is not None else 0)
    return rows.verdict & ~rows.truncated & (rows.response_length <= unpunished)


class AdvantageEstimator:
    """Fills ``rewards``, ``advantages`` and, with a critic, ``returns`` of an experience according to ``algorithm.advantage``."""

    def __init__(self, config: Config, data_parallel_group: dist.ProcessGroup) -> None:
        self.settings = config.algorithm.advantage
        self.kl = config.algorithm.kl
        self.correction = config.algorithm.policy_loss.importance_correction
        self.group = data_parallel_group
        assert self.settings.estimator != "custom" or self.settings.custom is not None, "the configuration requires a function"
        self.custom = CustomEstimator(self.settings.custom) if self.settings.custom is not None else None

    def place_rewards(self, experience: Experience, *, kl: bool = True) -> None:
        """Place each response's reward on its last trained token and step and turn rewards where these end.

        With ``algorithm.kl.place: reward`` the KL penalty of each token is subtracted, unless ``kl`` is False.
        """
        per_response = experience.on_rows(experience.rows.reward)
        rewards = place_terminal_rewards(per_response, experience.mask, experience.cu_seqlens)
        batch = experience.batch
        steps = experience.trained_steps()
        if len(steps):
            positions, mine = experience.positions(steps)
            rewards += place_rewards(steps.rewards[mine].to(rewards), positions, experience.mask, experience.cu_seqlens)
        if kl and self.kl.place == "reward":
            logprobs = (batch["old_logprobs"], batch["ref_logprobs"])
            rewards = kl_penalised_rewards(rewards, *logprobs, experience.mask, kind=self.kl.kind, coef=self.kl.coef, clamp=self.kl.clamp)
        batch["rewards"] = rewards

    def lambdas(self, experience: Experience) -> Tensor:
        """Return float64 [n], replicated: lambda of the policy's GAE for each response."""
        settings = self.settings.lambda_policy
        lengths = experience.rows.response_length * experience.trainable  # all tokens, also those too stale to train
        if settings.kind == "length_adaptive":
            return length_adaptive_lambda(lengths, settings.alpha)
        if settings.kind == "sigmoid":
            # The statistics cover the whole rollout, also truncated responses that carry no loss.
            rollout = experience.rows.response_length[experience.rows.graded].double()
            if rollout.numel() == 0:
                return torch.zeros(lengths.numel(), dtype=torch.float64)
            return sigmoid_lambda(lengths, settings.min, settings.max, float(rollout.mean()), float(rollout.std(correction=0)))
        return torch.full((lengths.numel(),), settings.value, dtype=torch.float64)

    def returns(self, experience: Experience, *, monte_carlo: bool = False) -> None:
        """Compute the critic's targets from the values before its update. ``monte_carlo`` overrides lambda_critic with 1."""
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

    def monte_carlo_returns(self, experience: Experience) -> Tensor:
        """Return the reward-to-go of each token, float [total], the target of ``explained_variance_mc`` for every lambda_critic.

        Returns with lambda_critic < 1 contain the critic's own values, which inflates explained variance. With
        ``truncation: bootstrap`` the value after a truncated response is included.
        """
        batch = experience.batch
        return reward_to_go(batch["rewards"], experience.mask, experience.cu_seqlens, self.settings.gamma, self._bootstrap(experience))

    def mean_return(self, experience: Experience) -> float | None:
        """Return the mean Monte-Carlo return of all response tokens, without KL penalty; None if no token carries a loss. Collective."""
        self.place_rewards(experience, kl=False)
        mask = experience.mask
        returns = reward_to_go(experience.batch["rewards"], mask, experience.cu_seqlens, self.settings.gamma)
        count, mean, _ = masked_moments(returns, mask, self.group)
        return float(mean) if float(count) > 0 else None

    def advantages(self, experience: Experience, metrics: StepMetrics) -> None:
        """Compute the policy's advantages, whitened and clipped as configured. Collective over data parallelism."""
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
            # Truncated responses that are masked from the losses still count in their group's statistics.
            rows = experience.rows
            total_rewards = rows.total_reward
            if estimator == "rloo" and self.kl.place == "reward":
                total_rewards = total_rewards - self._kl_of_responses(experience)
            per_response = group_advantages(total_rewards, rows.group, estimator, rows.graded)  # type: ignore[arg-type]
            advantages = broadcast_to_tokens(experience.on_rows(per_response), mask, cu_seqlens)
        for name in ("mean", "std", "min", "max"):
            metrics.add_tokens(f"advantages/{name}", advantages, mask)
        batch["advantages"] = self._clip(self._whiten(experience, advantages), mask, metrics)

    def _kl_of_responses(self, experience: Experience) -> Tensor:
        """Return float64 [n], replicated: coef x the KL estimates summed over each response (RLOO, arXiv:2402.14740, Eq. 2). Collective.

        Responses that carry no loss get 0.
        """
        batch = experience.batch
        logprobs = (batch["old_logprobs"], batch["ref_logprobs"])
        estimate = kl_estimate(*logprobs, self.kl.kind, experience.mask, self.kl.clamp).double()
        owned = torch.zeros(len(batch), dtype=torch.float64, device=estimate.device)
        owned.index_add_(0, sequence_ids(experience.cu_seqlens), estimate)
        table = torch.zeros(len(experience.rows), dtype=torch.float64, device=estimate.device)
        table[batch.row_ids.to(table.device)] = owned
        return self.kl.coef * all_reduce_sum(table, self.group).cpu()

    def _custom_inputs(self, experience: Experience) -> dict[str, Any]:
        """Return the arguments available to a custom estimator, named as in ``extensions.points.ESTIMATOR_INPUTS``."""
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
        """Compute GRPO advantages with process supervision.

        Step rewards are normalised over the whole group or rollout, which is replicated on every rank. Truncated responses that are
        masked from the losses still count in the statistics.
        """
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

    def correct_importance(self, experience: Experience, metrics: StepMetrics) -> None:
        """Compute the policy loss's ``importance_weights`` if a correction is configured, and record how much a mask rejects."""
        kind, cap, low = self.correction.kind, self.correction.cap, self.correction.low
        if kind == "off":
            return
        batch = experience.batch
        read = (batch["old_logprobs"], batch["rollout_logprobs"], experience.mask, experience.cu_seqlens)
        if kind == "token_truncate":
            batch["importance_weights"] = importance_weights(*read, kind=kind, cap=cap)
            return
        batch["importance_weights"] = importance_weights(*read, kind=kind, cap=cap, low=low)
        counts = importance_rejections(*read, kind=kind, cap=cap, low=low)
        for side in ("low", "high"):
            metrics.add(f"mismatch/rejected_{side}_frac", counts[f"tokens_{side}"], counts["tokens"])
        for what in ("rejected", "lost"):
            metrics.add(f"mismatch/responses_{what}_frac", counts[f"responses_{what}"], counts["responses"])

    def record_reference_kl(self, experience: Experience, metrics: StepMetrics) -> None:
        """Record the KL estimate to the reference before the updates, if there is a reference."""
        if "ref_logprobs" in experience.batch:
            logprobs = (experience.batch["old_logprobs"], experience.batch["ref_logprobs"])
            estimate = kl_estimate(*logprobs, self.kl.kind, experience.mask, self.kl.clamp)
            metrics.add_tokens("kl/reference", estimate, experience.mask)

    def _bootstrap(self, experience: Experience) -> Tensor | None:
        """Return the value after each response that was cut or, with ``truncation: bootstrap``, truncated, and 0 after the others.

        None if there are none.
        """
        rows = experience.rows
        followed = rows.cut
        if self.settings.truncation == "bootstrap":
            followed |= rows.truncated
        elif not bool(followed.any()):
            return None
        assert experience.bootstrap_values is not None, "the critic's pass stores bootstrap values"
        return torch.where(experience.on_rows(followed), experience.bootstrap_values, 0.0)

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

    def _clip(self, advantages: Tensor, mask: Tensor, metrics: StepMetrics) -> Tensor:
        """Clip the advantages to ``advantage.clip``, if set, and record the share that it changes."""
        if self.settings.clip is None:
            return advantages
        low, high = self.settings.clip
        beyond = ((advantages < low) | (advantages > high)).to(advantages.dtype)
        metrics.add_tokens("advantages/clipped_frac", beyond, mask)
        return torch.where(mask, advantages.clamp(low, high), advantages)

    @staticmethod
    def _record_lambdas(lam: Tensor, metrics: StepMetrics) -> None:
        statistics = lambda_statistics(lam)
        metrics.put("gae/lambda_mean", statistics["mean"] if lam.numel() else None)
        metrics.put("gae/lambda_zero_frac", statistics["zero_frac"] if lam.numel() else None)
        metrics.put("gae/lambda_histogram", statistics["histogram"])


def check_experience(experience: Experience) -> None:
    """Raise TrainingError on all ranks if any tensor used in training is not finite at a token that carries a loss."""
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "rewards", "values", "returns", "advantages", "importance_weights")
    present = {name: experience.batch[name] for name in names if name in experience.batch}
    with fail_together():
        check_finite(present, experience.mask, experience.cu_seqlens, experience.response_ids())
