"""Runs in one process with a fixed horizon and an environment: cuts inside turns and between them change nothing that a response is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.integration.horizon_checks import (
    assert_nothing_changes,
    assert_nothing_is_lost,
    assert_turns_are_whole,
    samples,
)
from tests.integration.test_horizon_in_process import run as run_with_settings
from tests.integration.test_horizon_in_process import run_until_step_2
from tests.process_groups import release_groups, share_gloo_device
from tests.training_setup import HORIZON, TURNS, exported_weights, repeatable_rows, training_config, write_setup
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.checkpoint_files import list_checkpoints
from vapo_mcore.commands.replay import replay
from vapo_mcore.commands.replay_checks import ReplayOptions
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer import step as step_module

SETTINGS = ("parallel.world_size=1", *HORIZON, TURNS, "run.dump_every_steps=1", "algorithm.advantage.lambda_policy.alpha=0.2")
SEGMENTS = "rollout.horizon={tokens: 7, in_flight: 20, train: segments}"
COMPLETED = "rollout.horizon={tokens: 7, in_flight: 20, max_staleness: 1}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    share_gloo_device()
    yield write_setup(tmp_path_factory.mktemp("turns"))
    if dist.is_initialized():
        dist.destroy_process_group()


def run(folder: Path, name: str, *overrides: str, **options: Any) -> Path:
    return run_with_settings(folder, name, *overrides, settings=SETTINGS, **options)


def learned(folder: Path, name: str, *overrides: str) -> Path:
    """A run; what its policy learns from in each step is kept."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        names = ("tokens", "response_mask", "old_logprobs", "rollout_logprobs", "values", "rewards", "advantages")
        found: dict[str, Any] = {name: experience.batch[name].clone() for name in names}
        rows = experience.batch.rows
        found |= {name: getattr(rows, name) for name in ("prompt_length", "response_length", "reward", "finish_reason", "segments")}
        found |= {"names": list(zip(rows.prompt_id, rows.sample_index.tolist(), strict=True)), "step_rewards": rows.step_rewards}
        found |= {"bootstrap": experience.bootstrap_values, "cu_seqlens": experience.cu_seqlens}
        torch.save(found, folder / f"{name}_{more[-1]}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        return run(folder, name, *overrides)


@pytest.fixture(scope="module")
def segments(folder: Path) -> Path:
    return learned(folder, "turns_segments", SEGMENTS)


@pytest.fixture(scope="module")
def completed(folder: Path) -> Path:
    return learned(folder, "turns_completed", COMPLETED)


def test_a_horizon_as_long_as_the_responses_changes_nothing(folder: Path) -> None:
    plain = run(folder, "turns_plain")
    assert max(len(entry.get("turns", ())) for part in samples(plain) for entry in part) == 3
    for mode in ("completed", "segments"):
        assert_nothing_changes(run(folder, f"turns_long_{mode}", f"rollout.horizon={{tokens: 24, train: {mode}}}"), plain)


def test_nothing_is_lost_at_a_cut(segments: Path, completed: Path) -> None:
    for found, mode in ((segments, "segments"), (completed, "completed")):
        assert_nothing_is_lost(found, mode)
        assert assert_turns_are_whole(found) > 5
        states = [json.loads((path / "state.json").read_text())["objects"]["open_responses"] for path in list_checkpoints(found)]
        assert {response["dialogue"]["in_turn"] for state in states for response in state["responses"]} == {True, False}


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{name}_{number}.pt", weights_only=True) for number in range(1, 5)]


def test_each_sampled_token_and_each_reward_trains_once(folder: Path, segments: Path) -> None:
    """And with the advantage of a plain loop over the step's sampled tokens, which ends with the critic's value where a cut follows."""
    trained: dict[tuple[str, int], list[int]] = {}
    earned: dict[tuple[str, int], float] = {}
    after_observations = 0
    for found in steps_of(folder, "turns_segments"):
        bounds = list(pairwise(found["cu_seqlens"].tolist()))
        expected, seen = [], []
        for row, (first, last) in enumerate(bounds):
            name, finish = found["names"][row], found["finish_reason"][row]
            places = found["response_mask"][first:last].nonzero()[:, 0].tolist()
            values, rewards = found["values"][first:last].tolist(), found["rewards"][first:last].tolist()
            assert len(places) == found["segments"][row][-1][0]
            trained.setdefault(name, []).extend(places)
            earned[name] = earned.get(name, 0.0) + sum(rewards)
            assert all(reward == 0 for place, reward in enumerate(rewards) if place not in places)
            lam = max(0.0, 1 - 1 / (0.2 * int(found["response_length"][row])))
            following, advantage = float(found["bootstrap"][row]) if finish == "cut" else 0.0, 0.0
            after_observations += finish == "cut" and places[-1] != last - first - 1
            for place in reversed(places):
                advantage = rewards[place] + following - values[place] + lam * advantage
                following = values[place]
                expected.append(advantage)
                seen.append(float(found["advantages"][first + place]))
            difference = (found["old_logprobs"] - found["rollout_logprobs"])[first:last]
            assert difference[places].abs().max() <= 1e-4  # the present policy sampled them
        mean = sum(expected) / len(expected)
        spread = math.sqrt(sum((x - mean) ** 2 for x in expected) / len(expected) + 1e-8)
        assert seen == pytest.approx([(x - mean) / spread for x in expected], abs=2e-4)
    assert after_observations > 0
    entries = [entry for part in samples(segments) for entry in part]
    for entry in entries:
        places = trained[entry["prompt_id"], entry["sample_index"]]
        assert len(places) == len(set(places)) == entry["response_length"] and places == sorted(places)
        total = entry["reward"] + sum(entry.get("turn_rewards", ()))
        assert earned[entry["prompt_id"], entry["sample_index"]] == pytest.approx(total, abs=1e-6)
    assert any(entry.get("turn_rewards") and any(entry["turn_rewards"]) for entry in entries)


def test_stale_tokens_are_those_of_early_turns(folder: Path, completed: Path) -> None:
    """Ages are those of sampled tokens: what the environment wrote between them has none."""
    stale = 0
    for found, row in zip(steps_of(folder, "turns_completed"), (r for r in repeatable_rows(completed) if r["stage"] == "rl"), strict=True):
        of_step = 0
        for number, (first, last) in enumerate(pairwise(found["cu_seqlens"].tolist())):
            ages = [age for tokens, age in found["segments"][number] for _ in range(tokens)]
            mask = found["response_mask"][first:last]
            assert int(mask.sum()) == sum(age <= 1 for age in ages)
            of_step += sum(age > 1 for age in ages)
            change = (found["old_logprobs"] - found["rollout_logprobs"])[first:last][mask].abs().tolist()
            young = [age for age in ages if age <= 1]
            assert all(difference <= 1e-4 for difference, age in zip(change, young, strict=True) if age == 0)
            assert not young.count(1) or max(difference for difference, age in zip(change, young, strict=True) if age == 1) > 1e-4
        assert row["horizon/stale_tokens"] == of_step
        assert row["mismatch/logprob_abs_max"] <= 1e-4  # of tokens that this step's policy sampled
        stale += of_step
    assert stale > 0


@pytest.mark.parametrize(("name", "horizon"), [("turns_segments", SEGMENTS), ("turns_completed", COMPLETED)])
def test_a_stopped_run_goes_on_inside_its_turns(
    folder: Path,
    segments: Path,
    completed: Path,
    name: str,
    horizon: str,
) -> None:
    run_until_step_2(folder, f"{name}_stopped", horizon, settings=SETTINGS)
    found = run(folder, f"{name}_stopped", horizon, resume=ResumeOptions())
    assert repeatable_rows(found) == repeatable_rows(folder / name)
    assert exported_weights(found) == exported_weights(folder / name)
    assert samples(found) == samples(folder / name)


def test_a_dumped_step_is_replayed_exactly(folder: Path, segments: Path) -> None:
    config = training_config(folder, segments.name, *SETTINGS, SEGMENTS)
    parallel = initialize_parallel(config.parallel)
    try:
        found = replay(config, parallel, ReplayOptions(3))
    finally:
        release_groups()
    compared = {entry.name: entry for entry in found if entry.comparable}
    assert {"horizon/bootstrapped_frac", "horizon/cut_value_bias", "policy/loss", "critic/loss", "turns/mean"} <= compared.keys()
    assert all(entry.difference == 0 for entry in compared.values())
