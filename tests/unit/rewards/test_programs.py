"""The code verifier: every form of tests, and programs that hang, grow, flood, or reach for what is not theirs."""

import json
import os
import time

import pytest

from vapo_mcore.rewards import GradeItem, UngradableError, VerifierPool, limits
from vapo_mcore.rewards.programs import code, program_of, read_tests
from vapo_mcore.rewards.sandbox import MAX_OUTPUT_BYTES, run_program

METHOD = json.dumps({"inputs": ["[1]"], "outputs": [[[1], True]], "fn_name": "f"})
ADD = json.dumps({"inputs": ["1 2\n", "30\n4"], "outputs": ["3\n", "34"]})


def block(program: str) -> str:
    return f"So:\n```python\n{program}\n```\n"


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    monkeypatch.setattr(limits, "grading_seconds", 60.0)


@pytest.mark.parametrize(
    ("program", "truth", "score"),
    [
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')", ADD, 1.0),
        ("print(3)", ADD, 0.0),
        ("print(int(input()))", ADD, 0.0),
        ("def f(:", ADD, 0.0),
        ("def f(a, b):\n    return a + b", json.dumps({"inputs": [[1, 2], [0.1, 0.2]], "outputs": [3, 0.3], "fn_name": "f"}), 1.0),
        (
            "class Solution:\n    def f(self, a):\n        return a, True",
            json.dumps({"inputs": ["[1]"], "outputs": [[[1], True]], "fn_name": "f"}),
            1.0,
        ),
        ("def f(a):\n    return 1", json.dumps({"inputs": [[1]], "outputs": [True], "fn_name": "f"}), 0.0),
        ("def f(a):\n    return [1, 2]", json.dumps({"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}), 0.0),
        ("def g(a):\n    return 1", json.dumps({"inputs": [[1]], "outputs": [1], "fn_name": "f"}), 0.0),
        ("def f(a):\n    return 2 * a", json.dumps(["assert f(1) == 2", "assert f(2) == 4"]), 1.0),
        ("def f(a):\n    return 2", "def check(c):\n    assert c(1) == 2\n    assert c(2) == 4\ncheck(f)", 0.0),
        ("import os\nos._exit(0)", "assert f(1) == 2", 0.0),
        ("import sys\nsys.exit(0)", "assert f(1) == 2", 0.0),
    ],
)
def test_verdicts(program, truth, score):
    assert code(block(program), truth, {}) == score


def test_the_program_of_a_response():
    assert program_of("```\na\n```\nthen\n```py\nb\n```\n```json\n{}\n```") == "b\n"
    assert program_of("```python\na\n```\n```python\nb") is None  # cut off inside its last block
    assert program_of("print(1)") is None
    assert code("print(3)", ADD, {}) == 0.0


@pytest.mark.parametrize(
    "truth", ["", "{", "[]", "3", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}', "print(1)", "def f(:", '[1, "a"]']
)
def test_a_truth_without_tests_is_no_verdict(truth):
    with pytest.raises(UngradableError):
        read_tests(truth)


REACHES = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "fork": "import os; os.fork()",
    "thread group": "import ctypes; assert ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0; raise OSError",
    "program": "import subprocess; subprocess.run(['true'])",
    "write": "open('/tmp/vapo_mcore_written', 'w')",
    "delete": "import os; os.unlink(MINE)",
    "permissions": "import os; os.chmod(MINE, 0o777)",
    "kill": "import os; os.kill(os.getppid(), 0)",
    "kill all": "import os; os.kill(-1, 0)",
    "own limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "memory of others": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
}


def test_what_a_program_cannot_do(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    program = f"MINE = {str(mine)!r}\nfor name, attempt in {REACHES!r}.items():\n"
    program += "    try:\n        exec(attempt)\n    except (OSError, ValueError):\n        print(name)"
    assert run_program({"program": program}, "", 60.0).stdout.decode().splitlines() == list(REACHES)
    assert (mine.read_text(), mine.stat().st_mode & 0o777 != 0o777, os.path.exists("/tmp/vapo_mcore_written")) == ("mine", True, False)


def test_files_outside_python_are_not_read_where_the_kernel_has_landlock(tmp_path):
    (tmp_path / "answers").write_text("secret")
    outcome = run_program({"program": f"print(open({str(tmp_path / 'answers')!r}).read())", "report": True}, "", 60.0)
    restricted = json.loads(outcome.results)["reading_restricted"]
    assert (b"secret" in outcome.stdout) == (not restricted)


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(100)", "while True: print('x' * 1000)", "x = bytearray(2**31)", "def f(): f()\nf()"],
)
def test_programs_without_an_end_are_wrong_in_time(program, monkeypatch):
    monkeypatch.setattr(limits, "grading_seconds", 0.7)
    start = time.monotonic()
    assert code(block(program), ADD, {}) == 0.0
    assert time.monotonic() - start < 5.0


def test_output_is_not_kept_beyond_its_limit():
    outcome = run_program({"program": "import sys\nwhile True: sys.stdout.write('x' * 100000)"}, "", 60.0)
    assert not outcome.finished
    assert len(outcome.stdout) < 2 * MAX_OUTPUT_BYTES


@pytest.mark.slow
def test_in_the_pool_a_program_that_hangs_is_wrong_and_not_ungraded():
    items = [GradeItem("code", block(program), ADD) for program in ("print(sum(map(int, open(0).read().split())))", "while True: pass")]
    with VerifierPool(1, 5.0) as pool:
        verdicts = pool.grade([*items, items[0]])
        assert [(verdict.correct, verdict.error) for verdict in verdicts] == [(True, None), (False, None), (True, None)]
        assert (pool.stats.graded, pool.stats.cached) == (2, 1)
