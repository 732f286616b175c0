"""Extension points: the available inputs of each, and the wrappers that call the user's function and check its result.

- *Advantage estimator*: token-aligned packed tensors of this rank and the table of the whole rollout -> advantages.
- *Objective*: tensors of a micro-batch and its sequences -> one value per token, which replaces the surrogate.
- *Loss term*: tensors of response tokens and their sequences -> one value per token; the trainer weights and sums them like its own terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.objectives import Sequences
from vapo_mcore.config.schema import Config, LossTermConfig
from vapo_mcore.errors import TrainingError
from vapo_mcore.extensions.loading import load_function
from vapo_mcore.extensions.signature import read_signature

if TYPE_CHECKING:
    from vapo_mcore.config.schema import CustomEstimatorConfig
    from vapo_mcore.config.schema.algorithm import CustomLossConfig

ESTIMATOR_INPUTS = (
    "rewards", "mask", "cu_seqlens", "tokens", "rollout_logprobs", "rows", "row_ids", "trainable", "gamma", "group",
    "values", "bootstrap",
)  # fmt: skip
SEQUENCE_INPUTS = ("cu_seqlens", "sequences")
"""The inputs of losses that say which tokens belong to which sequence."""
TERM_INPUTS = (
    "logprobs", "old_logprobs", "rollout_logprobs", "advantages", "rewards", "positive_mask", "tokens", "entropy",
    "values", "returns", "ref_logprobs",
    "row_id", "row_group", "row_reward", "row_score", "row_length", "row_correct", "row_truncated",
    *SEQUENCE_INPUTS,
)  # fmt: skip
OBJECTIVE_INPUTS = (*TERM_INPUTS, "mask")
_NOT_STORED = ("logprobs", "entropy", "tokens", "mask", *SEQUENCE_INPUTS)
"""Inputs of losses that are not tensors of the rollout: outputs of the model, its labels, and the layout of the micro-batch."""
ROW_PREFIX = "row_"
"""Prefix of the inputs that describe the whole response of a token: every token of a response has the same value."""


def missing_estimator_inputs(config: Config) -> dict[str, str]:
    """Return the estimator inputs that this configuration does not provide, with the reason."""
    missing: dict[str, str] = {}
    if not config.uses_critic:
        missing["values"] = "which needs a critic: set algorithm.advantage.custom.critic: true"
    if config.algorithm.advantage.truncation != "bootstrap":
        missing["bootstrap"] = "which needs algorithm.advantage.truncation: bootstrap"
    return missing


def missing_term_inputs(config: Config) -> dict[str, str]:
    """Return the loss-term inputs that this configuration does not provide, with the reason."""
    missing: dict[str, str] = {}
    if not config.uses_critic:
        missing |= dict.fromkeys(("values", "returns"), "which needs a critic, and this estimator builds none")
    if not config.uses_reference:
        missing["ref_logprobs"] = "which needs the reference model of algorithm.kl (place: reward or loss)"
    return missing


class CustomEstimator:
    """User-defined advantage estimator with its options."""

    def __init__(self, settings: CustomEstimatorConfig) -> None:
        self.reference = settings.function
        self.function = load_function(settings.function)
        self.inputs = read_signature(self.function).inputs
        self.options = dict(settings.options)

    def __call__(self, available: Mapping[str, Any]) -> Tensor:
        """Return float32 [total] advantages, 0 at masked tokens. ``available``: tensors by name, including ``mask``, ``rewards``.

        Raises TrainingError if the function does not return one floating-point value per token.
        """
        rewards, mask = available["rewards"], available["mask"]
        with torch.no_grad():
            found = self.function(*(available[name] for name in self.inputs), **self.options)
        if not isinstance(found, Tensor) or found.shape != rewards.shape or not found.is_floating_point():
            raise TrainingError(f"{self.reference} returned {_kind(found)}; expected one advantage per token, float {list(rewards.shape)}")
        return torch.where(mask, found.to(device=rewards.device, dtype=torch.float32), 0.0)


class CustomTerm:
    """User-defined loss term with its options: one value per response token, weighted like the surrogate."""

    def __init__(self, settings: LossTermConfig) -> None:
        self.name, self.coef = settings.name, settings.coef
        self.reference = settings.function
        self.function: Callable[..., Any] = load_function(settings.function)
        self.inputs = read_signature(self.function).inputs
        self.options = dict(settings.options)

    @property
    def needs_entropy(self) -> bool:
        return "entropy" in self.inputs

    @property
    def stored(self) -> tuple[str, ...]:
        """Inputs that are tensors of the rollout."""
        return tuple(name for name in self.inputs if name not in _NOT_STORED)

    @property
    def reads_sequences(self) -> bool:
        """Whether the function knows which tokens belong to which sequence."""
        return not set(SEQUENCE_INPUTS).isdisjoint(self.inputs)

    def __call__(
        self, available: Mapping[str, Tensor], mask: Tensor, weights: Tensor, context_parallel_group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Return sum_t w_t term_t over the unmasked tokens: a differentiable scalar, not yet multiplied with ``coef``.

        The function receives the unmasked tokens only, so values at masked tokens cannot affect the loss or its gradient. If it reads
        sequences, ``cu_seqlens`` gets the bounds among these tokens.

        Args:
            available: [T] tensors in any order or layout; for a function that reads sequences also the micro-batch's ``cu_seqlens``.
            mask: bool [T].
            weights: float [T], fixed for the whole mini-batch.
            context_parallel_group: the group that splits each sequence; None: sequences are whole.
        """
        # nonzero() synchronises with the device once; the built-in terms do not synchronise.
        chosen = mask.nonzero().flatten()
        given: dict[str, Any] = {name: available[name].index_select(0, chosen) for name in self.inputs if name not in SEQUENCE_INPUTS}
        if self.reads_sequences:
            given |= of_sequences(Sequences(available["cu_seqlens"], context_parallel_group).only(mask))
        return (self.terms(given) * weights.index_select(0, chosen)).sum()

    def terms(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the values of the function for inputs [tokens]. Raises TrainingError unless it is one float value per token."""
        found = self.function(*(inputs[name] for name in self.inputs), **self.options)
        (shape,) = {tuple(inputs[name].shape) for name in self.inputs if name not in SEQUENCE_INPUTS}
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
            raise TrainingError(
                f"loss term {self.name!r}: {self.reference} returned {_kind(found)}; expected one value per token, {list(shape)}"
            )
        return found


class CustomObjective:
    """User-defined objective that replaces the surrogate, with its options: one value per token, computed from whole sequences."""

    def __init__(self, settings: CustomLossConfig) -> None:
        self.reference = settings.function
        self.function: Callable[..., Any] = load_function(settings.function)
        self.inputs = read_signature(self.function).inputs
        self.options = dict(settings.options)

    @property
    def needs_entropy(self) -> bool:
        return "entropy" in self.inputs

    @property
    def stored(self) -> tuple[str, ...]:
        """Inputs that are tensors of the rollout."""
        return tuple(name for name in self.inputs if name not in _NOT_STORED)

    def __call__(self, available: Mapping[str, Tensor], mask: Tensor, sequences: Sequences) -> Tensor:
        """Return float [T], 0 at masked tokens. The function receives the tokens of a micro-batch in order; masked values are 0.

        Raises TrainingError if it does not return one floating-point value per token.
        """
        given: dict[str, Any] = {"mask": mask} | of_sequences(sequences)
        for name in self.inputs:
            if name not in given:
                tensor = available[name]
                given[name] = torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
        found = self.function(*(given[name] for name in self.inputs), **self.options)
        if not isinstance(found, Tensor) or found.shape != mask.shape or not found.is_floating_point():
            raise TrainingError(f"{self.reference} returned {_kind(found)}; expected one value per token, float {list(mask.shape)}")
        return torch.where(mask, found, torch.zeros((), dtype=found.dtype, device=found.device))


def of_sequences(sequences: Sequences) -> dict[str, Any]:
    """Return the inputs ``SEQUENCE_INPUTS`` of a loss."""
    return {"cu_seqlens": sequences.cu_seqlens, "sequences": sequences}


def loss_terms(settings: Sequence[LossTermConfig]) -> tuple[CustomTerm, ...]:
    """Import the configured loss terms."""
    return tuple(CustomTerm(term) for term in settings)


def _kind(value: object) -> str:
    return f"a tensor {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
