"""Rules on checkpoints and exports."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule


@rule("checkpoint.best_metric", "checkpoint.keep_best", "data.eval", "eval.samples_per_prompt")
def best_checkpoint_has_a_metric(s: Subject) -> str | None:
    settings = s.config.checkpoint
    if settings.keep_best == 0:
        return None
    scores = _scores(s, ("avg",))
    known = ", ".join(["reward/mean", *scores])
    if settings.best_metric is None:
        return f"is required with checkpoint.keep_best = {settings.keep_best}: the metric to maximise, such as {known}"
    if settings.best_metric.startswith("eval/") and settings.best_metric not in scores:
        return f"{settings.best_metric!r} is never measured; choose one of {known}"
    return None


@rule("export.best.metric", "data.eval", "eval.samples_per_prompt")
def best_export_has_an_evaluation_metric(s: Subject) -> str | None:
    best, k = s.config.export.best, s.config.eval.samples_per_prompt
    if best is None or not s.config.data.eval:
        return None
    measured = _scores(s, ("avg", "pass", "maj") if k > 1 else ("avg",))
    others = [f"eval/{source.name}/{name}" for source in s.config.data.eval for name in _OTHER_NUMBERS]
    if best.metric in measured or best.metric in others:
        return None
    others_of_each = f"or {', '.join(_OTHER_NUMBERS)} of a set"
    return f"{best.metric!r} is not a metric of the evaluations; choose {', '.join(measured)} ({others_of_each})"


@rule("export.best", "eval.every_steps", "eval.at_end", "data.eval")
def best_export_has_evaluations(s: Subject) -> str | None:
    if s.config.export.best is None or not s.config.data.eval or s.config.eval.every_steps > 0 or s.config.eval.at_end:
        return None
    return "is never exported: eval.every_steps = 0 and eval.at_end = false, so no evaluation follows a step; set one of them"


_OTHER_NUMBERS = ("ci_low", "ci_high", "length_mean", "length_max", "truncated_frac")


def _scores(s: Subject, kinds: tuple[str, ...]) -> list[str]:
    """List the score metrics of all evaluation sets with ``eval.samples_per_prompt`` responses per prompt."""
    return [f"eval/{source.name}/{kind}@{s.config.eval.samples_per_prompt}" for source in s.config.data.eval for kind in kinds]
