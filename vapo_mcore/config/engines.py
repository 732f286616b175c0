"""Names and properties of rollout engines, which rules, plans and checks read before an engine is built.

``rollout.engine`` names a built-in engine or a user-defined class (``vapo_mcore.rollout.stateful.StatefulEngine``).
"""

from __future__ import annotations

from dataclasses import dataclass

from vapo_mcore.config.references import FORM, is_reference, unknown_name


@dataclass(frozen=True)
class EngineTraits:
    """Properties of an engine class: its attribute ``traits``.

    Attributes:
        package: optional module that the engine imports.
        splits_model: a replica spans ``rollout.tensor_parallel_size`` ranks; otherwise each rank is a replica with the whole model.
        reserves_cache: reserves its KV cache when it starts (``rollout.vllm``); the cache must hold one longest sequence.
        sleeps: frees its GPU memory between rollouts.
        captures_graphs: captures CUDA graphs unless ``rollout.vllm.enforce_eager``.
        returns_experts: can return the experts that a mixture chose for each token (``model.router.replay: engine``).
    """

    package: str | None = None
    splits_model: bool = False
    reserves_cache: bool = False
    sleeps: bool = False
    captures_graphs: bool = False
    returns_experts: bool = False


@dataclass(frozen=True)
class BuiltInEngine:
    """A built-in engine. ``keys``: settings that no other built-in engine reads."""

    reference: str
    traits: EngineTraits
    keys: tuple[str, ...] = ()


BUILT_IN_ENGINES = {
    "vllm": BuiltInEngine(
        "vapo_mcore.rollout.vllm_engine:VllmEngine",
        EngineTraits(package="vllm", splits_model=True, reserves_cache=True, sleeps=True, captures_graphs=True, returns_experts=True),
        ("rollout.vllm", "rollout.tensor_parallel_size"),
    ),
    "transformers": BuiltInEngine("vapo_mcore.rollout.transformers_engine:TransformersEngine", EngineTraits()),
}


def engine_name_fault(name: str) -> str | None:
    """Return an error message for a name that is neither built-in nor a reference to a class, else None."""
    if name in BUILT_IN_ENGINES or is_reference(name):
        return None
    return unknown_name("engine", name, BUILT_IN_ENGINES, f"name a custom one by a reference to its class: {FORM}")
