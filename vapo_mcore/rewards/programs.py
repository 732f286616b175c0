"""The ``code`` verifier: run the program in a response against tests, in a restricted process (``sandbox``)."""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from vapo_mcore.errors import RewardError
from vapo_mcore.rewards import limits
from vapo_mcore.rewards.sandbox import run_program
from vapo_mcore.rewards.types import UngradableError

_SHARE_OF_TIME = 0.8
"""Fraction of ``reward.timeout_seconds`` for all tests of a response; a program that takes longer is wrong, not ungraded."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


_PROBE = """
import os, socket
held = 0
for attempt in (socket.socket, lambda: open("/tmp/vapo_mcore_probe", "w"), os.fork, lambda: os.kill(1, 0), lambda: os.unlink("/tmp/x")):
    try:
        attempt()
    except PermissionError:
        held += 1
print(held)
"""


@dataclass(frozen=True)
class Tests:
    """Tests of a program: inputs with outputs (stdin and stdout or, with ``function``, arguments and results), or Python ``assertions``."""

    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()
    function: str | None = None
    assertions: str | None = None


def code(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """Return 1 if the program in the response's last Python code block passes all tests of the ground truth, else 0.

    Raises:
        UngradableError: the ground truth holds no tests (see :func:`read_tests`).
    """
    tests = read_tests(ground_truth)
    program = program_of(response)
    if program is None or "\0" in program:
        return 0.0
    deadline = time.monotonic() + _SHARE_OF_TIME * limits.grading_seconds
    if tests.assertions is not None:
        return float(_passes_assertions(program, tests.assertions, deadline))
    if tests.function is not None:
        return float(_passes_calls(program, tests, deadline))
    return float(all(_passes_stdin(program, *pair, deadline) for pair in zip(tests.inputs, tests.outputs, strict=True)))


def program_of(response: str) -> str | None:
    """Return the last code block fenced by ``` that is Python or names no language; None if there is none or it is truncated."""
    blocks = [match for match in _FENCE.finditer(response) if match[1].lower() in _PYTHON]
    if not blocks or not blocks[-1][0].rstrip().endswith("```"):
        return None
    return blocks[-1][2]


@lru_cache(maxsize=256)
def read_tests(ground_truth: str) -> Tests:
    """Parse the tests of common data sets.

    Accepts JSON ``{"inputs": [...], "outputs": [...], "fn_name": ...}`` (APPS, TACO), a JSON list of ``{"input": ..., "output": ...}``, a
    JSON list of assertions (MBPP), or Python code with assertions (HumanEval, including the call).

    Raises:
        UngradableError: the text has another form or contains no test.
    """
    try:
        value = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return _assertions(ground_truth)
    if isinstance(value, list) and value and all(isinstance(test, str) for test in value):
        return _assertions("\n".join(value))
    if isinstance(value, list) and value and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in value):
        value = {"inputs": [test["input"] for test in value], "outputs": [test["output"] for test in value]}
    if not isinstance(value, dict) or not isinstance(value.get("inputs"), list) or not isinstance(value.get("outputs"), list):
        raise UngradableError("the ground truth of a program must be tests: inputs with outputs, or assertions")
    inputs, outputs, function = value["inputs"], value["outputs"], value.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise UngradableError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if function is None:
        return Tests([_as_text(text) for text in inputs], [_as_text(text) for text in outputs])
    return Tests([_as_arguments(text) for text in inputs], outputs, str(function))


def _assertions(text: str) -> Tests:
    try:
        compile(text, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UngradableError(f"the tests are neither JSON nor Python: {error}") from None
    if "assert" not in text:
        raise UngradableError("the tests assert nothing")
    return Tests(assertions=text)


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _as_arguments(value: Any) -> list[Any]:
    """Return a list of arguments, given as a list or as lines of JSON, one per argument."""
    if isinstance(value, list):
        return value
    try:
        return [json.loads(line) for line in str(value).splitlines()]
    except ValueError as error:
        raise UngradableError(f"the arguments {str(value)[:60]!r} are neither a list nor lines of JSON: {error}") from None


def _passes_stdin(program: str, stdin: str, expected: str, deadline: float) -> bool:
    outcome = run_program({"program": program}, stdin, _seconds_until(deadline))
    return outcome.finished and _words(outcome.stdout.decode("utf-8", "replace")) == _words(expected)


def _words(text: str) -> list[list[str]]:
    """Split into words per line; ignores whitespace within lines and at both ends."""
    return [line.split() for line in text.strip().splitlines()]


def _passes_calls(program: str, tests: Tests, deadline: float) -> bool:
    job = {"program": program, "calls": [tests.function, tests.inputs]}
    outcome = run_program(job, "", _seconds_until(deadline))
    try:
        results = [json.loads(line) for line in outcome.results.splitlines()]
    except (ValueError, RecursionError):
        return False
    return outcome.finished and len(results) == len(tests.outputs) and all(map(_same, results, tests.outputs))


def _same(result: Any, expected: Any) -> bool:
    """Return whether a result is equal to the expected one, which data sets may wrap in a list of one."""
    return _equal(result, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0]))


def _equal(result: Any, expected: Any) -> bool:
    """Compare JSON values, floats with tolerance 1e-6."""
    if isinstance(result, bool) or isinstance(expected, bool):
        return result is expected
    if isinstance(result, (int, float)) and isinstance(expected, (int, float)):
        return result == expected or (isinstance(result, float) and math.isclose(result, expected, rel_tol=1e-6, abs_tol=1e-6))
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_equal(result[key], expected[key]) for key in result)
    return bool(result == expected)


def _passes_assertions(program: str, assertions: str, deadline: float) -> bool:
    """Run the tests after the program in the same process; a random token proves that the tests, not only the program, ran to the end."""
    proof = secrets.token_hex(16)
    outcome = run_program({"program": program, "tests": assertions, "proof": proof}, "", _seconds_until(deadline))
    return outcome.finished and outcome.results.strip() == proof.encode()


def _seconds_until(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


def warm_up() -> None:
    """Verify the sandbox: a probe program must be denied the network, files and processes.

    Raises:
        RewardError: this machine cannot restrict programs.
    """
    outcome = run_program({"program": _PROBE}, "", 60.0)
    if outcome.stdout.strip() != b"5":
        raise RewardError("programs cannot be run safely on this machine: the sandbox does not deny them the network, files or processes")
