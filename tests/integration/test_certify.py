"""``vapo-mcore certify`` finds each planted defect and names it, and passes a sound setup. Each defect has a launch of its own."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.certify_setup import write_certify_setup
from tests.forks import ROOT, run_command, run_ranks
from tests.torchrun import run_bounded
from vapo_mcore.certify.names import BUILT_IN
from vapo_mcore.planning.devices import choose_device

slow = pytest.mark.slow

DEFECTS = {
    # case of certify_worker.py: (check, measurement, what it says, in the remedy)
    "swapped_rows": ("trainer", "hidden states by layer, float32", r"after layer 1, the first that differs", "order of rows in q and k"),
    "rope": ("trainer", "hidden states by layer, float32", r"after layer 0, the first that differs", "halves of the rotary embedding"),
    "gate": (
        "trainer",
        "hidden states by layer, float32",
        r"after layer 1, the first that differs",
        "the first layer that differs is layer 1",
    ),
    "positions": ("trainer", "hidden states by layer, float32", r"after layer 0, the first that differs", "halves of the rotary embedding"),
    "stale_layer": (
        "engine",
        "weight sync, perturbed weights",
        r"rollout engine\'s weights differ from those it received, in model\.layers\.1\.",
        "loader",
    ),
    "stale_unreadable": ("engine", "KL of full distributions, perturbed weights", r"\d", "the engine does not hold the trainer's weights"),
    "scaled_norm": (
        "engine",
        "weight sync, the recipe's weights",
        r"differ from those it received, in model\.layers\.1\.input_layernorm\.weight$",
        "loader",
    ),
    "scaled_unreadable": (
        "engine",
        "mean |dlogp|, sampled tokens at T = 1, the recipe's weights",
        r"\d",
        "the engine does not hold the trainer's weights",
    ),
    "temperature": (
        "engine",
        "mean |dlogp|, sampled tokens at T = 0.8, the recipe's weights",
        r"\d",
        "are those of temperature 1, not of 0.8",
    ),
    "slight_temperature": (
        "engine",
        "mean |dlogp|, sampled tokens at T = 0.95, the recipe's weights",
        r"^0\.0\d+ over \d+ tokens, \S+ to the trainer's of T = 1$",
        "are those of temperature 1, not of 0.95",
    ),
    "tied_head": (
        "engine",
        "KL of full distributions, perturbed weights",
        r"\d",
        "the engine does not hold the trainer's weights",
    ),
    "frozen_ratio": ("invariance", "importance ratio", r"^ratio 1\.0000, KL 0\.00000$", "the ratio or weight is frozen"),
    "flipped_advantages": ("invariance", "surrogate", r"^-?0\.\d+$", "does not follow the advantages"),
    "frozen_weight": ("invariance", "importance weight", r"^1\.0000$", "the ratio or weight is frozen"),
    "weight_ignored": (
        "invariance",
        "importance weight in the loss",
        r"^surrogate (-\d\.\d+) with weights of 1, \1 with weights of 2$",
        "the ratio or weight is frozen",
    ),
    "context": (
        "invariance",
        "gradient norm, policy, the recipe's layout and tensor 1 x pipeline 1 x context 2 x data 1",
        r"^1 relative: ",
        "gradients are scaled or reduced twice",
    ),
    "left_out_rank": (
        "invariance",
        "gradient norm, policy, the recipe's layout and tensor 1 x pipeline 1 x context 2 x data 1",
        r" relative: ",
        "gradients are scaled or reduced twice",
    ),
    "moments": (
        "offload",
        "weights and optimizer state after 10 cycles",
        r"tensors differ, the first is (policy|critic) optimizer ",
        "copies on the host",
    ),
    "stale_copy": (
        "offload",
        "weights and optimizer state after 10 cycles",
        r"tensors differ, the first is (policy|critic) ",
        "copies on the host",
    ),
    "not_restored": (
        "resume",
        "weights and optimizer state of a checkpoint",
        r"tensors differ \(optimizer state only\), the first is (policy|critic) optimizer \S+exp_avg",
        "moments are not loaded",
    ),
    "value_bias": (
        "resume",
        "weights and optimizer state of a checkpoint",
        r"^1 of \d+ tensors differ, the first is critic 0\.output_layer\.bias$",
        "does not restore what was saved",
    ),
    "template": ("folder", "generation prompt", r"off by whitespace: from character \d+ on the prompt has ''", "generation prompt"),
    "stop_ids": ("folder", "end of a turn", r"ends an answer with '<\|im_end\|>' \(4\), which is not among the stop ids", "add 4 to"),
    "critic_head": ("critic", "value head", r"is row 17 of the policy's output layer", "critic.head_init"),
    "ascent": ("critic", "values after head-only training", r"^-", "the sign of the loss"),
    "misfit": ("machine", "plan", r"^does not fit on cpu", "names changes that make it fit"),
    "grader": (
        "graders",
        "other truths graded wrong, tests.integration.certify_checks:everything_right",
        r"24 of 24 .* the grader calls everything right",
        "fix the verifier",
    ),
    "slow_gpu": (
        "rates",
        "training, forward and backward",
        r"plan assumes [\d,]+ tokens/s, measured is \S+e-0\d times as fast",
        "clocks and power limits",
    ),
}


TOGETHER = (("categorical_critic", "mlp_critic", "corrected", "critic_layout"), ("no_critic", "no_engine", "no_data"))
"""Cases that share a launch."""
BEFORE = {"swapped_rows": "clean"}
"""Cases whose certificate is compared with another's."""
ONE_PROCESS = {"one_rank", "slow_gpu"}


def launch(folder: Path, *cases: str) -> None:
    """Run the cases, each of which leaves ``folder``/CASE, and write what they print to output.txt in each."""
    ranks, fake_cuda = 1 if ONE_PROCESS.intersection(cases) else 2, "slow_gpu" in cases
    done = run_ranks("tests/integration/certify_worker.py", ranks, str(folder), *cases, timeout=240, fake_cuda=fake_cuda)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for case in cases:
        (folder / case / "output.txt").write_text(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_certify_setup(tmp_path_factory.mktemp("certify"))
    write_certify_setup(folder / "tied", model="qwen2_tied")
    return folder


def checks(folder: Path, case: str) -> dict[str, Any]:
    """The checks of a case's certificate; the first test that asks for a case launches it."""
    if not (folder / case / "output.txt").exists():
        if case in BEFORE:
            checks(folder, BEFORE[case])
        launch(folder, *next((cases for cases in TOGETHER if case in cases), (case,)))
    return measured(folder / case)


def measured(output: Path) -> dict[str, Any]:
    return json.loads((output / "certificate.json").read_text())["checks"]


def test_cheap_checks_hold_and_find_a_defect(tmp_path: Path) -> None:
    """The part that is not slow: a sound setup, an engine that one rank asks for alone, and a critic with a row of the policy's head."""
    folder = write_certify_setup(tmp_path)
    launch(folder, "fast", "critic_head")
    found = checks(folder, "fast")
    assert {name: check["measurements"] for name, check in found.items() if check["verdict"] != "holds"} == {}
    alone = found.pop("tests.integration.certify_checks:alone")["measurements"][0]["measured"]
    assert "rank 0 asks for bench.engine, which all ranks build together, but ranks [1] have not" in alone
    assert list(found) == ["folder", "trainer", "critic", "graders"]
    found_and_named(folder, "critic_head")


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ("dying", "error: the process of rank 1 was ended by signal SIGKILL"),
        ("broken", "error: certify ended without a verdict: RuntimeError: the device is gone"),
    ],
)
def test_a_lost_rank_and_a_crash_end_with_2_and_leave_no_certificate(tmp_path: Path, check: str, says: str) -> None:
    """Neither 137 nor 1, which is a warning; what an earlier command wrote does not stand for this one."""
    folder = write_certify_setup(tmp_path)
    output = folder / "certified"
    output.mkdir()
    (output / "certificate.json").write_text("old")
    own = f"tests.integration.certify_checks:{check}"
    done = run_command("certify", str(folder / "base.yaml"), "--checks", f"folder,{own}", "--output", str(output), timeout=200)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert says in done.stderr
    assert "folder: holds" in done.stdout
    assert sorted(path.name for path in output.glob("*.json")) == ["certificate.partial.json", "certificate.previous.json"]
    assert list(json.loads((output / "certificate.partial.json").read_text())["checks"]) == ["folder"]


def test_a_check_that_asks_for_a_restart_fails_with_2_not_75(tmp_path: Path) -> None:
    folder = write_certify_setup(tmp_path)
    own = "tests.integration.certify_checks:restarting"
    done = run_command("certify", str(folder / "base.yaml"), "parallel.world_size=1", "--checks", own, timeout=200)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-4000:]
    assert "could not be measured: the failed engine still holds device memory" in done.stdout


def test_the_page_lists_the_planted_defects() -> None:
    """The rows of the table in docs/certify.md are the cases of DEFECTS, in their order, with messages that their patterns find."""
    table = (ROOT / "docs/certify.md").read_text().split("## Planted defects")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.replace(r"\|", "!").split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")][2:]
    shown = [(check.strip("`"), what.replace("!", "|"), message.strip("`").replace("!", "|")) for _, check, what, message in rows]
    assert [entry[:2] for entry in shown] == [entry[:2] for entry in DEFECTS.values()]
    for (_, what, message), (_, _, says, _) in zip(shown, DEFECTS.values(), strict=True):
        assert re.search(says, message), what


@slow
def test_a_sound_setup_holds(folder: Path) -> None:
    found = checks(folder, "clean")
    bad = {name: check["measurements"] for name, check in found.items() if check["verdict"] != "holds"}
    assert bad == {}
    named = {entry["what"] for check in found.values() for entry in check["measurements"]}
    assert {"generation prompt", "end of a turn", "stop ids of the engine", "values alone and packed", "labelled answers, math"} <= named
    assert (folder / "clean" / "certificate.html").read_text().count("<h2") == len(found) + 2
    assert not (folder / "clean" / ".scratch").exists()


@slow
def test_a_sound_setup_holds_in_pipeline_stages(folder: Path) -> None:
    """Each sample counts once, although both stages have it, and replicas that sample the same tokens count as one."""
    found = checks(folder, "pipelined")
    assert {name: check["measurements"] for name, check in found.items() if check["verdict"] != "holds"} == {}
    sampled = "mean |dlogp|, sampled tokens at T = 1, the recipe's weights"
    counts = [measurement(checks(folder, case), "engine", sampled)["measured"].split()[-2] for case in ("clean", "pipelined")]
    assert counts[0] == counts[1] and int(counts[0]) <= 16 * 40


@slow
@pytest.mark.parametrize("case", DEFECTS)
def test_a_planted_defect_is_found_and_named(folder: Path, case: str) -> None:
    found_and_named(folder, case)


def found_and_named(folder: Path, case: str) -> None:
    check, what, says, remedy = DEFECTS[case]
    found = checks(folder, case)[check]
    verdict = "warning" if check == "rates" else "fails"  # a slow device computes the right numbers
    assert found["verdict"] == verdict
    entry = next(entry for entry in found["measurements"] if entry["what"] == what)
    assert entry["verdict"] == verdict
    assert re.search(says, entry["measured"]), entry["measured"]
    assert remedy in entry["remedy"]


@slow
@pytest.mark.parametrize(("case", "transformers"), [("categorical_critic", "holds"), ("mlp_critic", "not applicable")])
def test_critics_with_a_categorical_and_a_two_layer_head_hold(folder: Path, case: str, transformers: str) -> None:
    """transformers computes the expectation of a categorical head; it has no token classifier with a head of two layers."""
    found = checks(folder, case)["critic"]
    verdicts = {entry["what"]: entry["verdict"] for entry in found["measurements"]}
    theirs = {verdict for what, verdict in verdicts.items() if "transformers" in what}
    assert theirs == {transformers}
    assert verdicts.pop("values after head-only training") == "not applicable"  # known for a linear head of one output alone
    assert {verdict for what, verdict in verdicts.items() if "transformers" not in what} == {"holds"}
    assert len(verdicts) == 6


@slow
def test_a_critic_in_another_layout_holds(folder: Path) -> None:
    found = checks(folder, "critic_layout")
    assert {name: entry["verdict"] for name, entry in found.items()} == dict.fromkeys(
        ("invariance", "offload", "resume", "critic"), "holds"
    )


@slow
def test_a_sound_importance_correction_holds(folder: Path) -> None:
    found = checks(folder, "corrected")
    assert measurement(found, "invariance", "importance weight")["measured"] == "1.0253"
    assert found["invariance"]["verdict"] == measurement(found, "invariance", "importance weight in the loss")["verdict"] == "holds"


@slow
def test_against_names_what_differs_first(folder: Path) -> None:
    """Weights spoiled in the trainer: the layer, then the positions; the sound certificate knows where they were."""
    checks(folder, "swapped_rows")
    output = (folder / "swapped_rows" / "output.txt").read_text()
    compared = output.split("compared with ")[1]
    assert compared.splitlines()[1].startswith("  first: layers (float32): layer 1 is the first whose hidden states are further")
    assert "positions: log-prob of the trainer at text 0, token" in compared
    assert "verdict: trainer: holds -> fails" in compared


@slow
def test_what_does_not_apply_is_not_passed(folder: Path) -> None:
    found = checks(folder, "no_critic")
    assert found["critic"]["verdict"] == "not applicable"
    assert found["critic"]["measurements"][0]["measured"] == "because the estimator dr_grpo has no critic"
    own = {name.rpartition(":")[2]: check for name, check in found.items()}
    assert own["raising"]["verdict"] == own["empty"]["verdict"] == "fails"
    assert "ValueError: no such thing" in own["raising"]["measurements"][0]["measured"]
    assert "a check returns a Measurement or a list" in own["empty"]["measurements"][0]["measured"]


@slow
def test_what_cannot_be_measured_says_why(folder: Path) -> None:
    """An engine that cannot be built, data without a row: the checks that need them fail with the reason, the others measure."""
    found = checks(folder, "no_engine")
    assert found["engine"]["verdict"] == "fails"
    assert found["engine"]["measurements"][0]["measured"] == "could not be measured: rollout.engine: no such engine here"
    stop = measurement(found, "folder", "stop ids of the engine")
    assert (stop["verdict"], stop["measured"]) == (
        "not applicable",
        "because the rollout engine cannot be built: rollout.engine: no such engine here",
    )
    assert measurement(found, "rates", "rollout engine")["verdict"] == "fails"
    assert measurement(found, "rates", "log-probs")["verdict"] == "information"
    found = checks(folder, "no_data")
    assert {name: check["verdict"] for name, check in found.items()} == dict.fromkeys(found, "fails")
    said = {entry["measured"] for check in found.values() for entry in check["measurements"] if entry["verdict"] == "fails"}
    assert len(said) == 2 and all("empty.jsonl" in text for text in said)


def measurement(found: dict[str, Any], check: str, what: str) -> dict[str, Any]:
    return next(entry for entry in found[check]["measurements"] if entry["what"] == what)


@slow
def test_one_rank_leaves_out_what_takes_two(folder: Path) -> None:
    found = checks(folder, "one_rank")
    assert found["invariance"]["verdict"] == "holds" and found["rates"]["verdict"] == "information"
    for check, what in (("invariance", "another layout"), ("rates", "all-reduce (gloo)")):
        entry = measurement(found, check, what)
        assert (entry["verdict"], entry["measured"]) == ("not applicable", "because there is one rank")


@slow
def test_rates_stand_beside_plan_and_are_options_for_it(folder: Path) -> None:
    found = checks(folder, "rates")["rates"]
    assert found["verdict"] == "information"
    values = {entry["what"]: entry["value"] for entry in found["measurements"]}
    assert all(values.pop(name) > 0 for name in list(values) if name != "options for vapo-mcore plan")
    options = measurement({"rates": found}, "rates", "options for vapo-mcore plan")["measured"].split()
    rates = [text for flag, text in pairwise(options) if flag == "--rate"]
    names = {text.partition("=")[0] for text in rates}
    assert names == {"node_rate", "host_rate", "forward_efficiency", "train_efficiency", "decode_overhead", "memory_efficiency"}
    assert choose_device("cpu", rates).node_rate == pytest.approx(found["details"]["options"]["node_rate"], rel=1e-3)
    assert options[:2] == ["--device", "cpu"]


@slow
def test_it_runs_to_its_end_on_fake_cuda_devices(tmp_path: Path) -> None:
    """All checks, from the command line, with offloading; the fake device records kernels and copies that real ones would get wrong."""
    folder = write_certify_setup(tmp_path)
    settings = ("parallel.world_size=1", "model.offload=true", f"run.dir={folder / 'fake'}")
    done = run_command("certify", str(folder / "base.yaml"), *settings, timeout=600, fake_cuda=True)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-6000:]
    found = measured(folder / "fake_certificate")
    assert list(found) == list(BUILT_IN)
    verdicts = {name: check["verdict"] for name, check in found.items()}
    assert verdicts.pop("machine") in ("holds", "warning")  # packages of a machine without CUDA
    assert verdicts.pop("rates") == "information"
    assert set(verdicts.values()) == {"holds"}
    assert "plan does not know this device" in measurement(found, "rates", "log-probs")["measured"]


@slow
def test_vllm_holds_what_the_trainer_has(tmp_path: Path) -> None:
    """Two replicas of the real vLLM, from the command line. On CPUs its parameters cannot be read: distributions compare them."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = write_certify_setup(tmp_path)
    settings = ("rollout.engine=vllm", "rollout.vllm.kv_cache_gib=0.0625", f"run.dir={folder / 'vllm'}")
    command = [sys.executable, "-m", "vapo_mcore.cli", "certify", str(folder / "base.yaml"), *settings, "--checks", "folder,engine,rates"]
    done = run_bounded(command, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    found = measured(folder / "vllm_certificate")
    assert {name: check["verdict"] for name, check in found.items()} == {"folder": "holds", "engine": "holds", "rates": "information"}
    for which in ("the recipe's weights", "perturbed weights"):
        assert (
            "equal checksums; the engine's own parameters are not readable"
            in measurement(found, "engine", f"weight sync, {which}")["measured"]
        )
        assert measurement(found, "engine", f"KL of full distributions, {which}")["verdict"] == "holds"
    assert measurement(found, "rates", "generation")["value"] > 0
