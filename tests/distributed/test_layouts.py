"""Any layout, the same step: TP (with and without sequence parallelism), PP (interleaved too), CP, DP and EP against float64 and one rank.

Right answers come from plain transformers in float64 (``layouts/problem.py``); weights after two AdamW updates are compared with a
single process. One launch per world size runs all its layouts (``layouts/cases.py`` lists them).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.forks import run_ranks

HERE = Path(__file__).with_name("layouts")
sys.path.insert(0, str(HERE))
import problem  # noqa: E402

FORWARD_AND_GRADIENT = 1e-5
"""Absolute for log-probs, entropies, values and losses; relative for gradients (each tensor's norm) and the gradient norm."""
WEIGHTS_OVER_LR = 1e-2


def run(world: int, workdir: Path) -> dict[str, dict[str, float]]:
    result = run_ranks(HERE / "worker.py", world, str(workdir), timeout=900)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line.pop("case"): line for line in lines}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for model in (*problem.MODELS, *problem.MIXTURES, problem.MLP_HEAD, problem.HISTOGRAM_HEAD, *problem.UNKNOWN_MODELS):
        problem.make_model(model, folder / model)
    (folder / "world1.json").write_text(json.dumps(run(1, folder)))
    return folder


BFLOAT16 = {"logprobs": 0.2, "entropy": 0.06, "values": 0.1, "bootstrap": 0.1, "loss": 0.01, "gradient": 0.3, "grad_norm": 0.02}
"""Bounds against float64 where weights and activations are bfloat16, some twice what rounding gives (the worst gradient: a bias's)."""


def limit(case: str, name: str) -> float:
    if name.endswith(("_choices", "_routing", "_load")):
        return 0.0
    if name.endswith("gradient_of_one_process"):
        return FORWARD_AND_GRADIENT
    if "bfloat16" in case:
        return BFLOAT16[name.removeprefix("policy_").removeprefix("critic_")]
    return WEIGHTS_OVER_LR if name.endswith("weights_over_lr") else FORWARD_AND_GRADIENT


def check(results: dict[str, dict[str, float]], expected_cases: int, bfloat16: int, longest: int, replay: int) -> None:
    kinds = [[case for case in results if mark in case] for mark in ("bfloat16", "longest", "replay")]
    exact = [case for case in results if not any(case in kind for kind in kinds)]
    assert [len(exact), *map(len, kinds)] == [expected_cases, bfloat16, longest, replay], sorted(results)
    wrong = {(case, name): error for case, errors in results.items() for name, error in errors.items() if not error <= limit(case, name)}
    assert not wrong, wrong
    names = {"logprobs", "entropy", "values", "bootstrap"}
    names |= {f"{role}_{what}" for role in ("policy", "critic") for what in ("loss", "gradient", "grad_norm", "weights_over_lr")}
    assert all(set(results[case]) == names for case in exact)
    assert all(set(results[case]) == {"logprobs", "entropy"} for case in kinds[1])
    of_routers = {f"{role}_{what}" for role in ("policy", "critic") for what in ("choices", "routing", "load", "balance", "z")}
    of_routers |= {"policy_engine_logprobs", "policy_engine_routing"}
    assert all(set(results[case]) == (names | of_routers) - {"entropy", "bootstrap"} for case in kinds[2])
    # float32 reduction shows where the same micro-batches were in one process (which wrote the file) and on two ranks
    compared = [case for case in kinds[0] if "policy_gradient_of_one_process" in results[case]]
    assert len(compared) == (1 if longest else 0), compared


def test_one_process_equals_float64(workdir: Path) -> None:
    check(json.loads((workdir / "world1.json").read_text()), 27, bfloat16=1, longest=1, replay=3)


@pytest.mark.parametrize(("world", "cases", "bfloat16", "longest", "replay"), [(2, 64, 4, 3, 5), (4, 39, 1, 0, 6), (8, 6, 0, 0, 1)])
def test_layouts_equal_one_process(workdir: Path, world: int, cases: int, bfloat16: int, longest: int, replay: int) -> None:
    check(run(world, workdir), cases, bfloat16, longest, replay)
