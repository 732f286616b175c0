"""Rules on the diagnosis."""

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
    return "; ".join(faults) + "; leave it out" if faults else None
