"""``vapo-mcore train`` as a user starts it: vLLM tensor parallel to the exported model, faults told once, no rank left hanging."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.forks import run_command, run_script
from tests.rollout_models import greedy_of, load_model
from tests.torchrun import run_bounded
from tests.training_setup import read_metrics, read_samples, write_setup
from vapo_mcore.errors import EXIT_HANG, EXIT_REQUEUE

CLI = [sys.executable, "-m", "vapo_mcore.cli", "train"]
FAILING = ("tests/launcher.py", "tests.integration.failing_worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("cli"), model="qwen2_tied")


def train(folder: Path, *overrides: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Start the command as a user does; its launcher starts the ranks."""
    return run_bounded([*CLI, str(folder / "base.yaml"), *overrides], timeout=timeout)


def train_quickly(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The same, but the launcher is forked from a process that has imported everything."""
    return run_command("train", str(folder / "base.yaml"), *overrides, timeout=300)


def test_vllm_run_exports_a_model_that_answers_alike_in_transformers(folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    run = folder / "vllm"
    settings = ["rollout.engine=vllm", "parallel.tensor_model_parallel_size=2", "rollout.verify_weights=true", "run.samples_per_step=7"]
    greedy = ["eval.temperature=0", "eval.samples_per_prompt=1", "eval.top_p=null", "critic.value_pretraining.steps=1"]
    result = train(folder, f"run.dir={run}", *settings, *greedy)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert result.stdout.count("step 1/2 |") == 1  # rank 0 alone prints
    assert "\x1b" not in result.stdout  # no bar off a terminal
    for row in (row for row in read_metrics(run) if row["step"] > 0):
        assert row["weights/tensors"] == 26
        if row["stage"] == "rl":
            assert row["policy/approx_kl_first"] <= 1e-6
            assert row["mismatch/logprob_abs_mean"] <= 1e-5
            assert row["warnings"] == 0
    assert not _same_weights(folder / "model", run / "export" / "hf")
    _assert_greedy_answers(run)


@pytest.mark.slow
def test_a_mixture_trains_stops_and_goes_on_at_another_layout(tmp_path: Path) -> None:
    """Policy and critic over expert parallelism, with vLLM; resumed with tensor parallelism; what is exported answers alike."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = write_setup(tmp_path, model="qwen3_moe")
    run = folder / "mixture"
    settings = ["rollout.engine=vllm", "rollout.tensor_parallel_size=1", "rollout.verify_weights=true"]
    settings += ["run.samples_per_step=7", "eval.temperature=0", "eval.samples_per_prompt=1", "eval.top_p=null"]
    settings += ["critic.value_pretraining.steps=1", "checkpoint.at_end=true", "parallel.expert_model_parallel_size=2", f"run.dir={run}"]
    settings += ["model.router={replay: engine, balance_coef: 0.01, z_coef: 0.001}", "run.dump_steps=[2]"]
    first = train(folder, *settings, "run.steps=1")
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-4000:]
    other = ["parallel.tensor_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1", "run.steps=2", "--resume"]
    again = train(folder, *settings, *other)
    assert again.returncode == 0, again.stdout[-4000:] + again.stderr[-4000:]
    rows = [row for row in read_metrics(run) if row["stage"] == "rl" and row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["policy/approx_kl_first"] <= 1e-6
        assert row["mismatch/logprob_abs_mean"] <= 1e-5
        assert row["warnings"] == 0
        for role in ("policy", "critic"):
            assert 0.5 <= row[f"{role}/experts_busiest_mean"] <= row[f"{role}/experts_busiest_max"] <= 1.0  # 2 of 4 experts
            assert 0.0 < row[f"{role}/experts_replayed_frac"] < 0.5
        assert row["mismatch/experts_frac"] <= 1e-3
    assert not _same_weights(folder / "model", run / "export" / "hf")
    _assert_greedy_answers(run)
    # The dump of the second step has the engine's choices of all layers: replayed in the run's layout, with equal metrics.
    replayed = folder / "replayed.json"
    done = run_command("replay-step", str(run), "2", "--json", str(replayed), timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    content = json.loads(replayed.read_text())
    assert content["exact"]
    assert {name: entry for name, entry in content["metrics"].items() if entry["recorded"] != entry["replayed"]} == {}


def test_vllm_plays_turns_with_an_environment(tmp_path: Path) -> None:
    """One replica of two ranks, which must go on alike: turn by turn, with log-probs that the trainer reproduces.

    The model is a mixture, and the trainer repeats the experts that vLLM chose over all turns and observations.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = write_setup(tmp_path, model="qwen3_moe")
    run = folder / "vllm_turns"
    environment = (
        "{name: 'tests.integration.environments:letters', max_turns: 3, max_observation_length: 9, format: '|{observation}|', "
        "stop_tokens: [A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, a, b, c, d, e]}"
    )
    settings = ["rollout.engine=vllm", "parallel.tensor_model_parallel_size=2", f"rollout.environment={environment}", "run.steps=1"]
    settings += [f"run.dir={run}", "critic.value_pretraining.steps=0", "data.eval=[]", "model.router.replay=engine"]
    settings += ["parallel.expert_model_parallel_size=2", "parallel.expert_tensor_parallel_size=1"]
    result = run_command("train", str(folder / "base.yaml"), *settings, nproc=2, timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    row = read_metrics(run)[-1]
    assert row["turns/mean"] > 1.2
    assert row["tokens/tool"] > 20
    assert row["mismatch/logprob_abs_mean"] <= 1e-5
    assert row["mismatch/experts_frac"] <= 1e-3  # in float32 both choose alike
    assert row["policy/approx_kl_first"] <= 1e-6
    assert 0.0 < row["policy/experts_replayed_frac"] < 0.5  # after the first update
    shown = [sample for sample in read_samples(run, "step_0001") if len(sample.get("turns", ())) > 1]
    for sample in shown:
        assert [text[:3] for text in sample["observations"]] == [f"|[{number + 1}" for number in range(len(sample["observations"]))]


def _same_weights(one: Path, other: Path) -> bool:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return all(bool((first[name] == second[name]).all()) for name in second)


def _assert_greedy_answers(run: Path) -> None:
    """What vLLM answered greedily after the last sync is what plain transformers says with the exported folder."""
    from transformers import AutoTokenizer

    folder = run / "export" / "hf"
    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    answers = read_samples(run, "eval_step_0002")
    assert len(answers) == 7
    for answer in answers:
        tokens = greedy_of(model, tokenizer(answer["prompt"])["input_ids"], 40)
        assert answer["response"] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert answer["response_length"] == len(tokens)


def test_a_bad_row_is_told_once_before_a_model_is_loaded(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": null, "answer": "2"}\n', encoding="utf-8")
    result = train_quickly(folder, f"run.dir={folder / 'bad'}", f"data.train.0.path={folder / 'bad.jsonl'}")
    assert result.returncode == 2
    assert result.stderr.count("error") == 1
    assert "bad.jsonl" in result.stderr
    assert "prompt" in result.stderr
    assert "Traceback" not in result.stderr
    assert "critic:" not in result.stdout


def test_a_verifier_that_cannot_be_imported_is_told_once_before_a_model_is_loaded(folder: Path) -> None:
    result = train_quickly(folder, f"run.dir={folder / 'unimportable'}", "data.train.0.verifier=no_such_module:score")
    assert result.returncode == 2
    assert result.stderr.startswith("error: data.train.0.verifier: verifier 'no_such_module:score' cannot be loaded")
    assert result.stderr.count("\n") == 1
    assert "critic:" not in result.stdout
    assert not (folder / "unimportable").exists()  # the next start needs no --clean


def test_a_run_directory_in_use_is_refused(folder: Path) -> None:
    (folder / "used").mkdir()
    (folder / "used" / "notes.txt").write_text("mine")
    result = train_quickly(folder, f"run.dir={folder / 'used'}", "--clean")
    assert (result.returncode, (folder / "used" / "notes.txt").read_text()) == (2, "mine")
    assert "not a run of vapo-mcore" in result.stderr


def test_one_failing_rank_ends_the_run(folder: Path) -> None:
    start = time.monotonic()
    result = run_script(*FAILING, str(folder), "raise", timeout=240)
    assert result.returncode == 2, result.stderr[-4000:]
    assert result.stderr == "error (rank 1): the second update went wrong here\n"
    assert [row["step"] for row in read_metrics(folder / "failing_raise")] == [0, 1]
    assert time.monotonic() - start < 200


def test_a_rank_that_is_killed_ends_the_run(folder: Path) -> None:
    ended, killed = _seconds_after_the_last_sign_of_life(folder, "die")
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr[-4000:]
    assert ended.stderr == "error: the process of rank 1 was ended by signal SIGKILL\n"
    assert killed < 60


def _seconds_after_the_last_sign_of_life(folder: Path, how: str, *settings: str) -> tuple[subprocess.CompletedProcess[str], float]:
    result = run_script(*FAILING, str(folder), how, *settings, timeout=400)
    last = max(json.loads(path.read_text())["written"] for path in (folder / f"failing_{how}" / "heartbeats").glob("*.json"))
    return result, time.time() - last


@pytest.mark.slow
def test_a_rank_that_fails_inside_vllm_ends_the_run_at_once(folder: Path) -> None:
    """Rank 0 waits in a collective of vLLM's. The first step's checkpoint is published, so a requeued run gets further."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    settings = ["rollout.engine=vllm", "parallel.tensor_model_parallel_size=2", "data.eval=[]", "run.steps=4"]
    settings += ["rollout.vllm={kv_cache_gib: 0.0625, max_num_seqs: 64}", "checkpoint={every_steps: 1, every_minutes: 0}"]
    ended, seconds = _seconds_after_the_last_sign_of_life(folder, "vllm", *settings)
    assert ended.returncode == EXIT_REQUEUE, ended.stderr[-4000:]
    told = (
        "stopped (rank 1): the rollout engine failed on this rank of replica 0, and the replica's other ranks wait for it inside the engine"
    )
    assert [line for line in ended.stderr.splitlines() if line.startswith(("error", "stopped"))] == [
        f"{told}: RuntimeError: the device is lost"
    ]
    assert seconds < 100  # 30 s for rank 0 to leave vLLM, and 30 s until it is killed
    assert [row["step"] for row in read_metrics(folder / "failing_vllm")] == [1, 2]
    assert (folder / "failing_vllm" / "checkpoints" / "step_000001").is_dir()


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_collective_is_found_and_told(folder: Path) -> None:
    result = run_script(*FAILING, str(folder), "hang", "faults.hang_minutes=0.25", timeout=240)
    assert result.returncode == EXIT_HANG, result.stderr[-4000:]
    told = [line for line in result.stderr.splitlines() if line.startswith("error")]
    assert told
    assert all("no progress for" in line and "in phase critic_update of rl 2" in line for line in told)
    stacks = [(folder / "failing_hang" / "heartbeats" / f"rank_{rank:04d}.stacks").read_text() for rank in (0, 1)]
    assert "in goes_wrong_on_rank_1" in stacks[1]
    assert "in barrier" in stacks[1]
    assert "in goes_wrong_on_rank_1" in stacks[0]  # it waits in the update that rank 1 never came to
    assert "in train_step" in stacks[0]
