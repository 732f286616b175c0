"""Check rules that involve several settings. Each rule is a function that returns an error message with values and a fix, or None.

``@rule`` lists the keys that a function reads; its message is reported at the first key. A rule is skipped if one of its keys is faulty,
so that one mistake is reported once.
"""

from vapo_mcore.config.rules import (  # noqa: F401  (importing a module registers its rules)
    algorithm,
    batches,
    checkpoint,
    critic,
    diagnosis,
    horizon,
    layout,
    mixtures,
    sampling,
)
from vapo_mcore.config.rules.base import RULES, Rule, Subject, broken_rules, rule
from vapo_mcore.config.rules.paths import missing_paths, read_model, references

__all__ = ["RULES", "Rule", "Subject", "broken_rules", "missing_paths", "read_model", "references", "rule"]
