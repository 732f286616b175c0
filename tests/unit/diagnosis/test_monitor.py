"""The rules in the loop: counts, repeats, stages, what ends a run, and a history that is restored."""

import ast
import inspect
import json
from types import SimpleNamespace

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import faults_of, load, write_base
from tests.unit.trainer.rollouts import make_config
from vapo_mcore.config.verifiers import UNGRADED
from vapo_mcore.diagnosis import monitor, rules
from vapo_mcore.diagnosis.monitor import REPEATED_EVERY, Monitor
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.stopping import StopRequests

FAILING = {"grading/failed": 1, "response/count": 4}


def step(number: int, stage: str = "rl", **row) -> dict:
    return {"step": number, "stage": stage} | row


def config_with(**diagnosis):
    config = make_config()
    return config.model_copy(update={"diagnosis": type(config.diagnosis)(**diagnosis)})


def test_counts_and_repeats():
    watching = Monitor(make_config())
    told = []
    for number in range(1, 2 * REPEATED_EVERY + 2):
        (finding,) = watching.observe(step(number, **FAILING))
        assert finding.name == "grader_failures" and finding.in_a_row == number
        if finding.is_due:
            told.append(number)
    assert told == [1, 1 + REPEATED_EVERY, 1 + 2 * REPEATED_EVERY]
    assert watching.metrics() == {"diagnosis/grader_failures": 2 * REPEATED_EVERY + 1}
    assert watching.observe(step(22)) == [] and watching.observe(step(23, **FAILING))[0].is_due


def test_the_sentence_has_evidence_meaning_and_remedy():
    (finding,) = Monitor(make_config()).observe(step(1, **FAILING))
    assert str(finding).startswith("grader_failures: 1 of 4 responses had no verdict in step 1 and were left out: a grader crashed")
    assert "Usual remedy: see the errors in samples/" in str(finding)


def test_stages_have_histories_of_their_own():
    watching = Monitor(make_config())
    for number in range(1, 12):
        assert watching.observe(step(number, "value_pretraining", **{"critic/explained_variance": -1.0})) == []
    assert watching.observe(step(1, **{"critic/explained_variance": -1.0})) == []
    assert watching.observe(step(12, "value_pretraining", **FAILING))[0].name == "grader_failures"
    assert watching.observe({"step": 0, "stage": "rl", "eval/x/avg@1": 0.5}) == []


def test_a_rule_that_is_switched_off_is_not_watched():
    assert Monitor(config_with(grader_failures=None)).observe(step(1, **FAILING)) == []


def test_halting_rules_end_the_run():
    watching = Monitor(config_with(halt_on=["grader_failures"]))
    assert watching.ends_the_run(watching.observe(step(1))) is None
    fatal = watching.ends_the_run(watching.observe(step(2, **FAILING)))
    assert fatal is not None and fatal.name == "grader_failures"
    quiet = Monitor(make_config())
    assert quiet.ends_the_run(quiet.observe(step(1, **FAILING))) is None


def rows_of(watching: Monitor, numbers) -> list:
    return [
        [str(f) for f in watching.observe(step(n, **{"critic/explained_variance": -0.1, "mismatch/logprob_abs_mean": 1e-7 * n**5, "x": 1}))]
        for n in numbers
    ]


def test_a_restored_history_goes_on_as_if_never_interrupted():
    whole = Monitor(make_config())
    expected = rows_of(whole, range(1, 30))
    interrupted = Monitor(make_config())
    first = rows_of(interrupted, range(1, 16))
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = Monitor(make_config())
    resumed.load_state_dict(state)
    assert first + rows_of(resumed, range(16, 30)) == expected and any(expected)
    assert resumed.metrics() == whole.metrics() != {}
    assert len(state["rows"]["rl"]) == 15 and all("x" not in row for row in state["rows"]["rl"]), "only what rules read is kept"
    assert len(interrupted.state_dict()["rows"]["rl"]) == 15, "a state that was taken does not grow with the run"


def test_rules_read_nothing_that_the_history_drops():
    """Every key that the source of the rules spells out is kept."""
    texts = {n.value for n in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    sections = {metric.name.split("/")[0] for metric in METRICS if "/" in metric.name}
    spelled = {text for text in texts if "/" in text and " " not in text and text.split("/")[0] in sections}
    spelled -= {"policy/clip_frac_", "grading/failed_", "groups/all_"}  # parts of names
    spelled |= {f"grading/failed_{cause}" for cause in UNGRADED}
    spelled |= {f"policy/clip_frac_{side}" for side in ("high", "low")} | {f"groups/all_{kind}_frac" for kind in ("right", "wrong")}
    spelled |= {f"{role}/{name}" for role in ("policy", "critic") for name in ("updates", "updates_skipped", "minibatches_masked")}
    assert spelled - monitor._READ == set() and len(spelled) > 15


def finish(trainer_config, row, monkeypatch):
    """StepRunner._finish on a row as if it had been reduced, without models."""
    from vapo_mcore.trainer import step as step_module

    monkeypatch.setattr(step_module, "record_time_and_memory", lambda metrics, timer: None)
    monkeypatch.setattr(StepMetrics, "reduce", lambda self, group, device: dict(row))
    trainer = SimpleNamespace(
        models=SimpleNamespace(policy=None, critic=None, critic_updates=0),
        parallel=SimpleNamespace(data_parallel_group=None, device="cpu"),
        diagnosis=Monitor(trainer_config),
        stop_requests=StopRequests(),
        config=trainer_config,
    )
    outcome = step_module.StepRunner._finish(trainer, step_module.StepState("rl", 1, StepMetrics(step_module.metrics_of(()))))
    return outcome, trainer.stop_requests.agreed()


def test_a_step_counts_its_findings_and_asks_to_stop(monkeypatch):
    row = step(1, **FAILING) | {"tokens/total": 10, "time/step": 2.0}
    outcome, request = finish(make_config(), row, monkeypatch)
    assert outcome.row["warnings"] == 1 and outcome.row["diagnosis/grader_failures"] == 1 and len(outcome.warnings) == 1
    assert request is None
    outcome, request = finish(config_with(halt_on=["grader_failures"]), row, monkeypatch)
    assert request.reason.startswith("diagnosis.halt_on: grader_failures: 1 of 4") and request.exit_code == 2


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("diagnosis.halt_on=[entropy]", "diagnosis.halt_on.0: 'entropy' must be"),
        ("diagnosis.entropy_colapse.fraction=0.2", "unknown key; did you mean 'entropy_collapse'"),
        ("diagnosis.value_loss_rising.rise=1.0", "diagnosis.value_loss_rising.rise: 1.0 must be > 1"),
        ("diagnosis.lambda_zero.above=1.5", "must be <= 1"),
    ],
)
def test_faults_of_the_configuration(tmp_path, override, fault):
    write_base(tmp_path)
    (line,) = faults_of(tmp_path, override)
    assert fault in line


def test_rules_can_be_switched_off_and_halt(tmp_path):
    write_base(tmp_path)
    config = load(tmp_path, "diagnosis.clip_fraction=null", "diagnosis.halt_on=[stale_weights, entropy_collapse]")
    assert config.diagnosis.clip_fraction is None and config.diagnosis.halt_on == ("stale_weights", "entropy_collapse")


def test_the_page_names_every_rule_with_its_thresholds():
    page = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    for rule in rules.RULES:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{rule.name}` |")]
        assert row.removesuffix(" |").split(" | ")[2:] == [rule.means, rule.remedy], rule.name


def recorded(name: str) -> list[dict]:
    """Rows of a real run of the quickstart's model, the columns that rules read."""
    return [json.loads(line) for line in (ROOT / "tests" / "cases" / "diagnosis" / f"{name}.jsonl").read_text().splitlines()]


def test_of_a_healthy_run_of_the_quickstart_only_its_blind_critic_is_named():
    config = make_config()
    watching = Monitor(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})}))
    found = {finding.name for row in recorded("healthy") for finding in watching.observe(row)}
    assert found == {"critic_stuck"}  # explained variance -0.05 to 0.16: the task's own ceiling is low
    assert watching.context.dtype == "float32"


def test_a_real_collapse_is_named():
    """The same with alpha = 0.05: of 40 tokens, advantages reach over two. The run shrank to short wrong answers."""
    watching = Monitor(make_config())
    found = [(row["step"], finding.name) for row in recorded("collapse") for finding in watching.observe(row) if finding.in_a_row == 1]
    assert found == [(17, "length_collapse"), (18, "lambda_zero")]
