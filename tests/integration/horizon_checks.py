"""What runs with ``rollout.horizon`` must leave, on any engine and layout; the runs are made by ``horizon_runs`` of train_worker.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.environments import letters
from tests.integration.grading import divisible_by_three
from tests.training_setup import exported_weights, read_metrics, read_samples

STEPS = 4
OWN = ("time/", "memory/", "horizon/", "mismatch/off_policy_", "tokens/per_second", "tokens/reprefilled")


def horizon_rows(run: Path) -> list[dict[str, Any]]:
    """The rows without times, and without what only a run with a horizon records."""
    kept = [{name: value for name, value in row.items() if not name.startswith(OWN)} for row in read_metrics(run)]
    return [{name: value for name, value in row.items() if not name.endswith("_by_cut")} for row in kept]


def samples(run: Path) -> list[list[dict[str, Any]]]:
    files = [run / "samples" / f"step_{step:04d}.jsonl" for step in range(1, STEPS + 1)]
    return [read_samples(run, file.stem) if file.exists() else [] for file in files]


def assert_nothing_changes(found: Path, plain: Path) -> None:
    """A horizon as long as the responses: every metric, weight and sample is that of the run without one."""
    assert len(horizon_rows(plain)) == STEPS
    assert horizon_rows(found) == horizon_rows(plain)
    assert exported_weights(found) == exported_weights(plain) != {}
    assert samples(found) == samples(plain) and all(samples(plain))
    assert all(row["horizon/cut"] == 0 for row in read_metrics(found))


def assert_nothing_is_lost(run: Path, mode: str) -> None:
    """A short horizon: every response to every prompt drawn has trained once or is open in the last checkpoint."""
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["horizon/cut"] > 0 for row in rows) and all(row["tokens/reprefilled"] > 0 for row in rows[1:])
    assert all(row["mismatch/logprob_abs_max"] <= 1e-3 for row in rows)  # of the tokens that the present policy sampled
    assert [row["horizon/finished"] for row in rows] == [len(entries) for entries in samples(run)]
    state = json.loads((run / "checkpoints" / f"step_{STEPS:06d}" / "state.json").read_text())["objects"]["open_responses"]
    open_ones = [(response["prompt"], response["sample_index"]) for response in state["responses"]]
    ended = [(entry["prompt_id"], entry["sample_index"]) for entries in samples(run) for entry in entries]
    names = open_ones + ended
    assert len(names) == len(set(names)) == 4 * state["drawn"]
    assert len({name for name, _ in names}) == state["drawn"] == sum(row["sampling/prompts_tried"] for row in rows)
    assert len(open_ones) == rows[-1]["horizon/cut"]
    if mode == "segments":
        assert sum(row["horizon/cuts_ended"] for row in rows) > 0
        cuts = [len(response["cut_values"]) for response in state["responses"]]
        assert cuts == [len(response["segments"]) for response in state["responses"]]


def assert_turns_are_whole(run: Path) -> int:
    """The whole text of each response has the score that was recorded, and each turn the reward and the observation of its reply.

    Returns the number of responses with several segments and several turns.
    """
    entries = [entry for part in samples(run) for entry in part]
    for entry in entries:
        turns = entry.get("turns", [entry["response"]])
        rewards, observations = entry.get("turn_rewards", [0.0]), entry.get("observations", [])
        assert entry["score"] == divisible_by_three(entry["response"], "", {}) and "\n".join(turns) == entry["response"]
        replies = [letters(turns[: number + 1], "", {}) for number in range(len(turns))]
        expected = [reply.reward for reply in replies if reply is not None]
        # A turn that the limit truncates has no reply; one that ends at the limit has.
        assert rewards == expected or (entry["finish_reason"] == "length" and rewards == [*expected[:-1], 0.0])
        said = [f"|{reply.text}|" for reply in replies[: len(turns) - 1] if reply is not None]
        assert observations == said and all(reply is not None and reply.text is not None for reply in replies[:-1])
        assert sum(tokens for tokens, _ in entry.get("segments", [[entry["response_length"], 0]])) == entry["response_length"]
    return sum(len(entry.get("turns", ())) > 1 and len(entry.get("segments", ())) > 1 for entry in entries)


def assert_resumed(stopped: Path, whole: Path) -> None:
    """A run that stopped with open responses and was resumed has left what the one that nobody stopped has left."""
    assert horizon_rows(stopped) == horizon_rows(whole)
    own = [
        [{name: value for name, value in row.items() if name.startswith("horizon/")} for row in read_metrics(run)]
        for run in (stopped, whole)
    ]
    assert own[0] == own[1]
    assert exported_weights(stopped) == exported_weights(whole) != {}
    assert samples(stopped) == samples(whole)
