"""Runs in one process with a fixed horizon: as long as all responses, it changes nothing; shorter, a stopped run continues bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.process_groups import release_groups, share_gloo_device
from tests.training_setup import exported_weights, read_samples, repeatable_rows, training_config, write_setup
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.checkpoint_files import list_checkpoints
from vapo_mcore.commands.replay import replay
from vapo_mcore.commands.replay_checks import ReplayOptions
from vapo_mcore.errors import EXIT_REQUEUE, CheckpointError, ConfigError, RunStopped, StepAbandoned
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer import step as step_module
from vapo_mcore.trainer.main import train
from vapo_mcore.trainer.step import StepOutcome, StepRunner

LONGEST = 24
SETTINGS = (
    "parallel.world_size=1",
    "run.steps=4",
    f"rollout.max_response_length={LONGEST}",
    "critic.value_pretraining={steps: 1, lr: 0.01}",
    "policy.optimizer.warmup_rollouts=4",
    "checkpoint={every_minutes: 0, every_steps: 1, keep_last: 9}",
    "algorithm.policy_loss.importance_correction={kind: token_truncate}",
    "run.dump_every_steps=1",
    "run.samples_per_step=16",
    "eval.at_start=false",
    "eval.at_end=false",
    "rollout.stop_token_ids=[10, 20, 30, 40, 50, 60, 75, 80, 90, 100, 110, 120]",  # about one token in ten ends a response
)
SEGMENTS = ("rollout.horizon={tokens: 7, in_flight: 20, train: segments}",)
SHORT = ("rollout.horizon={tokens: 7, in_flight: 20}",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    share_gloo_device()
    yield write_setup(tmp_path_factory.mktemp("horizon"))
    if dist.is_initialized():
        dist.destroy_process_group()


def run(folder: Path, name: str, *overrides: str, resume: ResumeOptions | None = None, settings: Sequence[str] = SETTINGS) -> Path:
    critic_free = any("estimator=grpo" in setting for setting in overrides)
    given = [setting for setting in settings if not (critic_free and setting.startswith("critic"))]
    config = training_config(folder, name, *given, *overrides)
    parallel = initialize_parallel(config.parallel)
    try:
        train(config, parallel, clean=False, resume=resume)
    finally:
        release_groups()
    return folder / name


def run_until_step_2(folder: Path, name: str, *overrides: str, settings: Sequence[str] = SETTINGS) -> None:
    """A run that a signal in step 2 stops after that step."""
    original = StepRunner.rl_step

    def stopping(self: StepRunner, number: int) -> StepOutcome:
        if number == 2:
            self.stop_requests.request("SIGUSR1", exit_code=EXIT_REQUEUE)
        return original(self, number)

    with mock.patch.object(StepRunner, "rl_step", stopping), pytest.raises(RunStopped):
        run(folder, name, *overrides, settings=settings)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return run(folder, "plain")


@pytest.fixture(scope="module")
def short(folder: Path) -> Path:
    """The run with a short horizon that nobody stops; what its policy learns from is kept."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        names = ("tokens", "response_mask", "old_logprobs", "rollout_logprobs", "importance_weights")
        found: dict[str, Any] = {name: experience.batch[name].clone() for name in names}
        rows = experience.batch.rows
        found |= {"prompt_length": rows.prompt_length, "response_length": rows.response_length, "segments": rows.segments}
        torch.save(found | {"cu_seqlens": experience.cu_seqlens}, folder / f"learned_{more[-1]}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        return run(folder, "short", *SHORT)


def of_the_horizon(name: str) -> bool:
    return name.startswith(("horizon/", "mismatch/off_policy_")) or name.endswith("_by_cut") or name == "tokens/reprefilled"


@pytest.mark.parametrize(("train", "tokens"), [("completed", LONGEST), ("segments", LONGEST + 5)])
def test_a_horizon_as_long_as_the_responses_changes_nothing(folder: Path, plain: Path, train: str, tokens: int) -> None:
    found = run(folder, f"long_{train}", f"rollout.horizon={{tokens: {tokens}, train: {train}}}")
    with_horizon = repeatable_rows(found)
    assert [{name: value for name, value in row.items() if not of_the_horizon(name)} for row in with_horizon] == repeatable_rows(plain)
    assert exported_weights(found) == exported_weights(plain) != {}
    for step in range(1, 5):
        assert read_samples(found, f"step_{step:04d}") == read_samples(plain, f"step_{step:04d}") != []
    for row in (row for row in with_horizon if row["stage"] == "rl"):
        assert (row["horizon/open"], row["horizon/finished"], row["horizon/cut"]) == (16, 16, 0)
        assert (row["tokens/reprefilled"], row["horizon/segments_max"]) == (0, 1)
        if train == "completed":
            assert row["horizon/staleness_max"] == 0
            assert row["mismatch/off_policy_kl"] == row["mismatch/kl"]
        else:
            assert row["horizon/bootstrapped_frac"] == 0


def test_a_short_horizon_trains_what_has_ended_with_the_two_log_probs(folder: Path, short: Path) -> None:
    steps = [row for row in repeatable_rows(short) if row["stage"] == "rl"]
    cuts = [row["horizon/cut"] for row in steps[:-1]]
    assert [row["horizon/open"] for row in steps] == [20, *(cut + (20 - cut) // 4 * 4 for cut in cuts)]
    assert all(row["horizon/finished"] == row["response/count"] for row in steps)
    assert sum(row["horizon/cut"] for row in steps) > 20
    assert all(1 <= row["response/length_max"] <= 7 * number for number, row in enumerate(steps, 1))
    assert [row["horizon/segments_max"] for row in steps] == [1, 2, 3, 3]
    assert max(row["horizon/staleness_max"] for row in steps) == 2
    for row in steps:
        assert row["mismatch/logprob_abs_max"] <= 1e-4  # of tokens of this step's policy
        assert row["policy/approx_kl_first"] <= 1e-6  # the update starts at the proximal policy
    assert steps[-1]["mismatch/off_policy_kl"] > 1e-4
    first = {row["step"]: row for row in repeatable_rows(short)}
    assert first[1]["critic/updates"] > 0
    for step, row in enumerate(steps, 1):
        learned = torch.load(folder / f"learned_{step + 1}.pt", weights_only=True)
        ages = torch.cat(
            [
                torch.tensor([-1] * prompt + [age for tokens, age in segments for _ in range(tokens)])
                for prompt, segments in zip(learned["prompt_length"].tolist(), learned["segments"], strict=True)
            ]
        )
        assert torch.equal(learned["response_mask"], ages >= 0)
        change = (learned["old_logprobs"] - learned["rollout_logprobs"])[ages >= 0]
        older = ages[ages >= 0] > 0
        assert change[~older].abs().max() <= 1e-4
        if bool(older.any()):
            assert change[older].abs().mean() > 1e-3
        expected = change.exp().clamp(max=2.0)
        torch.testing.assert_close(learned["importance_weights"][ages >= 0], expected, rtol=1e-6, atol=1e-6)
        assert row["horizon/staleness_mean"] == pytest.approx(float(ages[ages >= 0].double().mean()))
        assert int(learned["cu_seqlens"][-1]) == row["tokens/total"]


def test_no_response_trains_twice(folder: Path, short: Path) -> None:
    names = [(entry["prompt_id"], entry["sample_index"]) for step in range(1, 5) for entry in read_samples(short, f"step_{step:04d}")]
    assert len(set(names)) == len(names) > 16


def test_a_stopped_run_with_open_responses_continues_bit_for_bit(folder: Path, short: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_until_step_2(folder, "stopped", *SHORT)
    saved = list_checkpoints(folder / "stopped")[-1]
    assert saved.name == "step_000002"
    manifest = json.loads((saved / "manifest.json").read_text())
    assert "open_responses/replica_00000.safetensors" in manifest["files"]
    with pytest.raises(ConfigError, match=r"(?s)affect what is learned.*rollout\.horizon\.tokens: 7 -> 8"):
        run(folder, "stopped", "rollout.horizon={tokens: 8, in_flight: 20}", resume=ResumeOptions())
    with pytest.raises(CheckpointError, match=r"\d+ open responses, which only a run with rollout\.horizon can continue"):
        run(folder, "stopped", resume=ResumeOptions(allow_config_change=True))
    run(folder, "stopped", *SHORT, resume=ResumeOptions())
    assert repeatable_rows(folder / "stopped") == repeatable_rows(short)
    assert exported_weights(folder / "stopped") == exported_weights(short) != exported_weights(folder / "plain")
    for step in (3, 4):
        assert read_samples(folder / "stopped", f"step_{step:04d}") == read_samples(short, f"step_{step:04d}")
    capfd.readouterr()
    run(folder, "stopped", *SHORT, "run.steps=5", resume=ResumeOptions("step_000003", restart_data=True))
    assert "open responses: " in capfd.readouterr().out


def test_a_finished_run_says_what_is_open_and_a_longer_one_goes_on(folder: Path, short: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that ends with responses open: nothing is lost if it is given more steps."""
    run(folder, "extended", *SHORT, "run.steps=2")
    cut = repeatable_rows(folder / "extended")[-1]["horizon/cut"]
    assert f"open responses: {cut} have not ended; a resume with a larger run.steps continues them" in capfd.readouterr().out
    run(folder, "extended", *SHORT, resume=ResumeOptions())
    assert repeatable_rows(folder / "extended") == repeatable_rows(short)
    assert exported_weights(folder / "extended") == exported_weights(short)


def test_a_resume_may_begin_and_end_a_horizon(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(folder, "switched", "run.steps=1")
    run(folder, "switched", *SHORT, "run.steps=2", resume=ResumeOptions(allow_config_change=True))
    cut = repeatable_rows(folder / "switched")[-1]["horizon/cut"]
    capfd.readouterr()
    run(folder, "switched", "run.steps=3", resume=ResumeOptions(allow_config_change=True, restart_data=True))
    assert f"open responses: {cut} dropped (--restart-data)" in capfd.readouterr().out
    found = [row.get("horizon/open") for row in repeatable_rows(folder / "switched") if row["stage"] == "rl"]
    assert found == [None, 20, None]


def test_a_resume_may_change_the_horizon(folder: Path) -> None:
    """With permission: the open responses go on with the new H, and fewer in flight open no new ones until enough have ended."""
    run(folder, "changed", *SHORT, "run.steps=2")
    cut = repeatable_rows(folder / "changed")[-1]["horizon/cut"]
    other = "rollout.horizon={tokens: 9, in_flight: 16}"
    run(folder, "changed", other, resume=ResumeOptions(allow_config_change=True))
    steps = [row for row in repeatable_rows(folder / "changed") if row["stage"] == "rl"]
    assert steps[2]["horizon/open"] == cut + max(0, 16 - cut) // 4 * 4 and steps[3]["horizon/open"] <= 16
    entries = [entry for step in (3, 4) for entry in read_samples(folder / "changed", f"step_{step:04d}")]
    sizes = {tuple(size for size, _ in entry["segments"]) for entry in entries if "segments" in entry}
    assert any(size[0] == 7 and 7 < size[-1] <= 9 for size in sizes)
    names = [(e["prompt_id"], e["sample_index"]) for step in range(1, 5) for e in read_samples(folder / "changed", f"step_{step:04d}")]
    assert len(set(names)) == len(names)


def test_a_step_that_is_abandoned_leaves_the_open_responses_of_the_one_before(folder: Path, short: Path) -> None:
    original = StepRunner._sync

    def failing(self: StepRunner, step: Any) -> None:
        if (step.stage, step.number) == ("rl", 3):
            raise StepAbandoned("the rollout engine is gone", EXIT_REQUEUE)
        original(self, step)

    rarely = "checkpoint.every_steps=0"
    with mock.patch.object(StepRunner, "_sync", failing), pytest.raises(StepAbandoned):
        run(folder, "abandoned", *SHORT, rarely)
    assert [path.name for path in list_checkpoints(folder / "abandoned")] == ["step_000002"]


@pytest.fixture(scope="module")
def segments(folder: Path) -> Path:
    """The run with segments that nobody stops; the values that its advantages read at cuts are kept."""
    original = step_module.update_policy

    def kept(config: Any, model: Any, experience: Any, *more: Any) -> Any:
        rows = experience.batch.rows
        names = list(zip(rows.prompt_id, rows.sample_index.tolist(), strict=True))
        found = {"names": names, "finish_reason": rows.finish_reason, "reward": rows.reward, "bootstrap": experience.bootstrap_values}
        torch.save(found, folder / f"segments_{more[-1]}.pt")
        return original(config, model, experience, *more)

    with mock.patch.object(step_module, "update_policy", kept):
        return run(folder, "segments", *SEGMENTS)


def test_segments_train_in_the_step_that_sampled_them(folder: Path, segments: Path) -> None:
    steps = [row for row in repeatable_rows(segments) if row["stage"] == "rl"]
    assert all(row["tokens/trained"] == row["sampling/tokens"] > 0 for row in steps)
    assert all(row["horizon/finished"] == row["response/count"] for row in steps)
    assert all(0 < row["horizon/bootstrapped_frac"] < 1 and row["horizon/cut"] > 0 for row in steps)
    for row in steps:
        assert row["mismatch/logprob_abs_max"] <= 1e-4  # the present policy sampled all that it trains on
        assert row["policy/approx_kl_first"] <= 1e-6
        assert "mismatch/off_policy_kl" not in row
    entries = [entry for step in range(1, 5) for entry in read_samples(segments, f"step_{step:04d}")]
    continued = [entry for entry in entries if entry["response_length"] > 7]
    assert continued
    for entry in entries:
        tokens, before = entry["tokens"], (entry["response_length"] - 1) // 7 * 7
        sizes = [7] * (before // 7) + [entry["response_length"] - before]
        assert entry.get("segments", [[sizes[-1], 0]]) == [
            [size, age] for size, age in zip(sizes, reversed(range(len(sizes))), strict=True)
        ]
        assert ("segments" in entry) == (len(sizes) > 1)
        assert tokens["return"] == [entry["reward"]] * entry["response_length"]  # the critic's, over all tokens
        assert None not in tokens["value"] and None not in tokens["rollout_logprob"]
        assert [value is None for value in tokens["advantage"]] == [number < before for number in range(entry["response_length"])]
    assert exported_weights(segments) != exported_weights(folder / "short")


def test_values_at_cuts_are_compared_with_the_returns_that_came(folder: Path, segments: Path) -> None:
    """From what each step learned: the critic's output at the last token of a response that was cut, and the reward when it ended."""
    steps = [row for row in repeatable_rows(segments) if row["stage"] == "rl"]
    at_cuts: dict[tuple[str, int], list[float]] = {}
    for number, row in enumerate(steps, 1):
        learned = torch.load(folder / f"segments_{number + 1}.pt", weights_only=True)
        found = []
        entries = zip(learned["names"], learned["finish_reason"], learned["reward"].tolist(), learned["bootstrap"].tolist(), strict=True)
        for name, finish, reward, bootstrap in entries:
            if finish == "cut":
                at_cuts.setdefault(name, []).append(bootstrap)
            else:
                found += [(value, reward) for value in at_cuts.pop(name, [])]
        assert row["horizon/cuts_ended"] == len(found) == sum(row["critic/tokens_by_cut"])
        if found:
            assert row["horizon/cut_value_bias"] == pytest.approx(sum(value - reward for value, reward in found) / len(found), abs=1e-6)
        assert 0 < row["horizon/cut_weight"] < row["horizon/bootstrapped_frac"] < 1
        assert sum(row["horizon/segments_histogram"]) == row["horizon/finished"]
    assert sum(row["horizon/cuts_ended"] for row in steps) > 10


def test_the_critic_may_learn_from_segments(folder: Path, segments: Path) -> None:
    """The first step samples the same; the critic then has as many tokens as the policy."""
    settings = SEGMENTS[0].replace("train: segments", "train: segments, critic: segments")
    evaluated = ("eval.at_end=true", "eval.samples_per_prompt=1")
    of_run = repeatable_rows(run(folder, "critic_of_segments", settings, "run.steps=2", *evaluated))
    assert of_run[-1]["eval/heldout/length_max"] > 7  # evaluations sample whole responses
    found = [row for row in of_run if row["stage"] == "rl"]
    first, *_ = (row for row in repeatable_rows(segments) if row["stage"] == "rl")
    assert found[0]["policy/surrogate_loss"] == first["policy/surrogate_loss"]  # values from before the critic's update
    assert found[0]["critic/returns_mean"] != first["critic/returns_mean"]
    for step in (1, 2):
        for entry in read_samples(folder / "critic_of_segments", f"step_{step:04d}"):
            before = (entry["response_length"] - 1) // 7 * 7
            expected = [None] * before + [entry["reward"]] * (entry["response_length"] - before)
            assert entry["tokens"]["return"] == expected  # lambda_critic is 1 and these have ended


def test_a_stopped_run_of_segments_continues_bit_for_bit(folder: Path, segments: Path) -> None:
    run_until_step_2(folder, "stopped_segments", *SEGMENTS)
    run(folder, "stopped_segments", *SEGMENTS, resume=ResumeOptions())
    assert repeatable_rows(folder / "stopped_segments") == repeatable_rows(segments)
    assert exported_weights(folder / "stopped_segments") == exported_weights(segments)


@pytest.mark.parametrize(("name", "settings"), [("short", SHORT), ("segments", SEGMENTS)])
def test_a_dumped_step_is_replayed_exactly(folder: Path, short: Path, segments: Path, name: str, settings: tuple[str, ...]) -> None:
    config = training_config(folder, name, *SETTINGS, *settings)
    parallel = initialize_parallel(config.parallel)
    try:
        found = replay(config, parallel, ReplayOptions(3))
    finally:
        release_groups()
    compared = {entry.name: entry for entry in found if entry.comparable}
    own = {"horizon/bootstrapped_frac"} if name == "segments" else {"horizon/staleness_mean", "mismatch/off_policy_kl"}
    assert own | {"horizon/cut", "policy/loss", "critic/loss", "tokens/reprefilled"} <= compared.keys()
    assert all(entry.difference == 0 for entry in compared.values())


@pytest.mark.parametrize("stale", ["mask", "drop"])
def test_tokens_that_are_too_old_carry_no_loss(folder: Path, short: Path, stale: str) -> None:
    """The first steps are those of the run without a limit, up to the first stale token."""
    horizon = f"rollout.horizon={{tokens: 7, in_flight: 20, max_staleness: 1, stale: {stale}}}"
    found = [row for row in repeatable_rows(run(folder, stale, horizon, "run.steps=3")) if row["stage"] == "rl"]
    without = [row for row in repeatable_rows(short) if row["stage"] == "rl"]
    for name in ("policy/loss", "tokens/trained", "response/count", "policy/grad_norm"):
        assert [row[name] for row in found[:2]] == [row[name] for row in without[:2]]
    learned = torch.load(folder / "learned_4.pt", weights_only=True)
    lengths = learned["response_length"].tolist()
    old = [sum(tokens for tokens, age in segments if age > 1) for segments in learned["segments"]]
    whole = sum(lengths)
    lost = sum(old) if stale == "mask" else sum(length for length, count in zip(lengths, old, strict=True) if count)
    assert found[2]["horizon/stale_tokens"] == sum(old) > 0
    assert found[2]["horizon/stale_responses"] == sum(count > 0 for count in old)
    assert found[2]["tokens/trained"] == whole - lost
    assert found[2]["horizon/staleness_max"] <= 1


def test_groups_train_whole(folder: Path) -> None:
    grpo = ("algorithm.advantage.estimator=grpo", "run.steps=5")
    run_dir = run(folder, "groups", *SHORT, *grpo)
    steps = [row for row in repeatable_rows(run_dir) if row["stage"] == "rl"]
    assert steps[0]["response/count"] == 0  # nothing is complete yet: a step without an update
    assert steps[0]["policy/updates"] == 0 or "policy/loss" not in steps[0]
    assert any(row["horizon/waiting"] > 0 for row in steps)
    for number, row in enumerate(steps, 1):
        entries = read_samples(run_dir, f"step_{number:04d}") if row["response/count"] else []
        names = [entry["prompt_id"] for entry in entries]
        assert row["response/count"] % 4 == 0 and all(names.count(name) == 4 for name in names)
    assert sum(row["response/count"] for row in steps) > 0
