"""Rules on checkpoints."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule


@rule("checkpoint.best_metric", "checkpoint.keep_best", "data.eval", "eval.samples_per_prompt")
def best_is_told_by_a_metric(s: Subject) -> str | None:
    settings = s.config.checkpoint
    if settings.keep_best == 0:
        return None
    scores = [f"eval/{source.name}/avg@{s.config.eval.samples_per_prompt}" for source in s.config.data.eval]
    known = ", ".join(["reward/mean", *scores])
    if settings.best_metric is None:
        return f"is required with checkpoint.keep_best = {settings.keep_best}: the metric whose highest values are kept, such as {known}"
    if settings.best_metric.startswith("eval/") and settings.best_metric not in scores:
        return f"{settings.best_metric!r} is never measured; measured are {known}"
    return None
