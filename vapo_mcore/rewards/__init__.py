"""Grading of responses: verifiers, and the pool of killable worker processes that runs them.

Importing this package imports neither torch nor the verifiers' dependencies (sympy, reasoning-gym); the workers import those.
"""

from vapo_mcore.rewards.pool import VerifierPool
from vapo_mcore.rewards.registry import BUILT_IN_NAMES, check_verifier_names, knows_answers, stated_answer
from vapo_mcore.rewards.types import GradeItem, PoolStats, StepReward, StepScores, UngradableError, Verdict

__all__ = [
    "BUILT_IN_NAMES",
    "GradeItem",
    "PoolStats",
    "StepReward",
    "StepScores",
    "UngradableError",
    "Verdict",
    "VerifierPool",
    "check_verifier_names",
    "knows_answers",
    "stated_answer",
]
