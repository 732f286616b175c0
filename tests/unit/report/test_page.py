"""What the page is given: charts that exist, responses chosen, notes, and text that cannot leave its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.report.test_read import write_run
from tests.unit.trainer.rollouts import make_config
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.report import notes, samples
from vapo_mcore.report.charts import SECTIONS, sections
from vapo_mcore.report.page import embedded, page_data
from vapo_mcore.report.read import RunData, read_runs
from vapo_mcore.report.series import HISTOGRAMS, PROFILES

COLLAPSE = Path(__file__).parents[2] / "cases" / "diagnosis" / "collapse.jsonl"


def make_run(**parts: Any) -> RunData:
    empty = {"rows": [], "settings": {}, "finished": False, "samples": [], "sample_files": (0, 0), "evaluated": {}}
    return RunData(**({"name": "run", "path": Path("runs/run")} | empty | parts))


def sample(step: int, reward: float, length: int, **more: Any) -> dict[str, Any]:
    facts = {"prompt_id": f"set/{step}#0", "sample_index": 0, "correct": reward > 0, "error": None, "prompt": "q", "response": "r" * length}
    return {"step": step, "stage": "rl", "reward": reward, "response_length": length} | facts | more


def test_every_chart_reads_metrics_of_the_table() -> None:
    table = {metric.name for metric in METRICS}
    drawn = {name for section in SECTIONS for chart in section.charts for name in chart.metrics}
    assert drawn <= table
    assert set(HISTOGRAMS) | {f"critic/{what}_by_{by}" for by in PROFILES for what in ("values", "returns", "tokens")} <= table
    last = sections(table | {"mine/own", "eval/set/avg@2"})[-1]
    assert last["folded"] and {chart["title"] for chart in last["charts"]} == (table - drawn) | {"mine/own"}


def test_the_horizon_has_a_section_in_runs_that_have_one() -> None:
    plain = ["reward/mean", "generate/empty_frac", "sampling/tokens"]
    found = sections(plain)
    assert "Horizon" not in [section["title"] for section in found]
    assert {chart["title"] for chart in found[-1]["charts"]} == {"generate/empty_frac", "sampling/tokens"}
    titles = {section["title"]: [chart["title"] for chart in section["charts"]] for section in sections([*plain, "horizon/open"])}
    assert {"Open and ended responses", "Segments", "Idle replicas and empty slots", "Ages of tokens", "Calibration at cuts"} <= set(
        titles["Horizon"]
    )


def test_text_cannot_end_the_script_it_stands_in() -> None:
    text = "</script><script>alert(1)</script><!--\u2028 & \U0001f600 \udc80"
    found = embedded({"response": text, "number": 0.5})
    assert not set("<>&\u2028") & set(found)
    assert json.loads(found) == {"response": text, "number": 0.5}
    found.encode("utf-8")


def test_best_worst_longest_and_latest() -> None:
    rewards = [1, 0, 1, -1, 0, 1, 1, 1, 1]
    found = [sample(step, reward, 10 - step) for step, reward in enumerate(rewards, 1)]
    found.append(sample(10, 9.0, 50, error="no verdict"))
    chosen = samples.chosen_samples(make_run(samples=found), 1)
    steps = {kind: [chosen["records"][number]["step"] for number in numbers] for kind, numbers in chosen["kinds"].items()}
    assert steps == {
        "best": [9, 8, 7, 6, 3],
        "worst": [4, 5, 2, 9, 8],
        "longest": [10, 1, 2, 3, 4],
        "latest": [10, 9, 8, 7, 6],
        "changed": [],
    }
    assert len({record["step"] for record in chosen["records"]}) == len(chosen["records"])  # each once


def test_changed_verdicts_are_of_the_same_problem_and_sample() -> None:
    def item(number: int, correct: bool, index: int = 0, **more: Any) -> dict[str, Any]:
        return sample(0, 0.0, 1, prompt_id=f"set/{number}#0", sample_index=index, correct=correct) | more

    before = [item(1, True), item(2, False), item(3, False), item(4, True), item(5, True), item(2, True, index=1)]
    after = [item(3, True), item(1, True), item(2, False), item(4, False), item(2, True, index=1), item(5, False, error="lost")]
    run = make_run(evaluated={0: before, 7: after})
    pairs = [(one["prompt_id"], one["step"], other["step"], other["correct"]) for one, other in samples.changed_verdicts(run)]
    assert pairs == [("set/3#0", 0, 7, True), ("set/4#0", 0, 7, False)]
    chosen = samples.chosen_samples(run, 1)
    assert (chosen["to_right"], chosen["to_wrong"], chosen["kinds"]["changed"]) == (1, 1, [[0, 1], [2, 3]])
    assert chosen["records"][0]["correct"] and not chosen["records"][1]["correct"]  # turned wrong first


def test_of_a_long_response_both_ends_and_how_much_is_left_out() -> None:
    record = samples.shown(sample(1, 1.0, 20, tokens={"text": [str(k) for k in range(20)], "value": list(range(20))}), 10)
    assert record["tokens"]["value"] == [0, 1, 2, 3, 4, 5, 16, 17, 18, 19]
    assert record["left_out"] == [6, 10] and "response" not in record
    plain = samples.shown(sample(1, 1.0, 0, response="abc" * 30, prompt="p" * 50), 10)
    assert plain["response"] == ("abc" * 30)[:24] + ("abc" * 30)[-16:] and plain["left_out"] == [24, 50]
    assert plain["prompt"] == "p" * 24 + " [... 10 characters ...] " + "p" * 16
    assert samples.shown(sample(1, 1.0, 3), 10)["left_out"] is None


def test_no_text_of_a_sample_makes_the_page_large() -> None:
    """A ground truth may be the tests of a program, an error whatever a verifier raises."""
    huge = dict.fromkeys(("ground_truth", "error", "answer", "prompt_id", "source", "prompt", "response"), "x" * 10**6)
    record = samples.shown(sample(1, 1.0, 3, **huge), 100)
    assert len(samples_text := json.dumps(record)) < 7000, len(samples_text)
    assert record["ground_truth"] == "x" * 600 + " [... 999000 characters ...] " + "x" * 400
    assert samples.shown(sample(1, 1.0, 3, ground_truth=None), 100)["ground_truth"] is None


def test_evaluated_responses_whose_text_was_not_kept_come_last_and_say_so() -> None:
    def item(number: int, correct: bool, *, text: bool) -> dict[str, Any]:
        record = sample(0, 0.0, 1, prompt_id=f"set/{number}#0", correct=correct, answer="7")
        return record if text else {name: value for name, value in record.items() if name not in ("prompt", "response")}

    texts = {1: False, 2: True}
    chosen = samples.chosen_samples(make_run(evaluated={s: [item(n, s > 0, text=t) for n, t in texts.items()] for s in (0, 4)}), 1)
    assert [record["prompt_id"] for record in chosen["records"]] == ["set/2#0", "set/2#0", "set/1#0", "set/1#0"]
    assert chosen["records"][0]["response"] == "r"
    assert (chosen["records"][2]["response"], chosen["records"][2]["prompt"], chosen["records"][2]["answer"]) == (None, None, "7")


def test_notes_on_diagnosis_differences_and_gaps(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in COLLAPSE.read_text().splitlines()]
    folders = [write_run(tmp_path / name, rows) for name in ("one", "two", "old")]
    (folders[0] / "config.yaml").write_text(dump_yaml(make_config()))
    (folders[1] / "config.yaml").write_text(dump_yaml(make_config(policy_loss={"clip_high": 0.5})))
    (folders[2] / "config.yaml").write_text("run: {steps: 3}\nno_longer_there: 1\n")
    data = page_data(read_runs(folders), "title")
    one, _, old = data["runs"]
    names = [finding["rule"] for finding in one["diagnosis"]["findings"]]
    assert "length_collapse" in names
    collapse = one["diagnosis"]["findings"][names.index("length_collapse")]
    assert collapse["steps"] >= 1 and "response/length_mean fell" in collapse["evidence"] and collapse["remedy"]
    assert old["diagnosis"]["findings"] == [] and "no_longer_there" in old["diagnosis"]["failure"]
    differing = {key: values for key, *values in data["differences"]}
    assert differing["algorithm.policy_loss.clip_high"] == ["0.28", "0.5", "-"]
    assert "run.dir" not in differing and "algorithm.policy_loss.clip_low" in differing  # the old one has none
    (gaps, *others) = one["missing"]
    assert "By position" in gaps and "Explained variance" not in gaps
    assert any("No evaluation" in text for text in others) and any("No sampled responses" in text for text in others)


def test_the_summary_of_a_run() -> None:
    rows = [{"step": 0, "stage": "rl", "eval/set/avg@2": 0.25, "eval/set/ci_low": 0.1, "eval/set/ci_high": 0.4}]
    rows += [{"step": step, "stage": "rl", "reward/mean": step / 10} for step in range(1, 4)]
    rows[-1] |= {"eval/set/avg@2": 0.5, "eval/set/ci_low": 0.4, "eval/set/ci_high": 0.6}
    found = notes.summary(make_run(rows=rows, settings={"run": {"steps": 9}}))
    assert (found["steps"], found["planned"], found["window"], found["ends"]["accuracy/mean"]) == (3, 9, 3, None)
    assert found["evaluations"] == {"set avg@2": [[0, 0.25, 0.1, 0.4], [3, 0.5, 0.4, 0.6]]}
