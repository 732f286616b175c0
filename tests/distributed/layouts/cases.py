"""The cases of the layouts' worker: for each world size its layouts, with the models that take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import problem
import torch.distributed as dist


@dataclass(frozen=True)
class Case:
    """A layout with a model, and how the sequences are packed into micro-batches."""

    model: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int | None = None
    sequence_parallel: bool | None = None
    microbatches: int = 3
    aggregation: str = "token"
    recompute: str = "none"
    dtype: str = "float32"
    equal: bool = False  # micro-batches padded to one size
    ep: int = 1
    etp: int | None = None
    replay: bool = False  # routers repeat the choices of a pass with other weights and other micro-batches (``replay.py``)
    attention: str = "auto"
    parts_of_dp: int = 1  # one process takes the micro-batches of so many data-parallel ranks
    critic: dict[str, int] | None = None  # degrees of the critic's layout; None: the policy's
    critic_model: str | None = None  # the critic's model; None: the policy's

    @property
    def name(self) -> str:
        world = dist.get_world_size()
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"cp{self.cp}", f"dp{world // (self.tp * self.pp * self.cp)}"]
        parts += [f"vpp{self.vpp}"] if self.vpp else []
        parts += ["equal"] if self.equal else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [f"etp{self.etp}"] if self.etp else []
        parts += ["no_sp"] if self.sequence_parallel is False else []
        parts += [self.recompute] if self.recompute != "none" else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [self.attention] if self.attention != "auto" else []
        parts += ["replay"] if self.replay else []
        if self.critic is not None:
            parts += ["critic", *(f"{name}{degree}" for name, degree in self.critic.items())]
            parts += [self.critic_model] if self.critic_model else []
        return "-".join([self.model, *parts, f"mb{self.microbatches}", self.aggregation])

    @property
    def pipelines(self) -> list[tuple[int, int | None]]:
        """(pipeline size, chunks per rank) of both models."""
        critic = {"pp": self.pp, "vpp": self.vpp} if self.critic is None else self.critic
        return [(self.pp, self.vpp), (critic.get("pp", 1) or 1, critic.get("vpp"))]


BF16 = "bfloat16"


def bfloat16_cases(world: int) -> list[Case]:
    """bfloat16 weights and activations; the world of one takes the very micro-batches of the two data-parallel ranks."""
    if world == 1:
        return [Case("qwen2", dtype=BF16, parts_of_dp=2)]
    layouts: dict[int, tuple[dict[str, Any], ...]] = {2: ({}, {"tp": 2}, {"pp": 2}, {"cp": 2}), 4: ({"tp": 2, "pp": 2},)}
    return [Case("qwen2", **degrees, dtype=BF16) for degrees in layouts.get(world, ())]


def replay_cases(world: int) -> list[Case]:
    """Router replay; the first case of one process writes the weights that all others are compared with."""
    layouts: dict[int, tuple[dict[str, Any], ...]] = {
        1: ({}, {"microbatches": 1, "recompute": "full"}),
        2: (
            {"ep": 2},
            {"ep": 2, "recompute": "selective"},
            {"pp": 2, "recompute": "full"},
            {"pp": 2, "vpp": 2},
            {"tp": 2, "ep": 2, "etp": 1},
        ),
        4: (
            {"tp": 2, "ep": 2},
            {"pp": 2, "ep": 2},
            {"cp": 2, "ep": 2},
            {"pp": 2, "vpp": 2, "ep": 2, "recompute": "full"},
            {"tp": 2, "cp": 2, "ep": 2, "etp": 1, "recompute": "selective"},
            {"pp": 2, "ep": 2, "equal": True},
        ),
        8: ({"tp": 2, "pp": 2, "cp": 2, "ep": 2},),
    }
    result = [Case(problem.MIXTURE, **degrees, replay=True) for degrees in layouts[world]]
    return result + ([Case(problem.MIXTURES[1], replay=True)] if world == 1 else [])


def critic_cases(world: int) -> list[Case]:
    """A critic with another layout than the policy's, and of another architecture beside a mixture."""
    layouts: dict[int, tuple[Case, ...]] = {
        2: (
            Case("qwen2", tp=2, critic={"pp": 2}),
            Case("qwen2", tp=2, critic={}),
            Case("qwen2_tied", critic={"tp": 2}),
            Case("qwen3", pp=2, vpp=2, critic={"cp": 2}),
            Case(problem.HISTOGRAM_HEAD, cp=2, critic={"pp": 2, "vpp": 2}),
            Case(problem.MIXTURE, ep=2, critic={"tp": 2}),
            Case(problem.MIXTURE, ep=2, critic={"tp": 2}, critic_model="qwen2"),
            Case("qwen2", tp=2, critic={"ep": 2}, critic_model=problem.MIXTURE),
        ),
        4: (
            Case("qwen2", tp=2, pp=2, critic={"tp": 2, "cp": 2}),
            Case("qwen3", tp=4, critic={"pp": 2}),
            Case(problem.MIXTURE, tp=2, ep=2, critic={"pp": 2, "ep": 2}),
            Case(problem.MIXTURE, ep=4, critic={"tp": 2, "pp": 2}, critic_model="qwen3"),
        ),
        8: (Case(problem.MIXTURE, tp=2, pp=2, ep=2, critic={"tp": 2, "cp": 2}, critic_model="qwen2"),),
    }
    return list(layouts.get(world, ()))


def _cases_of_one() -> list[Case]:
    extra = [
        Case("qwen2", microbatches=1),
        Case("qwen2", microbatches=12),
        Case("qwen2", aggregation="gspo"),
        Case("qwen2", recompute="full"),
        Case("qwen3", recompute="selective"),
        Case(problem.MLP_HEAD),
        Case(problem.HISTOGRAM_HEAD),
        *(Case(model) for model in problem.UNKNOWN_MODELS),
        Case(problem.MIXTURE, recompute="full"),
        *(Case(model) for model in problem.MIXTURES),
    ]
    return [Case(model, aggregation=kind) for model in problem.MODELS for kind in ("token", "sequence", "fixed_length")] + extra


def _cases_of_two() -> list[Case]:
    result = [Case(model, **degrees) for model in problem.MODELS for degrees in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {})]
    result += [Case(model, pp=2, vpp=2) for model in ("qwen2", "qwen2_tied", "qwen3")]
    result += [Case("qwen2", pp=2, equal=True)]
    result += [Case("qwen2", tp=2, sequence_parallel=False), Case("qwen3", tp=2, sequence_parallel=False)]
    result += [Case("qwen2", **degrees, aggregation=kind) for degrees in ({"cp": 2}, {}) for kind in ("sequence", "fixed_length")]
    result += [Case("qwen2", **degrees, aggregation="gspo") for degrees in ({"cp": 2}, {"pp": 2}, {})]
    result += [Case("qwen2", microbatches=m) for m in (1, 7)] + [Case("llama_tied", pp=2, vpp=2, microbatches=1)]
    result += [
        Case("qwen2_tied", tp=2, recompute="full"),
        Case("qwen3", tp=2, recompute="selective"),
        Case("qwen2", cp=2, recompute="full"),
        *(Case(problem.MLP_HEAD, **degrees) for degrees in ({"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {})),
        *(Case(problem.HISTOGRAM_HEAD, **degrees) for degrees in ({"tp": 2}, {"pp": 2})),
        Case(problem.UNKNOWN_MODELS[0], tp=2),
        Case(problem.UNKNOWN_MODELS[1], pp=2),
        *(Case(problem.MIXTURE, **degrees) for degrees in ({"tp": 2}, {"pp": 2}, {})),
        *(Case(problem.MIXTURE, ep=2, **degrees) for degrees in ({}, {"cp": 2}, {"tp": 2, "etp": 1}, {"recompute": "selective"})),
        Case(problem.MIXTURES[1], ep=2),
        Case("qwen2", ep=2),  # a dense critic beside a mixture
    ]
    return result + critic_cases(2)


def _cases_of_four() -> list[Case]:
    degrees4: tuple[dict[str, Any], ...] = (
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        {"pp": 2, "cp": 2},
        {"tp": 2},
        {"tp": 4},
        {"pp": 2, "vpp": 2},
    )
    return [Case(model, **degrees) for model in ("qwen2", "qwen2_tied", "qwen3") for degrees in degrees4] + [
        Case("one_kv_head", tp=2, pp=2),
        Case("llama_tied", tp=2, pp=2),
        Case("qwen3", tp=2, pp=2, equal=True),
        Case(problem.MLP_HEAD, tp=2, cp=2),
        Case(problem.HISTOGRAM_HEAD, tp=2, cp=2),
        Case("qwen2", cp=4),
        Case("qwen2", pp=4),
        Case("qwen2", tp=2, cp=2, aggregation="sequence"),
        Case(problem.UNKNOWN_MODELS[0], tp=4),
        *(Case(problem.MIXTURE, ep=2, **degrees) for degrees in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {}, {"pp": 2, "vpp": 2})),
        Case(problem.MIXTURE, ep=4),
        Case(problem.MIXTURE, tp=2, ep=4, etp=1),
        Case(problem.UNKNOWN_MODELS[1], tp=2, pp=2),
        *critic_cases(4),
    ]


def _cases_of_eight() -> list[Case]:
    return [
        Case("qwen2", tp=2, pp=2, cp=2),
        Case("qwen2_tied", tp=2, pp=2, cp=2),
        Case("qwen3", tp=2, pp=2, vpp=2),
        Case("one_kv_head", tp=2, cp=2, aggregation="sequence"),
        Case(problem.MIXTURE, tp=2, pp=2, ep=2),
        *critic_cases(8),
    ]


def layout_cases(world: int) -> list[Case]:
    """Return the cases of a world of 1, 2, 4 or 8 processes."""
    return {1: _cases_of_one, 2: _cases_of_two, 4: _cases_of_four, 8: _cases_of_eight}[world]()
