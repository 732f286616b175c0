"""Format a plan as text (rich tables) and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vapo_mcore.config.schema import ParallelConfig
from vapo_mcore.planning.devices import GIB
from vapo_mcore.planning.horizons import HorizonStep
from vapo_mcore.planning.memory import STAGES
from vapo_mcore.planning.planner import Change, Plan
from vapo_mcore.planning.state import num_parameters

_COLUMNS = {
    "generate": "generate",
    "values": "values",
    "critic_update": "critic update",
    "logprobs": "log-probs",
    "policy_update": "policy update",
    "sync": "weight sync",
}


def to_json(
    plan: Plan, notes: Sequence[str], changes: Sequence[Change], layouts: Sequence[Change], horizons: Sequence[HorizonStep] = ()
) -> dict[str, Any]:
    """Return the contents of the text report, with bytes and seconds as numbers."""
    config, cluster = plan.subject.config, plan.cluster
    return {
        "model": {
            role: {"parameters": num_parameters(arch, role), "family": arch.family, "layers": arch.num_layers}
            for role, arch in plan.subject.roles.items()
        },
        "cluster": {"nodes": cluster.nodes, "processes_per_node": cluster.processes_per_node, "device": asdict(cluster.device)},
        "layout": _layout(config.parallel) | {"rollout_tensor": config.rollout_tensor_parallel_size, "recompute": config.model.recompute},
        **({} if plan.work.critic is None else {"critic_layout": _layout(config.critic_parallel)}),
        "workload": {name: value for name, value in asdict(plan.work).items() if value is not None},
        "capacity_bytes": plan.capacity,
        "pipeline_ranks": [
            {
                "parameters": counts,
                "stages": {stage: {"parts": memory.parts, "total": memory.total} for stage, memory in rank.items()},
            }
            for rank, counts in zip(plan.ranks, plan.parameters, strict=True)
        ],
        "kv_cache": {"bytes": plan.vllm.kv_bytes, "tokens": plan.vllm.kv_tokens, "bytes_per_token": plan.vllm.kv_bytes_per_token},
        "host_bytes_per_node": asdict(plan.host),
        "disk_bytes": asdict(plan.disk),
        "communication_bytes": asdict(plan.step.communication),
        "seconds": {
            "step": plan.step.phases,
            "value_pretraining_step": plan.step.pretraining_phases,
            "evaluation": plan.step.evaluation,
        },
        "run": asdict(plan.run),
        "fits": plan.fits,
        "misfits": plan.misfits,
        "notes": list(notes),
        "changes_that_fit": [_change(change) for change in changes],
        "layouts": [_change(change) for change in layouts],
        "horizons": [asdict(step) | {"tokens_per_second": step.rollout.tokens_per_second} for step in horizons],
    }


def _layout(p: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor": p.tensor_model_parallel_size,
        "pipeline": p.pipeline_model_parallel_size,
        "virtual_pipeline": p.virtual_pipeline_model_parallel_size,
        "context": p.context_parallel_size,
        "data": p.data_parallel_size,
        "expert": p.expert_model_parallel_size,
    }


def _change(change: Change) -> dict[str, Any]:
    plan = change.plan
    return {
        "settings": change.setting,
        "nodes": plan.cluster.nodes,
        "peak_bytes": plan.peak,
        "seconds_per_step": plan.step.seconds,
        "gpu_hours": plan.run.gpu_hours,
    }


def print_plan(console: Console, plan: Plan, notes: Sequence[str]) -> None:
    config, cluster, work = plan.subject.config, plan.cluster, plan.work
    models = ", ".join(f"{role} {num_parameters(arch, role):,} parameters" for role, arch in plan.subject.roles.items())
    console.print(f"{config.model.path} ({config.model.dtype}): {models}")
    console.print(
        f"{cluster.nodes} node{'s' * (cluster.nodes > 1)} x {cluster.processes_per_node} {cluster.device.name}: "
        f"{config.parallel.degrees_text}; rollout tensor {config.rollout_tensor_parallel_size}; recompute {config.model.recompute}"
    )
    if work.critic is not None:
        console.print(f"critic: {config.critic_parallel.degrees_text}; {work.critic.microbatches_per_update} micro-batches per rank")
    console.print(
        f"per step: {work.responses:,} responses of {work.response_length:,} tokens (assumed mean; maximum "
        f"{config.rollout.max_response_length:,}) after prompts of {work.prompt_length:,}, {work.updates} updates of "
        f"{work.microbatches_per_update} micro-batches per rank"
    )
    for note in notes:
        console.print(f"note: {note}")
    console.print(_memory_table(plan))
    _print_other_bytes(console, plan)
    console.print(_time_table(plan))
    _print_run(console, plan)


def _memory_table(plan: Plan) -> Table:
    """Tabulate the memory of the fullest pipeline rank of each stage, one row per purpose."""
    unit = "device" if plan.cluster.device.is_gpu else "process"
    table = Table(
        title=f"GiB per {unit} on the fullest pipeline rank of each stage; {plan.capacity / GIB:.1f} available", title_justify="left"
    )
    table.add_column("")
    fullest = {stage: max((rank[stage] for rank in plan.ranks), key=lambda memory: memory.total) for stage in STAGES}
    stages = [stage for stage in STAGES if stage not in ("values", "critic_update") or plan.subject.critic is not None]
    for stage in stages:
        table.add_column(_COLUMNS[stage], justify="right")
    names = {name: None for stage in stages for name in fullest[stage].parts}
    for name in names:
        table.add_row(name, *(_gib(fullest[stage].parts.get(name)) for stage in stages))
    table.add_section()
    table.add_row("total", *(_gib(fullest[stage].total) for stage in stages))
    table.add_row("fits", *("yes" if fullest[stage].total <= plan.capacity else "NO" for stage in stages))
    return table


def _gib(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.01 else f"{value:.5f}"


def _print_other_bytes(console: Console, plan: Plan) -> None:
    vllm, host, disk, sent = plan.vllm, plan.host, plan.disk, plan.step.communication
    longest = vllm.kv_tokens / plan.subject.config.max_sequence_length
    console.print(f"KV cache of a replica: {vllm.kv_tokens:,} tokens ({longest:.1f} longest sequences)")
    console.print(
        f"host memory of the fullest node: {host.offloaded / GIB:.1f} GiB offloaded + {host.snapshots / GIB:.1f} GiB copies for "
        f"checkpoints + {host.processes / GIB:.1f} GiB processes"
        + (f" + {host.choices / GIB:.1f} GiB choices of experts" if host.choices else "")
    )
    console.print(
        f"disk: export {disk.export / GIB:.2f} GiB, critic {disk.critic / GIB:.2f} GiB, "
        f"weights and optimizer state {disk.checkpoint / GIB:.2f} GiB"
    )
    parts = {
        "tensor parallel": sent.tensor_parallel,
        "pipeline": sent.pipeline,
        "context": sent.context_parallel,
        "data parallel": sent.data_parallel,
        "weight sync": sent.weight_sync,
        "host": sent.host,
    }
    console.print("GiB sent per rank and step: " + ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items() if value))


def _time_table(plan: Plan) -> Table:
    table = Table(title="estimated seconds per step, from the device's assumed rates", title_justify="left")
    table.add_column("stage")
    names = list(plan.step.phases)
    for name in (*names, "total"):
        table.add_column(name, justify="right")
    table.add_row("rl", *(f"{plan.step.phases[name]:.1f}" for name in names), f"{plan.step.seconds:.1f}")
    if plan.run.pretraining_steps:
        phases = plan.step.pretraining_phases
        table.add_row(
            "value pretraining",
            *(f"{phases[name]:.1f}" if name in phases else "-" for name in names),
            f"{plan.step.pretraining_seconds:.1f}",
        )
    return table


def _print_run(console: Console, plan: Plan) -> None:
    run = plan.run
    evaluations = f", {run.evaluations} evaluations" if run.evaluations else ""
    if run.evaluations and plan.step.evaluation is None:
        evaluations += " (not included: file sizes are unknown; set eval.max_prompts)"
    console.print(
        f"the recipe: {run.pretraining_steps} steps of value pretraining, {run.steps} steps = {run.updates:,} policy updates{evaluations}: "
        f"{run.seconds / 3600:.1f} h, {run.gpu_hours:,.0f} {'GPU' if plan.cluster.device.is_gpu else 'process'}-hours"
    )


def print_horizons(console: Console, steps: Sequence[HorizonStep], sigma: float) -> None:
    """Print the steps with and without a horizon. Seconds of the step are also given per million sampled tokens, which differ."""
    table = Table(title=f"waiting for long responses (estimated; lognormal lengths, sigma {sigma:g})", title_justify="left")
    columns = (
        "horizon",
        "sampled tokens",
        "generate s",
        "idle",
        "empty slots",
        "prefill",
        "step s: completed",
        "segments",
        "s per M: completed",
        "segments",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for step in steps:
        rollout, millions = step.rollout, step.tokens / 1e6
        segments = ("-", "-") if step.segments is None else (f"{step.segments:,.0f}", f"{step.segments / millions:.2f}")
        table.add_row(
            "none" if rollout.horizon is None else f"{rollout.horizon:,}",
            f"{millions:.1f} M",
            f"{rollout.seconds:.1f}",
            *(f"{share:.1%}" for share in (rollout.idle, rollout.empty, rollout.prefill)),
            f"{step.completed:,.0f}",
            segments[0],
            f"{step.completed / millions:.2f}",
            segments[1],
        )
    console.print(table)


def print_verdict(console: Console, plan: Plan, changes: Sequence[Change]) -> None:
    if plan.fits:
        console.print("everything fits")
        return
    for sentence in plan.misfits:
        console.print(f"does not fit: {sentence}")
    if changes:
        console.print("any one of these changes makes it fit:")
        for change in changes:
            console.print(f"  {change.setting}   ({_summary(change)})")
    else:
        console.print("no single change makes it fit; use --search to find layouts")


def print_layouts(console: Console, layouts: Sequence[Change]) -> None:
    if not layouts:
        console.print("this recipe fits in no layout on this cluster")
        return
    console.print("layouts that fit, cheapest first:")
    for layout in layouts:
        console.print(f"  {layout.setting}   ({_summary(layout)})")


def _summary(change: Change) -> str:
    plan = change.plan
    nodes = plan.cluster.nodes
    return (
        f"{nodes} node{'s' * (nodes > 1)}, at most {plan.peak / GIB:.1f} of {plan.capacity / GIB:.1f} GiB, "
        f"{plan.step.seconds:,.0f} s per step, {plan.run.gpu_hours:,.0f} GPU-hours"
    )
