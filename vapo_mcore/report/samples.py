"""Choose the responses shown on the page and shorten them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vapo_mcore.report.read import RunData, Sample

OF_EACH_KIND = 5
"""Number of responses of each kind; changed verdicts: this many of each direction."""
MOST_TOKENS = 2400
"""Maximum tokens shown per response, divided by the number of runs; for responses without tokens, four characters count as one token."""
FEWEST_TOKENS = 400
_CHARACTERS_OF_A_TOKEN = 4
_COPIED = (
    "step", "stage", "sample_index", "correct", "score", "reward", "finish_reason",
    "response_length", "segments",
)  # fmt: skip
_SHORTENED = ("answer", "error", "ground_truth", "prompt_id", "source")
"""Usually short texts that can be long: the tests of a program, the message of a verifier's exception."""
_MOST_CHARACTERS = 1000


def chosen_samples(run: RunData, runs: int) -> dict[str, Any]:
    """Choose a run's samples for the page.

    Returns: ``records``; ``kinds`` (kind -> indices of records, pairs of indices for ``changed``); ``to_right`` and ``to_wrong``, the
        numbers of changed verdicts; ``evaluated``, the steps of the compared evaluations.

    best, worst: by reward, newer first among equals; only responses with a verdict. longest: by length. latest: from the last steps.
    changed: same problem and sample number in the first and the last evaluation with different verdicts, right to wrong first.
    """
    records: list[Sample] = []
    numbers: dict[int, int] = {}

    def number(sample: Sample) -> int:
        if id(sample) not in numbers:
            numbers[id(sample)] = len(records)
            records.append(shown(sample, max(FEWEST_TOKENS, MOST_TOKENS // runs)))
        return numbers[id(sample)]

    newest = run.samples[::-1]
    graded = [sample for sample in newest if sample.get("error") is None and sample.get("reward") is not None]
    kinds: dict[str, Any] = {
        "best": sorted(graded, key=lambda sample: -sample["reward"]),
        "worst": sorted(graded, key=lambda sample: sample["reward"]),
        "longest": sorted(newest, key=lambda sample: -sample.get("response_length", 0)),
        "latest": newest,
    }
    kinds = {name: [number(sample) for sample in found[:OF_EACH_KIND]] for name, found in kinds.items()}
    pairs = sorted(changed_verdicts(run), key=lambda pair: "response" not in pair[0])  # pairs with text first
    few = [pair for right in (True, False) for pair in [p for p in pairs if p[0]["correct"] is right][:OF_EACH_KIND]]
    kinds["changed"] = [[number(sample) for sample in pair] for pair in few]
    to_right = sum(not before["correct"] for before, _ in pairs)
    return {"records": records, "kinds": kinds, "to_right": to_right, "to_wrong": len(pairs) - to_right, "evaluated": list(run.evaluated)}


def changed_verdicts(run: RunData) -> list[tuple[Sample, Sample]]:
    """Pair responses of the first and the last evaluation with the same problem and sample number but different verdicts."""
    if len(run.evaluated) < 2:
        return []
    (first, before), (last, after) = run.evaluated.items()
    later = {_item(sample): sample for sample in after if sample.get("error") is None}
    pairs = ((sample, later.get(_item(sample))) for sample in before if sample.get("error") is None)
    return [
        (one | {"step": first, "stage": "evaluation"}, other | {"step": last, "stage": "evaluation"})
        for one, other in pairs
        if other is not None and bool(one["correct"]) != bool(other["correct"])
    ]


def _item(sample: Sample) -> tuple[Any, Any, Any]:
    return sample.get("source"), sample.get("prompt_id"), sample.get("sample_index")


def shown(sample: Sample, most: int) -> Sample:
    """Return the fields of a sample that the page shows.

    Of a long response only the beginning and the end remain; ``left_out`` = [position, number of tokens or characters omitted].
    """
    record: Sample = {name: sample[name] for name in _COPIED if name in sample}
    for name in _SHORTENED:
        if name in sample:
            record[name] = None if sample[name] is None else _shortened(sample[name], _MOST_CHARACTERS)
    if "response" not in sample:
        return record | {"prompt": None, "response": None, "left_out": None}
    record["prompt"] = _shortened(str(sample.get("prompt", "")), most * _CHARACTERS_OF_A_TOKEN)
    tokens = sample.get("tokens")
    if not tokens:
        response = str(sample["response"])
        kept, record["left_out"] = _ends(response, most * _CHARACTERS_OF_A_TOKEN)
        record["response"] = "".join(kept)
        return record
    record["tokens"] = {}
    for name, column in tokens.items():
        kept, record["left_out"] = _ends(column, most)
        record["tokens"][name] = "".join(kept) if isinstance(column, str) else list(kept)
    return record


def _ends(items: Sequence[Any], most: int) -> tuple[list[Any], list[int] | None]:
    if len(items) <= most:
        return list(items), None
    first = most * 3 // 5
    return [*items[:first], *items[len(items) - (most - first) :]], [first, len(items) - most]


def _shortened(text: str, most: int) -> str:
    kept, left_out = _ends(text, most)
    if left_out is None:
        return text
    return f"{''.join(kept[: left_out[0]])} [... {left_out[1]} characters ...] {''.join(kept[left_out[0] :])}"


def has_tokens(samples: Iterable[Sample]) -> bool:
    return any("tokens" in sample for sample in samples)
