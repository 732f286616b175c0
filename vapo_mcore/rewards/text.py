"""Verifiers that compare text: ``exact``, ``regex`` and ``multiple_choice``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

from vapo_mcore.rewards.extraction import choice_text, marked_answer_or_all
from vapo_mcore.rewards.types import UngradableError


def exact(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the answer equals the ground truth character by character, ignoring surrounding whitespace; else 0.

    The answer is the marked one, or the whole response if nothing is marked.
    """
    return float(marked_answer_or_all(response) == ground_truth.strip())


def regex(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the ground truth, a Python regular expression, matches the whole answer (extracted as by ``exact``); else 0."""
    return float(_pattern(ground_truth).fullmatch(marked_answer_or_all(response)) is not None)


def stated_text(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the answer extracted as by ``exact``, None if it is empty."""
    return marked_answer_or_all(response) or None


@lru_cache(maxsize=1024)
def _pattern(ground_truth: str) -> re.Pattern[str]:
    try:
        return re.compile(ground_truth)
    except re.error as error:
        raise UngradableError(f"ground truth {ground_truth!r} is not a regular expression: {error}") from None


_LETTER = re.compile(r"[(\[]?\s*([A-Z])\s*[)\].:]?", re.IGNORECASE)
_LETTER_AND_TEXT = re.compile(r"[(\[]?\s*([A-Z])\s*[)\].:]\s*(\S.*)", re.IGNORECASE | re.DOTALL)
_LATEX_SPACES = re.compile(r"\\[ ,;:!]|\\q?quad\b|~")
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}")


def multiple_choice(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the response chose the right letter, else 0.

    The ground truth is a letter (``B``, ``(B)``) or, with ``metadata["choices"]`` (a list of texts, or a mapping from
    letters to texts), the letter or the text of the right choice. The response may give the letter (``B``, ``(b)``,
    ``\\text{B}``, ``B. its text``) or, with choices, only the text of the choice.
    """
    choices = _choices(metadata)
    right = _chosen(ground_truth, choices)
    if right is None:
        raise UngradableError(f"ground truth {ground_truth!r} is neither a letter nor one of the choices {list(choices.values())}")
    answer = choice_text(response)
    return float(answer is not None and _chosen(answer, choices) == right)


def stated_choice(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the letter that the response chose, or None."""
    answer = choice_text(response)
    return None if answer is None else _chosen(answer, _choices(metadata))


def choices_key(metadata: Mapping[str, Any]) -> Hashable:
    """Return the part of the metadata that ``multiple_choice`` reads."""
    return tuple(_choices(metadata).items())


def _choices(metadata: Mapping[str, Any]) -> dict[str, str]:
    choices = metadata.get("choices")
    if choices is None:
        return {}
    if isinstance(choices, Mapping):
        if "label" in choices and "text" in choices:  # the two parallel columns of ARC and its like
            return {str(k).upper(): _plain(str(v)) for k, v in zip(choices["label"], choices["text"], strict=True)}
        return {str(letter).upper(): _plain(str(text)) for letter, text in choices.items()}
    return {chr(ord("A") + index): _plain(str(text)) for index, text in enumerate(choices)}


def _plain(text: str) -> str:
    """Remove LaTeX text wrappers, dollar signs, emphasis and a final full stop; normalise whitespace and fold case."""
    text = _WRAPPERS.sub(r"\1", text)
    text = _LATEX_SPACES.sub(" ", text)
    text = text.replace("**", "").replace("$", "").strip().removesuffix(".")
    return " ".join(text.split()).casefold()


def _chosen(text: str, choices: dict[str, str]) -> str | None:
    """Return the letter that ``text`` selects, or None."""
    folded = _plain(text)
    letter = _LETTER.fullmatch(folded)
    if letter is not None and (not choices or letter.group(1).upper() in choices):
        return letter.group(1).upper()
    by_text = [name for name, choice in choices.items() if choice == folded]
    if len(by_text) == 1:
        return by_text[0]
    both = _LETTER_AND_TEXT.fullmatch(folded)
    if both is None:
        return None
    name = both.group(1).upper()
    # "B. its text" selects B unless the text belongs to another choice.
    return name if not choices or choices.get(name) == both.group(2).strip() else None
