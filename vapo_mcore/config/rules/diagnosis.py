"""Rules on the diagnosis."""

from __future__ import annotations

from vapo_mcore.config.rules.base import Subject, rule


@rule("diagnosis.halt_on", "diagnosis")
def halting_rules_are_watched(s: Subject) -> str | None:
    diagnosis = s.config.diagnosis
    off = [name for name in diagnosis.halt_on if getattr(diagnosis, name) is None]
    if not off:
        return None
    return f"{', '.join(map(repr, off))} can never hold: diagnosis.{off[0]} is null; give it thresholds, or leave it out here"
