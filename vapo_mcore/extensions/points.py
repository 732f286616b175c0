"""The places where a user's function comes in, what each can ask for, and how it is called.

- *Advantage estimator*: token-aligned packed tensors of this rank and the table of the whole rollout -> advantages.
- *Objective*: tensors of a micro-batch and its sequences -> one number a token, in place of the surrogate.
- *Loss term*: tensors of response tokens -> one number a token; the trainer weighs and sums, as it does with its own terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vapo_mcore.config.schema import Config, LossTermConfig
from vapo_mcore.errors import TrainingError
from vapo_mcore.extensions.loading import load_function
from vapo_mcore.extensions.signature import read_signature

if TYPE_CHECKING:
    from vapo_mcore.algorithm.objectives import Sequences
    from vapo_mcore.config.schema import CustomEstimatorConfig
    from vapo_mcore.config.schema.algorithm import CustomLossConfig

ESTIMATOR_INPUTS = (
    "rewards", "mask", "cu_seqlens", "tokens", "rollout_logprobs", "rows", "row_ids", "trainable", "gamma", "group",
    "values", "bootstrap",
)  # fmt: skip
TERM_INPUTS = (
    "logprobs", "old_logprobs", "rollout_logprobs", "advantages", "rewards", "positive_mask", "tokens", "entropy",
    "values", "returns", "ref_logprobs",
    "row_id", "row_group", "row_reward", "row_score", "row_length", "row_correct", "row_truncated",
)  # fmt: skip
OBJECTIVE_INPUTS = (*TERM_INPUTS, "mask", "sequences")
ROW_PREFIX = "row_"
"""What is known of a token's whole response; the same number at all its tokens."""


def missing_estimator_inputs(config: Config) -> dict[str, str]:
    """Inputs of an estimator that this configuration does not have, with the reason."""
    missing: dict[str, str] = {}
    if not config.uses_critic:
        missing["values"] = "which needs a critic: set algorithm.advantage.custom.critic: true"
    if config.algorithm.advantage.truncation != "bootstrap":
        missing["bootstrap"] = "which needs algorithm.advantage.truncation: bootstrap"
    return missing


def missing_term_inputs(config: Config) -> dict[str, str]:
    """Inputs of a loss term that this configuration does not have, with the reason."""
    missing: dict[str, str] = {}
    if not config.uses_critic:
        missing |= dict.fromkeys(("values", "returns"), "which needs a critic, and this estimator builds none")
    if not config.uses_reference:
        missing["ref_logprobs"] = "which needs the reference model of algorithm.kl (place: reward or loss)"
    return missing


class CustomEstimator:
    """A user's advantage estimator, bound to its options."""

    def __init__(self, settings: CustomEstimatorConfig) -> None:
        self.reference = settings.function
        self.function = load_function(settings.function)
        self.inputs = read_signature(self.function).inputs
        self.options = dict(settings.options)

    def __call__(self, available: Mapping[str, Any]) -> Tensor:
        """float32 [total] advantages, 0 at masked tokens. ``available``: by name, at least ``inputs``, ``mask`` and ``rewards``.

        Raises TrainingError if the function returns anything but one floating-point number a token.
        """
        rewards, mask = available["rewards"], available["mask"]
        with torch.no_grad():
            found = self.function(*(available[name] for name in self.inputs), **self.options)
        if not isinstance(found, Tensor) or found.shape != rewards.shape or not found.is_floating_point():
            raise TrainingError(
                f"{self.reference} returned {_kind(found)}; one advantage a token was expected, float {list(rewards.shape)}"
            )
        return torch.where(mask, found.to(device=rewards.device, dtype=torch.float32), 0.0)


class CustomTerm:
    """A user's loss term, bound to its options: one number for each response token, weighed like the surrogate."""

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
        """The inputs that are tensors of the rollout (the others come out of the model, ``tokens`` are its labels)."""
        return tuple(name for name in self.inputs if name not in ("logprobs", "entropy", "tokens"))

    def __call__(self, available: Mapping[str, Tensor], mask: Tensor, weights: Tensor) -> Tensor:
        """sum_t w_t term_t over the unmasked tokens: a scalar with a gradient, before ``coef``.

        available: [T] tensors in any order or layout; mask: bool [T]; weights: float [T], fixed for the whole mini-batch. The function
        sees the unmasked tokens alone, so nothing at a masked one can reach the loss or its gradient.
        """
        # One synchronisation with the device, for terms that ask for something; the built-in terms have none.
        chosen = mask.nonzero().flatten()
        found = self.terms({name: available[name].index_select(0, chosen) for name in self.inputs})
        return (found * weights.index_select(0, chosen)).sum()

    def terms(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The function's numbers for inputs [tokens]; TrainingError if they are not one floating-point number a token."""
        found = self.function(*(inputs[name] for name in self.inputs), **self.options)
        (shape,) = {tuple(inputs[name].shape) for name in self.inputs}
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or not found.is_floating_point():
            raise TrainingError(
                f"loss term {self.name!r}: {self.reference} returned {_kind(found)}; expected one number a token, {list(shape)}"
            )
        return found


class CustomObjective:
    """A user's objective in place of the surrogate, bound to its options: one number for each token, which may read whole sequences."""

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
        """The inputs that are tensors of the rollout."""
        return tuple(name for name in self.inputs if name not in ("logprobs", "entropy", "tokens", "mask", "sequences"))

    def __call__(self, available: Mapping[str, Tensor], mask: Tensor, sequences: Sequences) -> Tensor:
        """float [T], 0 at masked tokens. The function sees the tokens of a micro-batch in order, 0 in place of what is masked.

        Raises TrainingError if it returns anything but one floating-point number a token.
        """
        given: dict[str, Any] = {"mask": mask, "sequences": sequences}
        for name in self.inputs:
            if name not in given:
                tensor = available[name]
                given[name] = torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
        found = self.function(*(given[name] for name in self.inputs), **self.options)
        if not isinstance(found, Tensor) or found.shape != mask.shape or not found.is_floating_point():
            raise TrainingError(f"{self.reference} returned {_kind(found)}; one number a token was expected, float {list(mask.shape)}")
        return torch.where(mask, found, torch.zeros((), dtype=found.dtype, device=found.device))


def loss_terms(settings: Sequence[LossTermConfig]) -> tuple[CustomTerm, ...]:
    """The configured terms, imported."""
    return tuple(CustomTerm(term) for term in settings)


def _kind(value: object) -> str:
    return f"a tensor {value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
