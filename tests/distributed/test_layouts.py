"""Any layout, the same step: TP (with and without sequence parallelism), PP (interleaved too), CP and DP against float64 and one process.

Right answers come from plain transformers in float64 (``layouts/problem.py``); weights after two AdamW updates are compared with a
single process. One launch per world size runs all its layouts (``layouts/worker.py`` lists them).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.torchrun import run_torchrun

HERE = Path(__file__).with_name("layouts")
sys.path.insert(0, str(HERE))
import problem  # noqa: E402

FORWARD_AND_GRADIENT = 1e-5
"""Absolute for log-probs, entropies, values and losses; relative for gradients (each tensor's norm) and the gradient norm."""
WEIGHTS_OVER_LR = 1e-2


def run(world: int, workdir: Path) -> dict[str, dict[str, float]]:
    result = run_torchrun(HERE / "worker.py", world, str(workdir), timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for model in (*problem.MODELS, problem.MLP_HEAD):
        problem.make_model(model, folder / model)
    (folder / "world1.json").write_text(json.dumps(run(1, folder)))
    return folder


def check(results: dict[str, dict[str, float]], expected_cases: int) -> None:
    assert len(results) == expected_cases, sorted(results)
    wrong = {
        (case, name): error
        for case, errors in results.items()
        for name, error in errors.items()
        if not error <= (WEIGHTS_OVER_LR if name.endswith("weights_over_lr") else FORWARD_AND_GRADIENT)
    }
    assert not wrong, wrong
    names = {"logprobs", "entropy", "values", "bootstrap"}
    names |= {f"{role}_{what}" for role in ("policy", "critic") for what in ("loss", "gradient", "grad_norm", "weights_over_lr")}
    assert all(set(errors) == names for errors in results.values())


def test_one_process_equals_float64(workdir: Path) -> None:
    check(json.loads((workdir / "world1.json").read_text()), expected_cases=20)


@pytest.mark.parametrize(("world", "cases"), [(2, 39), (4, 24), (8, 4)])
def test_layouts_equal_one_process(workdir: Path, world: int, cases: int) -> None:
    check(run(world, workdir), cases)
