"""A task, a reward, an advantage estimator and a loss term from one file outside the package, and the diagnosis, through whole runs."""

import json
from pathlib import Path

import pytest

from tests.forks import run_script
from tests.training_setup import read_metrics, read_samples, write_setup


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("extensions"))
    result = run_script(Path(__file__).with_name("one_process_worker.py"), str(folder), timeout=300)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return folder


def test_all_four_take_part(folder: Path) -> None:
    first, last = (row for row in read_metrics(folder / "large_packs") if row["step"] > 0)
    assert first["policy/term/distance"] > 0, "the second epoch's policy is not the sampler any more"
    assert not [name for name in last if name.startswith("critic/")]
    # The estimator's advantages are reward - half the best other reward: between -0.5 and 1.
    assert -0.5 <= first["advantages/min"] <= first["advantages/max"] <= 1.0
    samples = read_samples(folder / "large_packs", "step_0001")
    assert all(sample["source"] == "sums" and sample["prompt"].startswith("_/") for sample in samples)
    assert all(sample["error"] is None for sample in samples)
    assert [row["eval/held_out_sums/prompts"] for row in read_metrics(folder / "large_packs") if row["step"] == 0] == [8]


def test_terms_that_read_sequences_have_the_values_that_the_lengths_give(folder: Path) -> None:
    for name in ("large_packs", "small_packs"):
        row = next(row for row in read_metrics(folder / name) if row["step"] == 1)
        lengths = [sample["response_length"] for sample in read_samples(folder / name, "step_0001")]
        total = sum(lengths)
        assert len(lengths) == 16 and total == row["tokens/trained"] and len(set(lengths)) > 1
        assert row["policy/term/place"] == pytest.approx(sum(length * (length + 1) / 2 for length in lengths) / total, rel=1e-5)
        assert row["policy/term/share"] == pytest.approx(16 / total, rel=1e-5)


def test_nothing_depends_on_the_packing(folder: Path) -> None:
    large, small = (read_metrics(folder / name) for name in ("large_packs", "small_packs"))
    assert small[1]["packing/microbatches"] > large[1]["packing/microbatches"]
    names = [name for name in large[1] if name.startswith(("policy/", "reward/", "advantages/", "response/"))]
    assert "policy/term/distance" in names and "policy/grad_norm" in names
    for name in names:
        assert small[1][name] == pytest.approx(large[1][name], rel=1e-3, abs=1e-6), name
    # Adam's first steps have the size of the rate whatever the size of the gradient: rounding differences grow with the updates.
    for name in names:
        assert small[2][name] == pytest.approx(large[2][name], rel=0.05, abs=1e-3), name


def test_an_engine_of_ones_own_is_one_class(folder: Path) -> None:
    """A step with verified weights; the sampler's log-probs are its own, not those of the model."""
    (row,) = read_metrics(folder / "own_engine")
    assert row["response/length_mean"] == 40.0 and row["policy/updates"] > 0
    assert row["mismatch/logprob_abs_mean"] > 1e-3
    assert json.loads((folder / "own_engine" / "engine.json").read_text())["engine"] == "UniformEngine"


def test_a_sampler_with_stale_weights_is_named_and_ends_the_run(folder: Path) -> None:
    rows = read_metrics(folder / "stale")
    gaps = [row["mismatch/logprob_abs_mean"] for row in rows]
    assert len(rows) == 3, "the first step is the baseline, two more must agree"
    assert gaps[0] < 1e-6 and min(gaps[1:]) > 1e-4
    assert [row.get("diagnosis/stale_weights", 0) for row in rows] == [0, 0, 1]
