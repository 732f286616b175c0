"""``plan --search``: find the cheapest layouts in which a recipe fits."""

from __future__ import annotations

from collections.abc import Iterator

from vapo_mcore.planning.planner import Change, Cluster, Plan, Planner, Reload, try_plan
from vapo_mcore.planning.state import GRADIENT_BYTES, ITEM_BYTES, num_parameters

_LONG_SEQUENCE = 16384
"""Maximum sequence length from which on context parallelism is tried."""

_SHOWN = 5


def cheapest_layouts(plan: Plan, planner: Planner, reload: Reload) -> list[Change]:
    """Return up to five layouts that fit on at most the nodes of ``plan``, by estimated GPU-hours, with the recipe's batch sizes.

    Tries all degrees of tensor parallelism within a node and of pipeline and data parallelism on 1, 2, 4, ... nodes, with the least
    recomputation that fits, and context parallelism for long sequences if a layout does not fit without it.
    """
    config, cluster = plan.subject.config, plan.cluster
    long = config.max_sequence_length >= _LONG_SEQUENCE
    found: list[Change] = []
    for processes in _world_sizes(cluster):
        for tp in _powers(min(8, cluster.devices_per_node, processes)):
            for pp in _powers(processes // tp):
                if not _is_possible(plan, tp, pp):
                    continue
                for cp in _powers(processes // (tp * pp) if long else 1):
                    fitting = _least_recomputation(planner, reload, cluster, processes, tp, pp, cp)
                    if fitting is not None:
                        found.append(fitting)
                        break
    return sorted(found, key=lambda change: change.plan.run.gpu_hours)[:_SHOWN]


def _is_possible(plan: Plan, tp: int, pp: int) -> bool:
    """Return whether the layers can be split, and weights and gradients of one model, sharded only by TP, PP and EP, fit."""
    policy, ep = plan.subject.policy, plan.subject.config.parallel.expert_model_parallel_size
    bytes_each = ITEM_BYTES[plan.subject.config.model.dtype] + GRADIENT_BYTES
    return policy.num_layers % pp == 0 and num_parameters(policy) * bytes_each / (tp * pp * ep) < plan.capacity


def _least_recomputation(planner: Planner, reload: Reload, cluster: Cluster, processes: int, tp: int, pp: int, cp: int) -> Change | None:
    degrees = {"world": processes, "tensor_model_parallel": tp, "pipeline_model_parallel": pp, "context_parallel": cp}
    settings = [f"parallel.{name}_size={degree}" for name, degree in degrees.items()]
    settings += [
        "parallel.virtual_pipeline_model_parallel_size=null",
        "parallel.data_parallel_size=null",
        "parallel.sequence_parallel=null",
    ]
    for recompute in ("none", "selective", "full"):
        chosen = [*settings, f"model.recompute={recompute}"]
        changed = try_plan(planner, reload, cluster, chosen)
        if changed is None:
            return None
        if changed.fits:
            return Change(" ".join(setting for setting in chosen if not setting.endswith("=null")), changed)
    return None


def _world_sizes(cluster: Cluster) -> Iterator[int]:
    yield from (processes for processes in _powers(cluster.devices_per_node) if processes < cluster.devices_per_node)
    for nodes in sorted({*_powers(cluster.nodes), cluster.nodes}):
        yield nodes * cluster.devices_per_node


def _powers(limit: int) -> Iterator[int]:
    value = 1
    while value <= limit:
        yield value
        value *= 2
