"""Steps of a real run in two processes, made again from their dumps, and critics pretrained on stored responses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.forks import run_command, run_ranks
from tests.training_setup import read_metrics, training_config, write_setup
from vapo_mcore.commands.pretrain_critic import read_responses
from vapo_mcore.commands.pretrain_options import PretrainOptions
from vapo_mcore.experience.scored_responses import ScoredResponses
from vapo_mcore.weights.convert import megatron_to_hf

PROBE = "critic/probe_explained_variance"
CEILING = 1 - 1 / 5
"""Exact for ``scored.jsonl``: the first of five tokens decides the score, so a critic that sees has the mean before it and the score
after it."""


def write_scored(path: Path) -> None:
    """Write 200 responses to 100 prompts: each prompt has one of either score, which the response's first character tells."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(200):
            first = "ab"[number // 2 % 2 ^ number % 2]
            row = {"prompt": f"{number // 2}+1=", "response": first + rng.choice("xyz") * 3, "score": float(first == "a")}
            file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("replay"))
    write_scored(folder / "scored.jsonl")
    done = run_ranks("tests/integration/replay_worker.py", 2, str(folder), timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (folder / "output.txt").write_text(done.stdout)
    return folder


def compared(path: Path) -> tuple[bool, dict[str, dict[str, Any]]]:
    content = json.loads(path.read_text())
    return content["exact"], content["metrics"]


@pytest.mark.parametrize("name", ["first", "third", "critic_layout"])
def test_a_step_right_after_a_checkpoint_replays_with_equal_metrics(folder: Path, name: str) -> None:
    """The first one follows value pretraining, whose critic had another optimizer; heads with dropout draw random numbers.

    ``critic_layout``: the first step of a run whose critic has two pipeline stages beside a policy on two data-parallel ranks.
    """
    exact, metrics = compared(folder / f"{name}.json")
    assert exact
    different = {key: entry for key, entry in metrics.items() if entry["recorded"] != entry["replayed"]}
    assert different == {}
    assert {
        "policy/loss",
        "policy/grad_norm",
        "critic/loss",
        "critic/grad_norm",
        "policy/kl_loss",
        "critic/explained_variance",
    } <= metrics.keys()
    assert {"reward/mean", "advantages/std", "mismatch/kl", "gae/lambda_mean", "packing/fill", "imitation/nll"} <= metrics.keys()
    assert metrics["policy/loss"]["replayed"] is not None


def test_from_an_older_checkpoint_it_is_said_what_cannot_be_compared(folder: Path) -> None:
    exact, metrics = compared(folder / "older.json")
    assert not exact
    same = {key for key, entry in metrics.items() if entry["recorded"] == entry["replayed"]}
    assert {"reward/mean", "response/length_mean", "groups/mixed_frac", "packing/fill", "tokens/trained", "gae/lambda_mean"} <= same
    assert not {"policy/loss", "critic/loss", "mismatch/kl", "advantages/std"} & same
    output = (folder / "output.txt").read_text()
    assert (
        "step_000001, which is not the state right before the step: the weights differ, so metrics that depend on them (policy/, critic/,"
        in output
    )
    marked = {line.split()[0] for line in output.splitlines() if line.endswith(" ~")}
    assert "policy/loss" in marked
    assert "reward/mean" not in marked
    assert output.count("all comparable metrics are equal") == 4


def test_the_best_policy_by_an_evaluation_is_exported(folder: Path, tmp_path: Path) -> None:
    """It is the policy of the checkpoint after its step."""
    run = folder / "run"
    best, step = None, 0
    for row in read_metrics(run):
        score = row.get("eval/heldout/avg@2")
        if score is not None and (best is None or score > best):
            best, step = score, row["step"]
    assert step > 0, "no evaluation was better than that of the untrained model: the test shows nothing"
    info = json.loads((run / "best_hf" / "best.json").read_text())
    assert (info["metric"], info["score"], info["step"]) == ("eval/heldout/avg@2", best, step)
    megatron_to_hf(run / "checkpoints" / f"step_{step:06d}" / "policy" / "weights", tmp_path / "hf")
    exported, saved = (load_file(path / "model.safetensors") for path in (run / "best_hf", tmp_path / "hf"))
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert AutoModelForCausalLM.from_pretrained(run / "best_hf").config.vocab_size > 0
    assert not list(run.glob("best_hf.*"))


def test_the_run_was_shown_by_its_trackers(folder: Path) -> None:
    """Trackers started by a real run; what they hold is in test_trackers.py."""
    run = folder / "run"
    assert {row["trackers/failed"] for row in read_metrics(run)} == {0}
    identity = json.loads((run / ".vapo_mcore_run").read_text())["run_id"]
    assert [path.name.rsplit("-", 1)[1] for path in (run / "wandb").glob("offline-run-*")] == [identity]
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_a_replay_changes_nothing_and_a_dump_holds_no_pickle(folder: Path) -> None:
    run = folder / "run"
    assert sorted(path.name for path in (run / "dumps").iterdir()) == ["step_000001", "step_000003"]
    assert sorted(path.name for path in (run / "dumps" / "step_000003").iterdir()) == [
        "rank_0000.safetensors",
        "rank_0001.safetensors",
        "step.json",
    ]
    assert [path.name for path in run.glob("checkpoints/*")].count("step_000003") == 1
    assert not (run / "faults").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["step"]) for row in rows if row["step"]] == [("value_pretraining", 1), ("rl", 1), ("rl", 2), ("rl", 3)]
    assert [row["time/dump"] > 0 for row in rows if "time/dump" in row] == [True, True]


def test_the_command_replays_in_one_process_what_two_have_made(folder: Path) -> None:
    """Another layout packs and sums in another order. A last row that a killed run left torn is no obstacle."""
    metrics_file = folder / "run" / "metrics.jsonl"
    whole = metrics_file.read_bytes()
    metrics_file.write_bytes(whole + b'{"step": 4, "sta')
    command, one = ("replay-step", str(folder / "run")), str(folder / "one.json")
    done = run_command(*command, "3", "parallel.world_size=1", "--json", one)
    metrics_file.write_bytes(whole)
    assert done.returncode == 0, done.stderr[-4000:]
    exact, metrics = compared(folder / "one.json")
    assert exact
    for name in ("reward/mean", "policy/loss", "policy/grad_norm", "advantages/std", "policy/approx_kl_first", "response/length_mean"):
        assert metrics[name]["replayed"] == pytest.approx(metrics[name]["recorded"], rel=1e-4, abs=1e-6), name
    assert "metric" in done.stdout
    for arguments, expected in (
        (["2"], "step_000002 is not the dump of a step; existing dumps: step_000001, step_000003."),
        (["3", "--checkpoint", "step_000003"], "--checkpoint step_000003 is not before step 3 (rl): it contains the step's result"),
        (["0"], "STEP = 0: steps count from 1"),
    ):
        refused = run_command(*command, *arguments)
        assert refused.returncode == 2
        assert expected in refused.stderr


def passes(folder: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{name}_passes.json").read_text())


def test_the_critic_sees_what_the_text_decides_and_no_more(folder: Path) -> None:
    found = [row[PROBE] for row in passes(folder, "dp2")]
    assert abs(passes(folder, "dp2")[0][f"{PROBE}_before"]) < 1e-6, "a head of zeros explains nothing"
    assert CEILING - 0.08 < max(found) < CEILING + 0.005, found
    assert len(found) < 20 and max(found) == pytest.approx(max(found[:-2]), abs=0.01), "it stops two passes after the last rise"
    assert found == [row[PROBE] for row in read_metrics(folder / "dp2")]


def test_the_saved_critic_is_the_best_one_and_transformers_gives_its_explained_variance(folder: Path) -> None:
    config = training_config(folder, "other", "parallel.world_size=2")
    _, held_out = read_responses(config, PretrainOptions((str(folder / "scored.jsonl"),)), print)
    assert held_out.prompts == 10 and len(held_out) == 20
    model = AutoModelForTokenClassification.from_pretrained(folder / "dp2" / "critic_pretrained" / "hf", dtype=torch.float64)
    batch, errors, returns = held_out.batch, [], []
    for row in range(len(held_out)):
        tokens = batch["tokens"][batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        start = int(batch.rows.prompt_length[row])
        assert tokens[-1] == 1, "a finished response ends with EOS"
        with torch.no_grad():
            values = model(tokens[None]).logits[0, start - 1 : -1, 0]
        score = float(batch.rows.score[row])
        returns += [score] * len(values)
        errors += (score - values).tolist()
    exact = 1 - torch.tensor(errors).double().var() / torch.tensor(returns).double().var()
    assert max(row[PROBE] for row in passes(folder, "dp2")) == pytest.approx(float(exact), abs=1e-4)
    assert passes(folder, "saved")[0][f"{PROBE}_before"] == pytest.approx(float(exact), abs=1e-4), "critic.init = saved loads it"
    assert not (folder / "dp2" / "critic_pretrained" / "hf.old").exists()


@pytest.mark.parametrize("layout", ["tp2", "critic_tp2"])
def test_layouts_agree(folder: Path, layout: str) -> None:
    for one, other in zip(passes(folder, "dp2"), passes(folder, layout), strict=False):
        for name in (PROBE, "critic/loss", "critic/explained_variance", "critic/grad_norm", "reward/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert passes(folder, "dp2")[1]["critic/updates"] == 2 * 11, "180 responses in mini-batches of about 16: 11 updates a pass"
    assert "policy/updates" not in passes(folder, "dp2")[0]


def test_the_dumps_of_a_run_give_the_tokens_and_rewards_of_its_steps(folder: Path) -> None:
    """Two steps of 16 responses to 4 prompts were dumped, by two ranks."""
    config = training_config(folder, "other")
    training, held_out = read_responses(config, PretrainOptions((str(folder / "run"),), fraction=0.3), print)
    recorded = {row["step"]: row for row in read_metrics(folder / "run") if row["stage"] == "rl"}
    rows = [*zip(*_scores(training), strict=True), *zip(*_scores(held_out), strict=True)]
    assert len(rows) == 32
    assert sum(score for score, _ in rows) / 32 == pytest.approx((recorded[1]["reward/mean"] + recorded[3]["reward/mean"]) / 2)
    lengths = (recorded[1]["response/length_mean"] + recorded[3]["response/length_mean"]) / 2
    assert sum(length for _, length in rows) / 32 == pytest.approx(lengths)
    (found,) = passes(folder, "dumps")
    assert found["reward/mean"] == pytest.approx(float(training.batch.rows.score.mean())) and found[PROBE] is not None


def _scores(data: ScoredResponses) -> tuple[list[float], list[int]]:
    return data.batch.rows.score.tolist(), data.batch.rows.response_length.tolist()
