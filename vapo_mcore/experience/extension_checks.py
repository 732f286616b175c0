"""Check custom functions before a model loads: import them, check their parameters, and call them on a synthetic batch.

Losses are also checked for independence of packing and layout: the result of a token must not depend on which other sequences share
its micro-batch. (``data.sources.check_files`` checks custom tasks, since it reads their rows.)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.config.rules import references
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.extensions.loading import describe, load_function
from vapo_mcore.extensions.signature import signature_faults
from vapo_mcore.rollout.factory import engine_class

if TYPE_CHECKING:
    from torch import Tensor

    from vapo_mcore.config.schema import CustomEstimatorConfig, LossTermConfig
    from vapo_mcore.config.schema.algorithm import CustomLossConfig

_PROBE_TOKENS = 12


def check_extensions(config: Config, *, verifiers: bool = True) -> None:
    """Raise one ConfigError with all errors of the custom engine, estimator, losses and verifiers in ``config``.

    Without custom functions nothing is imported, not even torch. Verifiers are loaded in a separate process; ``verifiers=False`` skips
    them.
    """
    faults: list[str] = []
    if config.rollout.engine not in BUILT_IN_ENGINES:
        try:
            engine_class(config.rollout.engine)
        except ConfigError as error:
            faults.append(str(error))
    advantage = config.algorithm.advantage
    if advantage.estimator == "custom" and advantage.custom is not None:
        faults += _prefixed("algorithm.advantage.custom", advantage.custom.function, _estimator_faults(config, advantage.custom))
    loss = config.algorithm.policy_loss
    if loss.kind == "custom" and loss.custom is not None:
        faults += _prefixed("algorithm.policy_loss.custom", loss.custom.function, _objective_faults(config, loss.custom))
    for number, term in enumerate(config.algorithm.loss_terms):
        faults += _prefixed(f"algorithm.loss_terms.{number}", term.function, _term_faults(config, term))
    faults += _verifier_faults(config) if verifiers else []
    if faults:
        raise ConfigError("\n".join(faults))


def _prefixed(key: str, reference: str, faults: list[str]) -> list[str]:
    return [f"{key}: {reference} {fault}" if not fault.startswith("!") else f"{key}: {fault[1:]}" for fault in faults]


def _function_faults(reference: str, available: tuple[str, ...], options: dict[str, Any], missing: dict[str, str]) -> list[str]:
    """Return errors of import and parameters. Errors that already name their location start with '!'."""
    try:
        function = load_function(reference)
    except ConfigError as error:
        return [f"!{error}"]
    return signature_faults(function, [name for name in available if name not in missing], options, missing)


def _estimator_faults(config: Config, settings: CustomEstimatorConfig) -> list[str]:
    from vapo_mcore.extensions.points import ESTIMATOR_INPUTS, CustomEstimator, missing_estimator_inputs

    missing = missing_estimator_inputs(config)
    faults = _function_faults(settings.function, ESTIMATOR_INPUTS, settings.options, missing)
    if faults:
        return faults
    return _tried(lambda: _not_finite(CustomEstimator(settings)(_estimator_probe(config))))


def _term_faults(config: Config, settings: LossTermConfig) -> list[str]:
    from vapo_mcore.extensions.points import TERM_INPUTS, CustomTerm, missing_term_inputs

    missing = missing_term_inputs(config)
    faults = _function_faults(settings.function, TERM_INPUTS, settings.options, missing)
    return faults or _tried(lambda: _term_contract(CustomTerm(settings)))


def _objective_faults(config: Config, settings: CustomLossConfig) -> list[str]:
    from vapo_mcore.extensions.points import OBJECTIVE_INPUTS, CustomObjective, missing_term_inputs

    faults = _function_faults(settings.function, OBJECTIVE_INPUTS, settings.options, missing_term_inputs(config))
    return faults or _tried(lambda: _objective_contract(CustomObjective(settings)))


def _objective_contract(objective: Any) -> list[str]:
    """Return errors of an objective on synthetic sequences: no gradient, not finite, or dependent on another sequence."""
    import torch

    from vapo_mcore.algorithm.objectives import Sequences

    probe, bounds = _term_probe(), (0, 3, 4, 9, _PROBE_TOKENS)
    mask = torch.ones(_PROBE_TOKENS, dtype=torch.bool)
    found = objective(probe, mask, Sequences(torch.tensor(bounds)))
    faults = _not_finite(found)
    if not found.requires_grad:
        return [*faults, "returned numbers without a gradient: compute them from 'logprobs' or 'entropy' without detaching"]
    parts = []
    for first, last in pairwise(bounds):
        part = {name: tensor[first:last] for name, tensor in probe.items()}
        parts.append(objective(part, mask[first:last], Sequences(torch.tensor([0, last - first]))))
    if not torch.allclose(torch.cat(parts), found, rtol=1e-4, atol=1e-6, equal_nan=True):
        faults.append(
            "returned different values for the same sequence next to other sequences: a token's value may depend only on its own sequence "
            "(through 'sequences'), otherwise results depend on micro-batches and layout"
        )
    return faults


def _tried(attempt: Callable[[], list[str]]) -> list[str]:
    try:
        return attempt()
    except VapoError as error:
        return [f"!{error}"]
    except Exception as error:  # noqa: BLE001 (report any exception of a user's function)
        return [f"failed on a synthetic batch: {describe(error)}"]


def _not_finite(found: Tensor) -> list[str]:
    return [] if bool(found.isfinite().all()) else ["returned values that are not finite for a synthetic batch of finite inputs"]


def _term_contract(term: Any) -> list[str]:
    """Return errors of a term on synthetic tokens: no gradient, not finite, or dependent on other tokens (sequences if it reads them)."""
    import torch

    from vapo_mcore.algorithm.objectives import Sequences
    from vapo_mcore.extensions.points import of_sequences

    if not {"logprobs", "entropy"} & set(term.inputs):
        return ["takes neither 'logprobs' nor 'entropy': it does not depend on the policy, so it has no gradient"]
    probe = _term_probe()
    # A sequence without response tokens, and a micro-batch without tokens, occur with context and pipeline parallelism.
    bounds = (0, 3, 4, 4, 9, _PROBE_TOKENS)
    found = term.terms(probe | of_sequences(Sequences(torch.tensor(bounds))))
    faults = _not_finite(found)
    if not found.requires_grad:
        return [*faults, "returned numbers without a gradient: compute them from 'logprobs' or 'entropy' without detaching"]
    parts = []
    for first, last in pairwise(bounds) if term.reads_sequences else ((0, 5), (5, 5), (5, _PROBE_TOKENS)):
        own = of_sequences(Sequences(torch.tensor([0, last - first])))
        parts.append(term.terms({name: tensor[first:last] for name, tensor in probe.items()} | own))
    if not torch.allclose(torch.cat(parts), found, rtol=1e-4, atol=1e-6, equal_nan=True):
        faults.append(
            "returned different values for the same tokens in another micro-batch: a token's value may depend only on that token "
            "(no mean, sum, maximum or order over tokens; the trainer averages), or on its own sequence through 'cu_seqlens' or 'sequences'"
        )
    return faults


def _term_probe() -> dict[str, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(0)

    def noise() -> Tensor:
        return torch.randn(_PROBE_TOKENS, generator=generator)

    logprobs = -noise().abs() - 0.1
    probe = {name: logprobs + 0.1 * noise() for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")}
    probe = {name: tensor.clamp(max=-1e-3) for name, tensor in probe.items()}
    probe |= {name: noise() for name in ("advantages", "rewards", "values", "returns")}
    probe |= {"positive_mask": noise() > 0, "tokens": torch.arange(_PROBE_TOKENS)}
    probe |= {"row_id": torch.arange(_PROBE_TOKENS), "row_group": torch.zeros(_PROBE_TOKENS, dtype=torch.int64)}
    probe |= {"row_reward": noise(), "row_score": noise().abs(), "row_length": torch.full((_PROBE_TOKENS,), 3)}
    probe |= {"row_correct": noise() > 0, "row_truncated": noise() > 0}
    return probe | {"logprobs": logprobs.requires_grad_(), "entropy": noise().abs().requires_grad_()}


def _estimator_probe(config: Config) -> dict[str, Any]:
    """Build two groups of two responses with prompts of 2 tokens and lengths 3, 1, 4 and 0; the last one is ungraded."""
    import torch

    from vapo_mcore.algorithm.segments import place_terminal_rewards
    from vapo_mcore.data.rollout_batch import Rows

    lengths, scores = torch.tensor([3, 1, 4, 0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    graded = torch.tensor([True, True, True, False])
    rows = Rows(
        prompt_id=["probe/1#0", "probe/1#0", "probe/2#0", "probe/2#0"],
        group=torch.tensor([0, 0, 1, 1]),
        sample_index=torch.tensor([0, 1, 0, 1]),
        verdict=scores > 0,
        graded=graded,
        ungraded=["", "", "", "timeout"],
        score=scores,
        reward=scores,
        finish_reason=["stop", "stop", "length", "stop"],
        prompt_length=torch.full((4,), 2),
        response_length=lengths,
        tool_length=torch.zeros_like(lengths),
        turns=torch.ones_like(lengths),
        observations_cut=torch.zeros_like(lengths),
        missed_end=torch.zeros(4, dtype=torch.bool),
        source=["probe"] * 4,
        step_rewards=[()] * 4,
        segments=[()] * 4,
        observations=[()] * 4,
    )
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), rows.length.cumsum(0)])
    total = int(cu_seqlens[-1])
    positions = torch.arange(total) - torch.repeat_interleave(cu_seqlens[:-1], rows.length)
    mask = positions >= 2
    return {
        "rewards": place_terminal_rewards(scores, mask, cu_seqlens),
        "mask": mask,
        "cu_seqlens": cu_seqlens,
        "tokens": torch.arange(total),
        "rollout_logprobs": torch.where(mask, -0.5, 0.0),
        "rows": rows,
        "row_ids": torch.arange(4),
        "trainable": graded,
        "gamma": config.algorithm.advantage.gamma,
        "group": None,
        "values": torch.where(mask, 0.25, 0.0),
        "bootstrap": torch.zeros(4),
    }


def _verifier_faults(config: Config) -> list[str]:
    """Import custom verifiers in a grading process, where they will run, and return their errors."""
    named = {reference: key for key, reference in references(config) if key.endswith(".verifier")}
    if not named:
        return []
    from vapo_mcore.rewards import VerifierPool

    faults = []
    with VerifierPool(1, config.reward.timeout_seconds) as pool:
        for verifier, key in named.items():
            try:
                pool.load([verifier])
            except VapoError as error:
                faults.append(f"{key}: {error}")
    return faults
