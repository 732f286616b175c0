"""Loss functions of the training engine, composed from the terms of ``vapo_mcore.algorithm``.

Each is a ``LossFunction`` of the engine: it receives the output-aligned, context-parallel-local tensors of a micro-batch and returns the
sum of per-token terms times their mini-batch weights, and sums of statistics (maxima if the name ends in ``_max``).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.covariance import covariance_terms
from vapo_mcore.algorithm.histogram import histogram_value_terms
from vapo_mcore.algorithm.importance import mismatch_sums
from vapo_mcore.algorithm.kl import KLKind, kl_loss_terms
from vapo_mcore.algorithm.losses import Clips, policy_loss_terms, positive_nll_terms, value_loss_terms
from vapo_mcore.algorithm.objectives import Sequences, cispo_terms, gspo_terms, ratio_indicators
from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.config.schema import Config
from vapo_mcore.extensions.points import CustomObjective, loss_terms

Stats = dict[str, Tensor]

COVARIANCE_KINDS = ("clip_cov", "kl_cov")
"""Objectives that treat some tokens of a mini-batch separately; the trainer marks these in the tensor ``covarying``."""

MISMATCH_STATISTIC = "mismatch_"
"""Prefix of the statistics of ``importance.mismatch_sums``."""

TERM_STATISTIC = "term/"
"""Prefix of the statistics of user-defined terms. The suffix "/sum" keeps a term named "*_max" from being reduced as a maximum."""


class PolicyLoss:
    """Policy loss: surrogate of ``policy_loss.kind`` + coef x positive-example NLL [+ coef x KL] [- coef x entropy] [+ user-defined terms].

    Reads ``old_logprobs``, ``advantages``, ``policy_weights`` (from ``token_weights``; also used for KL and entropy),
    ``positive_weights`` (from ``positive_token_weights``: nonzero at tokens of correct responses), ``importance_weights`` with
    an importance correction, ``policy_mask`` with ``horizon.train: segments``, ``covarying`` with clip_cov and kl_cov, ``ref_logprobs``
    with a KL term, and the inputs of user-defined terms.

    Statistics: ``surrogate``, ``nll``, ``kl`` are parts of the loss before their coefficients. ``tokens``, ``clipped_high``,
    ``clipped_low``, ``clipped_dual``, ``approx_kl``, ``ratio`` and, if measured, ``entropy`` and ``mismatch_*`` are sums over response
    tokens.
    """

    def __init__(self, config: Config, context_parallel_group: dist.ProcessGroup | None = None, *, without_data: bool = False) -> None:
        """Import the user-defined parts.

        Args:
            context_parallel_group: the group that splits the sequences of a micro-batch; None: sequences are whole.
            without_data: run on tensors without data, to measure memory. PPO's token ratio, which keeps as many vectors, replaces a
                sequence-level or user-defined objective, and no user-defined term runs; the inputs of both count as read.
        """
        self.context_parallel_group = context_parallel_group
        algorithm, rollout = config.algorithm, config.rollout
        self.clip = algorithm.policy_loss
        self.positive_coef = algorithm.positive_lm.coef
        self.entropy_coef = algorithm.entropy.coef
        self.kl_coef = algorithm.kl.coef if algorithm.kl.place == "loss" else 0.0
        self.kl_kind: KLKind = algorithm.kl.kind
        self.kl_clamp = algorithm.kl.clamp
        # With old log-probs from the rollout, this pass is the first to compute the trainer's own log-probs.
        self.measure_mismatch = rollout.old_logprobs == "rollout"
        self.temperature = rollout.temperature
        self.terms = loss_terms(algorithm.loss_terms)
        self.objective = CustomObjective(self.clip.custom) if self.clip.kind == "custom" and self.clip.custom is not None else None
        self.needs_entropy = (
            (self.objective is not None and self.objective.needs_entropy)
            or self.entropy_coef > 0
            or self.measure_mismatch
            or any(term.needs_entropy for term in self.terms)
        )
        names = ["old_logprobs", "advantages", "policy_weights", "positive_weights"]
        names += ["importance_weights"] if self.clip.importance_correction.kind != "off" else []
        # Only the positive-example loss reads the tokens of earlier segments.
        self.segments = rollout.trains_segments
        names += ["policy_mask"] if self.segments else []
        names += ["covarying"] if self.clip.kind in COVARIANCE_KINDS else []
        names += ["ref_logprobs"] if self.kl_coef > 0 else []
        names += [name for term in self.terms for name in term.stored]
        names += self.objective.stored if self.objective is not None else []
        self.tensors: tuple[str, ...] = tuple(dict.fromkeys(names))
        if without_data:
            self.terms = ()
            if self.clip.sequence_level or self.objective is not None:
                self.clip, self.objective = self.clip.model_copy(update={"kind": "ppo"}), None

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Stats]:
        logprobs, weights, positive = outputs["logprobs"], batch["policy_weights"], batch["positive_weights"]
        nll = (positive_nll_terms(logprobs, batch["mask"], positive > 0) * positive).sum()
        if self.segments:
            batch = batch | {"mask": batch["policy_mask"]}
        mask = batch["mask"]
        terms, indicators = self._surrogate_terms(outputs, batch)
        surrogate = (terms * weights).sum()
        total = surrogate + self.positive_coef * nll if self.positive_coef > 0 else surrogate
        stats = {
            "surrogate": surrogate.detach(),
            "nll": nll.detach(),
            "tokens": mask.sum(),
            "clipped_high": indicators["clip_frac_high"].sum(),
            "clipped_low": indicators["clip_frac_low"].sum(),
            "clipped_dual": indicators["clip_frac_dual"].sum(),
            "approx_kl": indicators["approx_kl"].sum(),
            "ratio": indicators["ratio"].sum(),
        }
        if self.kl_coef > 0:
            kl = (kl_loss_terms(logprobs, batch["ref_logprobs"], mask, self.kl_kind, self.kl_clamp) * weights).sum()
            total = total + self.kl_coef * kl
            stats["kl"] = kl.detach()
        if self.needs_entropy:
            entropy = torch.where(mask, outputs["entropy"], 0.0)
            if self.entropy_coef > 0:
                total = total - self.entropy_coef * (entropy * weights).sum()
            stats["entropy"] = entropy.detach().sum()
        for term in self.terms:
            part = term(batch | {"tokens": batch["labels"]} | outputs, mask, weights, self.context_parallel_group)
            total = total + term.coef * part
            stats[f"{TERM_STATISTIC}{term.name}/sum"] = part.detach()
        if self.measure_mismatch:
            sums = mismatch_sums(logprobs, batch["old_logprobs"], mask, self.clip.importance_correction.cap)
            stats |= {f"{MISMATCH_STATISTIC}{name}": value for name, value in sums.items()}
        return total, stats

    def _surrogate_terms(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Stats]:
        """Compute per-token terms and indicators of the configured kind; sequence-level kinds communicate over the CP group."""
        clip, logprobs = self.clip, outputs["logprobs"]
        read = (logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"])
        weights = batch.get("importance_weights")
        if self.objective is not None:
            sequences = Sequences(batch["cu_seqlens"], self.context_parallel_group)
            terms = self.objective(batch | {"tokens": batch["labels"]} | outputs, batch["mask"], sequences)
            indicators = ratio_indicators(logprobs, batch["old_logprobs"], batch["mask"])
            return terms if weights is None else terms * torch.where(batch["mask"], weights, 0.0), indicators
        if clip.kind == "cispo":
            return cispo_terms(*read, clip_high=clip.clip_high, importance_weights=weights)
        if clip.kind in COVARIANCE_KINDS:
            kl_coef = clip.covariance.kl_coef if clip.kind == "kl_cov" else None
            return covariance_terms(*read, batch["covarying"], kl_coef=kl_coef, importance_weights=weights)
        clips: Clips = {"clip_low": clip.clip_low, "clip_high": clip.clip_high, "dual_clip": clip.dual_clip}
        if clip.kind == "gspo":
            sequences = Sequences(batch["cu_seqlens"], self.context_parallel_group)
            return gspo_terms(*read, sequences, importance_weights=weights, **clips)
        return policy_loss_terms(*read, importance_weights=weights, **clips)


class CriticLoss:
    """Critic loss: token mean of 1/2 (V - R)^2, optionally clipped around ``values``, the predictions before the update.

    With ``bins``, the loss is the cross-entropy of a categorical head. Reads ``returns``, ``value_weights`` and, with a clip, ``values``.
    Statistics: ``tokens`` and ``clipped``, sums over response tokens; with ``bins`` also ``squared``, the token mean of 1/2 (V - R)^2.
    """

    temperature = 1.0
    needs_entropy = False

    def __init__(self, clip: float | None, bins: ValueBins | None = None) -> None:
        assert clip is None or bins is None, "the configuration refuses a value clip with a categorical head"
        self.clip, self.bins = clip, bins
        self.tensors: tuple[str, ...] = ("returns", "value_weights", *(("values",) if clip is not None else ()))

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Stats]:
        mask = batch["mask"]
        weights = batch["value_weights"]
        terms, indicators = value_loss_terms(outputs["values"], batch.get("values"), batch["returns"], mask, clip=self.clip)
        stats = {"tokens": mask.sum(), "clipped": indicators["clip_frac"].sum()}
        if self.bins is not None:
            stats["squared"] = (terms.detach() * weights).sum()
            terms = histogram_value_terms(outputs["value_logits"], batch["returns"], mask, self.bins)
        return (terms * weights).sum(), stats


class SupervisedLoss:
    """Negative log-likelihood of the target tokens (``response_mask``), weighted by ``loss_weights`` (1 / mini-batch tokens for a mean).

    Used for warm starts and self-imitation. Statistics: ``tokens`` and ``nll``, sums over the target tokens.
    """

    needs_entropy = False
    tensors: tuple[str, ...] = ("loss_weights",)

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Stats]:
        mask = batch["mask"]
        terms = positive_nll_terms(outputs["logprobs"], mask, mask)
        return (terms * batch["loss_weights"]).sum(), {"tokens": mask.sum(), "nll": terms.detach().sum()}
