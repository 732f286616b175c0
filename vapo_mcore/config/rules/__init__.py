"""Rules over several settings, one named function each: it returns what is wrong, with values and a fix, or None.

``@rule`` lists the keys that a function reads; the fault is reported at the first. A rule is skipped when one of its keys
is itself faulty, so that one mistake is reported once.
"""

from vapo_mcore.config.rules import (  # noqa: F401  (each registers its rules)
    algorithm,
    batches,
    checkpoint,
    critic,
    diagnosis,
    layout,
    sampling,
)
from vapo_mcore.config.rules.base import RULES, Rule, Subject, broken_rules, rule
from vapo_mcore.config.rules.paths import missing_paths, read_model, references

__all__ = ["RULES", "Rule", "Subject", "broken_rules", "missing_paths", "read_model", "references", "rule"]
