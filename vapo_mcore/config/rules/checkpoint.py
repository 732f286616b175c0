"""Rules on checkpoints and exports."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule


@rule("checkpoint.best_metric", "checkpoint.keep_best", "data.eval", "eval.samples_per_prompt")
def best_is_told_by_a_metric(s: Subject) -> str | None:
    settings = s.config.checkpoint
    if settings.keep_best == 0:
        return None
    scores = _scores(s, ("avg",))
    known = ", ".join(["reward/mean", *scores])
    if settings.best_metric is None:
        return f"is required with checkpoint.keep_best = {settings.keep_best}: the metric whose highest values are kept, such as {known}"
    if settings.best_metric.startswith("eval/") and settings.best_metric not in scores:
        return f"{settings.best_metric!r} is never measured; measured are {known}"
    return None


@rule("export.best.metric", "data.eval", "eval.samples_per_prompt")
def best_export_is_told_by_an_evaluation(s: Subject) -> str | None:
    best, k = s.config.export.best, s.config.eval.samples_per_prompt
    if best is None or not s.config.data.eval:
        return None
    measured = _scores(s, ("avg", "pass", "maj") if k > 1 else ("avg",))
    others = [f"eval/{source.name}/{name}" for source in s.config.data.eval for name in _OTHER_NUMBERS]
    if best.metric in measured or best.metric in others:
        return None
    return f"{best.metric!r} is no score of the evaluations; they write {', '.join(measured)} (and {', '.join(_OTHER_NUMBERS)} of each set)"


@rule("export.best", "eval.every_steps", "eval.at_end", "data.eval")
def best_export_has_evaluations(s: Subject) -> str | None:
    if s.config.export.best is None or not s.config.data.eval or s.config.eval.every_steps > 0 or s.config.eval.at_end:
        return None
    return "is never exported: eval.every_steps = 0 and eval.at_end = false, so that nothing is evaluated after a step"


_OTHER_NUMBERS = ("ci_low", "ci_high", "length_mean", "length_max", "truncated_frac")


def _scores(s: Subject, kinds: tuple[str, ...]) -> list[str]:
    """Metrics of the evaluations: scores of ``eval.samples_per_prompt`` responses to each prompt of each set."""
    return [f"eval/{source.name}/{kind}@{s.config.eval.samples_per_prompt}" for source in s.config.data.eval for kind in kinds]
