"""A user's task and reward, and the example's."""

import pytest

from tests.torchrun import ROOT
from tests.unit.config_helpers import faults_of, load, write_base
from vapo_mcore.config import load_config
from vapo_mcore.config.schema import CustomSource, DataConfig
from vapo_mcore.data.sources import Faults, check_files, read_source
from vapo_mcore.errors import ConfigError, DataError
from vapo_mcore.experience.extension_checks import check_extensions
from vapo_mcore.rewards import GradeItem, VerifierPool

EXAMPLE = f"{ROOT}/examples/extensions/arithmetic.py"
TASKS = """
def endless(*, first=1):
    number = first
    while True:
        yield {"prompt": f"{number}?", "answer": number, "square": number * number}
        number += 1

def faulty():
    yield {"prompt": "a", "answer": "b"}
    yield {"prompt": "a"}
    yield ["a", "b"]
    raise RuntimeError("no more")

def none():
    return []

def nothing():
    return None

def reward(response, ground_truth, metadata):
    return 1.0 if response == str(metadata["square"]) else 0.0

def needs_two(response, ground_truth):
    return 1.0
"""


@pytest.fixture
def mine(tmp_path) -> str:
    (tmp_path / "tasks.py").write_text(TASKS)
    return str(tmp_path / "tasks.py")


def data_of(function: str, **changes) -> DataConfig:
    source = {"kind": "custom", "function": function, "verifier": "exact"} | changes
    return DataConfig.model_validate({"train": [source], "max_prompt_length": 8, "chat_template": False})


def test_rows_become_problems(mine):
    data = data_of(f"{mine}:endless", size=3, options={"first": 5})
    faults = Faults()
    problems = read_source(data.train[0], data, faults)
    assert not faults.count
    assert [(p.problem_id, p.prompt, p.ground_truth, p.metadata) for p in problems] == [
        ("endless/1", "5?", "5", {"square": 25}),
        ("endless/2", "6?", "6", {"square": 36}),
        ("endless/3", "7?", "7", {"square": 49}),
    ]


def test_every_faulty_row_is_told(mine):
    with pytest.raises(DataError) as caught:
        check_files(data_of(f"{mine}:faulty"))
    lines = str(caught.value).split("\n  ")
    assert lines[0].startswith("3 faults in the data")
    assert "row 2, field 'answer': missing" in lines[1]
    assert "row 3: a row must be a dict with named fields, got a list" in lines[2]
    assert "row 4: failed: RuntimeError: no more" in lines[3] and "tasks.py, line 12" in lines[3]


@pytest.mark.parametrize(("name", "message"), [("none", "has no rows"), ("nothing", "must return rows .*, got null")])
def test_functions_without_rows(mine, name, message):
    with pytest.raises(DataError, match=message):
        check_files(data_of(f"{mine}:{name}"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("endless", {"frst": 5}, "tasks.py:endless: has no option 'frst': its options are first"),
        ("reward", {}, "tasks.py:reward: asks for 'response', which does not exist"),
        ("absent", {}, "has no function 'absent'; it defines endless, faulty, needs_two"),
    ],
)
def test_functions_that_cannot_be_called(mine, name, options, message):
    with pytest.raises(DataError, match="data") as caught:
        check_files(data_of(f"{mine}:{name}", options=options, size=3))
    assert message in str(caught.value)


def test_the_example_s_task_is_the_same_every_time():
    data = data_of(f"{EXAMPLE}:repeated_sums", options={"count": 50, "seed": 3})
    first, second = (read_source(data.train[0], data, Faults()) for _ in range(2))
    assert first == second and len({p.prompt for p in first}) > 40
    letters, problem = "_abcdefghijklmn", first[0]
    times, addend, start = letters.index(problem.prompt[2]), int(problem.prompt[4:6]), int(problem.prompt[7:10][::-1])
    assert int(problem.ground_truth) == start + times * addend and problem.metadata["times"] == times


def test_verifiers_of_a_file_grade_in_the_pool(mine):
    verdicts = []
    with VerifierPool(1, 5.0) as pool:
        items = [("reward", "36", {"square": 36}), ("reward", "6", {"square": 36})]
        verdicts += pool.grade([GradeItem(f"{mine}:{name}", text, "6", metadata) for name, text, metadata in items])
        texts = (r"\boxed{123}", r"\boxed{999}", r"\boxed{12}", "123")
        verdicts += pool.grade([GradeItem(f"{EXAMPLE}:nearly_right", text, "123", {}) for text in texts])
    assert [v.score for v in verdicts] == [1.0, 0.0, 1.0, 0.2, 0.0, 0.0]
    assert [v.correct for v in verdicts] == [True, False, True, False, False, False] and not any(v.error for v in verdicts)


def test_a_verifier_that_cannot_be_called_is_refused_before_a_model_loads(mine, tmp_path):
    write_base(tmp_path)
    config = load(tmp_path, f"data.train.0.verifier={mine}:needs_two")
    with pytest.raises(
        ConfigError, match=r"data.train.0.verifier: .*needs_two' cannot be called with \(response, ground_truth, metadata\)"
    ):
        check_extensions(config)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("data.train.0.verifier=absent.py:f", "data.train.0.verifier: no such file: 'absent.py'"),
        ("data.train.0={kind: custom, function: absent.py:f, verifier: exact}", "data.train.0.function: no such file: 'absent.py'"),
        ("data.train.0={kind: custom, function: tasks, verifier: exact}", "data.train.0.function: 'tasks' must be a reference"),
        (
            "algorithm.loss_terms=[{name: a, function: absent.py:f, coef: 1.0}]",
            "algorithm.loss_terms.0.function: no such file: 'absent.py'",
        ),
        ("algorithm.loss_terms=[{name: a, function: a.b:f, coef: 0.0}]", "algorithm.loss_terms.0.coef: 0 leaves the term without effect"),
        ("algorithm.loss_terms=[{name: a, function: a.b:f}]", "algorithm.loss_terms.0.coef: is required"),
        (
            "algorithm.loss_terms=[{name: a, function: a.b:f, coef: 1.0, option: {}}]",
            "algorithm.loss_terms.0.option: unknown key; did you mean",
        ),
        ("algorithm.loss_terms=[{name: a, function: a:f, coef: 1.0}, {name: a, function: a:g, coef: 1.0}]", "several terms are named 'a'"),
        ("algorithm.advantage.custom={function: a.b:f}", "algorithm.advantage.custom.function: 'a.b:f' has no effect with"),
        ("algorithm.advantage={estimator: custom, lambda_critic: 0.9, custom: {function: a:f}}", "lambda_critic: 0.9 has no effect with"),
        (
            "algorithm.advantage={estimator: custom, lambda_policy: {alpha: 0.9}, custom: {function: a:f, critic: true}}",
            "reads its own options instead",
        ),
    ],
)
def test_faults_of_the_configuration(tmp_path, override, fault):
    write_base(tmp_path)
    (line,) = faults_of(tmp_path, override)
    assert fault in line


def test_the_estimator_must_be_named(tmp_path):
    write_base(tmp_path)
    (line,) = faults_of(tmp_path, "algorithm.advantage.estimator=custom")
    assert line.startswith("algorithm.advantage.custom: is required with")


def test_a_source_is_named_after_its_function():
    assert CustomSource(kind="custom", function="x.py:my_task", verifier="exact").name == "my_task"


def test_the_example_s_configuration_is_sound(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("examples/configs/extensions.yaml", check_paths=False)
    check_extensions(config)
    assert config.algorithm.advantage.estimator == "custom" and not config.uses_critic
