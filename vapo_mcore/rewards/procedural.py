"""The ``reasoning_gym`` verifier: grade each procedural task with its own scorer."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from vapo_mcore.environments.types import RESERVED
from vapo_mcore.rewards.extraction import has_marker, last_number, marked_answer_or_last_line
from vapo_mcore.rewards.types import UngradableError

Scorer = Callable[[str, dict[str, Any]], float]

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def reasoning_gym(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return the score of the task's ``score_answer``, in [0, 1].

    ``metadata`` is the ``metadata`` of the reasoning-gym entry (``source_dataset`` names the task), or contains it as
    ``entry_metadata``. Optional keys: ``task``, which overrides the name; ``options`` of the data set; ``question`` of the entry.

    The answer is the marked one; if nothing is marked, the last non-empty line, or, if the ground truth is a number, the last number of
    that line ("The sum is 17." answers 17).
    """
    metadata = _without_seed(metadata)
    task = task_name(metadata)
    scorer = _scorer(task, metadata.get("options") or {})
    entry = {
        "question": metadata.get("question", ""),
        "answer": ground_truth,
        "metadata": metadata.get("entry_metadata", metadata),
    }
    return float(scorer(procedural_answer(response, ground_truth), entry))


def procedural_answer(response: str, ground_truth: str) -> str:
    """Extract the answer as :func:`reasoning_gym` does."""
    is_marked, answer = unread_answer(response)
    if not is_marked and _NUMBER.fullmatch(ground_truth.strip()):
        return (last_number(answer) or answer).replace(",", "").removeprefix("+")
    return answer


def stated_answer(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the extracted answer, None if it is empty."""
    return procedural_answer(response, ground_truth) or None


def unread_answer(response: str) -> tuple[bool, str]:
    """Return whether the answer is marked, and the text that contains it; the score depends on nothing else."""
    return has_marker(response), marked_answer_or_last_line(response)


def task_name(metadata: Mapping[str, Any]) -> str:
    """Return the reasoning-gym task named by the metadata.

    Raises:
        UngradableError: the metadata name no task.
    """
    inner = metadata.get("entry_metadata", metadata)
    task = metadata.get("task") or inner.get("source_dataset")
    if not isinstance(task, str):
        raise UngradableError("the metadata name no reasoning-gym task: neither 'task' nor the entry's 'source_dataset' is present")
    return task


def entry_key(metadata: Mapping[str, Any]) -> Hashable:
    """Return a digest of the metadata without the response's seed; a scorer may read any part of its entry."""
    return hashlib.blake2b(pickle.dumps(_without_seed(metadata)), digest_size=16).digest()


def _without_seed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry's metadata; scorers depend only on answer and entry, and verdicts are shared between responses."""
    return {name: value for name, value in metadata.items() if name not in RESERVED}


_scorers: dict[tuple[str, str], Scorer] = {}
_MAX_SCORERS = 256


def _scorer(task: str, options: Mapping[str, Any]) -> Scorer:
    """Return the task's scorer, cached because some data sets take long to build."""
    key = task, repr(sorted(options.items()))
    if key not in _scorers:
        import reasoning_gym as gym

        try:
            scorer = gym.create_dataset(task, **options).score_answer
        except (ValueError, TypeError, AssertionError) as error:
            raise UngradableError(f"reasoning-gym task {task!r} with options {dict(options)}: {error}") from None
        if len(_scorers) >= _MAX_SCORERS:
            _scorers.clear()
        _scorers[key] = scorer
    return _scorers[key]


def warm_up() -> None:
    """Import reasoning-gym, which takes about a second."""
    import reasoning_gym as gym

    gym.create_dataset("chain_sum")
