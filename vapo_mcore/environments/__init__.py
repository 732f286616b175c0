"""What answers a model between its turns: tools and games, as pure functions in killable worker processes.

An environment is a module-level function ``(turns, ground_truth, metadata) -> Observation | None``. ``turns`` are the texts of all turns
that the model has taken so far, the newest last; ``None`` ends the response. It keeps no state: what it knows follows from the turns,
so it may run in any process, be killed and be asked again.

Importing this package imports neither torch nor any environment.
"""

from vapo_mcore.environments.types import ANSWER_START, RIGHT_ANSWERS, SAMPLE_SEED, Observation, Reply, TurnRequest

__all__ = ["ANSWER_START", "RIGHT_ANSWERS", "SAMPLE_SEED", "Observation", "Reply", "TurnRequest"]
