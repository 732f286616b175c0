"""Registry of verifiers: built-in ones by name, user-defined ones by reference (``vapo_mcore.extensions``).

A verifier is a module-level pure function ``(response: str, ground_truth: str, metadata: Mapping) -> float`` that returns a score in
[0, 1], or ``StepScores`` if the steps of the response have rewards too. It runs in a worker process that may be killed at any moment, so
it must not keep state.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from vapo_mcore.config.environments import environment_reference
from vapo_mcore.config.verifiers import BUILT_IN_VERIFIERS, is_endpoint, verifier_name_fault
from vapo_mcore.environments.types import RIGHT_ANSWERS
from vapo_mcore.errors import RewardError
from vapo_mcore.extensions.loading import load_function
from vapo_mcore.rewards.endpoint import check_reachable, score
from vapo_mcore.rewards.region import answer_region
from vapo_mcore.rewards.types import GradeItem, StepScores

Score = Callable[[str, str, Mapping[str, Any]], float | StepScores]

_HOME = "vapo_mcore.rewards."


@dataclass(frozen=True)
class Verifier:
    """An imported verifier. ``warm_up`` runs once after the import, outside the time limit of any response."""

    name: str
    score: Score
    warm_up: Callable[[], object] | None = None


@dataclass(frozen=True)
class Environment:
    """An imported environment (see ``vapo_mcore.environments``)."""

    name: str
    answer: Callable[[Sequence[str], str, Mapping[str, Any]], Any]


@dataclass(frozen=True)
class _BuiltIn:
    """Import paths of a built-in verifier, and of the functions that extract what its score depends on.

    ``answer`` and ``metadata_key`` run in the trainer to recognise answers that were graded before, so they must be cheap and must not
    import the verifier's dependencies. The same holds for ``stated``, a function of response, ground truth and metadata that returns the
    normalised answer for majority votes, or None. All of them receive the region of the response where its answer counts; if
    ``whole`` is True, the verifier receives the whole response.
    """

    path: str
    answer: str
    metadata_key: str | None = None
    warm_up: str | None = None
    stated: str | None = None
    whole: bool = False


_BUILT_IN = {
    "math": _BuiltIn("mathematics:math", "extraction:marked_answer", warm_up="mathematics:warm_up", stated="mathematics:stated_answer"),
    "math_last_number": _BuiltIn(
        "mathematics:math_last_number",
        "extraction:marked_answer_or_last_number",
        warm_up="mathematics:warm_up",
        stated="mathematics:stated_answer_or_last_number",
    ),
    "math_answer_line": _BuiltIn(
        "mathematics:math_answer_line", "extraction:answer_line", warm_up="mathematics:warm_up", stated="mathematics:stated_answer_line"
    ),
    "math_steps": _BuiltIn(
        "steps:math_steps", "extraction:whole_response", warm_up="mathematics:warm_up", stated="mathematics:stated_answer", whole=True
    ),
    "exact": _BuiltIn("text:exact", "extraction:marked_answer_or_all", stated="text:stated_text"),
    "regex": _BuiltIn("text:regex", "extraction:marked_answer_or_all", stated="text:stated_text"),
    "multiple_choice": _BuiltIn("text:multiple_choice", "extraction:choice_text", "text:choices_key", stated="text:stated_choice"),
    "reasoning_gym": _BuiltIn(
        "procedural:reasoning_gym",
        "procedural:unread_answer",
        "procedural:entry_key",
        "procedural:warm_up",
        "procedural:stated_answer",
    ),
    "code": _BuiltIn("programs:code", "programs:program_of", warm_up="programs:warm_up"),
}

BUILT_IN_NAMES = tuple(_BUILT_IN)
assert BUILT_IN_NAMES == BUILT_IN_VERIFIERS, "a new verifier needs its name in vapo_mcore/config/verifiers.py"


def check_verifier_names(names: Iterable[str]) -> None:
    """Check the names only; the workers, not the trainer, import user-defined verifiers.

    Raises:
        RewardError: lists every name that is neither built-in nor an import path.
    """
    faults = [fault for name in names if (fault := verifier_name_fault(name)) is not None]
    if faults:
        raise RewardError("\n".join(faults))


@cache
def load_verifier(name: str) -> Verifier:
    """Import a verifier and warm it up. Called in the workers.

    Raises:
        ConfigError: a user-defined verifier cannot be imported.
        RewardError: the verifier does not exist or does not accept a verifier's arguments.
    """
    check_verifier_names([name])
    built_in = _BUILT_IN.get(name)
    if is_endpoint(name):
        check_reachable(name)
        return Verifier(name, partial(score, name))
    if built_in is None:
        return Verifier(name, _checked(name, load_function(name)))
    warm_up = None if built_in.warm_up is None else _part(built_in.warm_up)
    if warm_up is not None:
        warm_up()
    found: Score = _part(built_in.path)
    return Verifier(name, partial(_any_of, found if built_in.whole else partial(_in_region, found)), warm_up)


def _any_of(function: Score, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float | StepScores:
    """Return the best score over the row's right answers."""
    several = metadata.get(RIGHT_ANSWERS)
    if several is None:
        return function(response, ground_truth, metadata)
    # All of them: whether one cannot be read must not depend on the response.
    found = [function(response, truth, metadata) for truth in several]
    return max(found, key=lambda score: score.score if isinstance(score, StepScores) else score)


def _in_region(function: Score, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float | StepScores:
    return function(answer_region(response, metadata), ground_truth, metadata)


def _checked(name: str, function: Score) -> Score:
    """Return a user-defined verifier after checking that it accepts a verifier's three arguments."""
    try:
        inspect.signature(function).bind("", "", {})
    except (TypeError, ValueError) as error:
        raise RewardError(f"verifier {name!r} cannot be called with (response, ground_truth, metadata): {error}") from error
    return function


@cache
def load_environment(name: str) -> Environment:
    """Import an environment. Called in the workers.

    Raises:
        ConfigError: it cannot be imported.
        RewardError: it does not accept an environment's arguments, or is an object, which may keep state.
    """
    function = load_function(environment_reference(name))
    plain = function.func if isinstance(function, partial) else function
    if inspect.ismethod(plain) or not inspect.isroutine(plain):
        kind = type(plain.__self__ if inspect.ismethod(plain) else plain).__name__
        raise RewardError(
            f"environment {name!r} belongs to an object of class {kind}, which may keep state: each turn may be answered by another "
            "process and, with rollout.horizon, in a later step or after a resume; name a function that derives its reply from the turns"
        )
    try:
        inspect.signature(function).bind(("",), "", {})
    except (TypeError, ValueError) as error:
        raise RewardError(f"environment {name!r} cannot be called with (turns, ground_truth, metadata): {error}") from error
    return Environment(name, function)


@cache
def _part(path: str) -> Callable[..., Any]:
    """Import a function of this package."""
    return load_function(_HOME + path)


def answer_key(item: GradeItem) -> Hashable:
    """Return a key that is equal only for equal verdicts: verifier, extracted answer, ground truth and relevant metadata.

    For user-defined verifiers the key is unique to the item, so their verdicts are never reused.
    """
    built_in = _BUILT_IN.get(item.verifier)
    if built_in is None:
        return id(item), object()
    response = item.response if built_in.whole else answer_region(item.response, item.metadata)
    answer = _part(built_in.answer)(response)
    if isinstance(answer, str) and len(answer) > 200:  # a whole response: use its digest instead of the text
        answer = hashlib.blake2b(answer.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    extra = None
    if built_in.metadata_key is not None:
        extra = _part(built_in.metadata_key)(item.metadata)
    return item.verifier, answer, item.ground_truth, tuple(item.metadata.get(RIGHT_ANSWERS, ())), extra


def knows_answers(verifier: str) -> bool:
    """Return whether :func:`stated_answer` is defined for responses that this verifier grades."""
    built_in = _BUILT_IN.get(verifier)
    return built_in is not None and built_in.stated is not None


def stated_answer(item: GradeItem) -> str | None:
    """Return the normalised answer of a response, by which votes are counted; None if it gives no answer.

    Equal texts are equal answers; unequal texts may still be equal in value (two forms of an expression). Cheap, linear in the length
    of the response. Requires a verifier for which :func:`knows_answers` is True.
    """
    path = _BUILT_IN[item.verifier].stated
    assert path is not None, f"{item.verifier} defines no stated answer"
    answer: str | None = _part(path)(answer_region(item.response, item.metadata), item.ground_truth, item.metadata)
    return answer
