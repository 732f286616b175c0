"""Environments (tools and games) that reply to a model between its turns, as pure functions in killable worker processes.

An environment is a module-level function ``(turns, ground_truth, metadata) -> Observation | None``. ``turns`` are the texts of all of the
model's turns so far, oldest first; returning ``None`` ends the response. An environment is stateless: its reply depends only on its
arguments, so it may run in any process, be killed and be called again.

Importing this package imports neither torch nor any environment.
"""

from vapo_mcore.environments.types import ANSWER_START, RIGHT_ANSWERS, SAMPLE_SEED, Observation, Reply, TurnRequest

__all__ = ["ANSWER_START", "RIGHT_ANSWERS", "SAMPLE_SEED", "Observation", "Reply", "TurnRequest"]
