"""Rules on the diagnosis and on dumped steps."""

from __future__ import annotations

from vapo_mcore.config.applicability import INAPPLICABLE
from vapo_mcore.config.rules.base import Subject, rule


@rule("diagnosis.halt_on", "diagnosis", "algorithm.advantage", "rollout.old_logprobs", "batch.responses_per_prompt")
def halting_rules_are_watched(s: Subject) -> str | None:
    diagnosis = s.config.diagnosis
    reasons = {f"diagnosis.{name}": f"diagnosis.{name} is null" for name in diagnosis.halt_on if getattr(diagnosis, name) is None}
    for entry in INAPPLICABLE:
        if entry.when(s.config):
            reasons |= dict.fromkeys(entry.keys, entry.reason)
    faults = [f"{name!r} can never hold: {reasons[key]}" for name in diagnosis.halt_on if (key := f"diagnosis.{name}") in reasons]
    return "; ".join(faults) + "; remove it" if faults else None


@rule("run.dump_steps", "run.steps")
def dumped_steps_are_made(s: Subject) -> str | None:
    steps = s.config.run.steps
    beyond = [str(step) for step in s.config.run.dump_steps if step > steps]
    if not beyond:
        return None
    return f"{', '.join(beyond)} can have no effect: the run ends after run.steps = {steps}; remove these steps, or raise run.steps"


@rule("run.dump_every_steps", "run.steps")
def some_step_is_dumped(s: Subject) -> str | None:
    every, steps = s.config.run.dump_every_steps, s.config.run.steps
    if every <= steps:
        return None
    return f"{every} can have no effect: no step up to run.steps = {steps} is a multiple of it; set a smaller number, or 0 for no dumps"
