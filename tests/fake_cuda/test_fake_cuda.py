"""The CUDA path on the fake device: the CPU's numbers, nothing left on the device, few synchronisations; and seeded defects are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import run_ranks, run_script
from tests.training_setup import assert_same_means

HERE = Path(__file__).parent
STEPS = HERE / "step_worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """(case) -> "fake" and "plain": results of the ranks; "faults"."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        for kind in ("fake", "plain"):
            file = folder / f"{kind}{world}.json"
            result = run_ranks(STEPS, world, kind, str(file), timeout=600, fake_cuda=kind == "fake")
            assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
            read = json.loads(file.read_text())
            for case in read["ranks"][0]:
                entry = found.setdefault(case, {"faults": []})
                entry[kind] = [rank[case] for rank in read["ranks"]]
                entry["faults"] += read["faults"]
            if read["trained"] is not None:
                found.setdefault(TRAINED, {"faults": []})[kind] = read["trained"]
                found[TRAINED]["faults"] += read["faults"]
    return found


CASES = ("one", "bfloat16, recomputed", "cpu optimizer", "head only", "dp", "tp", "pp", "pp, equal", "cp", "interleaved", "critic at tp")
TRAINED = "trained in two layouts"


@pytest.mark.parametrize("case", CASES)
def test_the_device_has_no_objection_and_the_numbers_of_the_cpu(results: dict[str, dict[str, Any]], case: str) -> None:
    assert results[case]["faults"] == []
    bound = 2e-2 if "bfloat16" in case else 1e-5
    for fake, plain in zip(results[case]["fake"], results[case]["plain"], strict=True):
        assert fake["numbers"].keys() == plain["numbers"].keys()
        for name, values in plain["numbers"].items():
            if name in ("policy0", "policy1", "critic0", "critic1"):  # loss, gradient norm, why the update was skipped
                assert fake["numbers"][name].pop() == values.pop() == "None", name
            assert fake["numbers"][name] == pytest.approx(values, rel=bound, abs=bound), name


def test_a_step_with_a_layout_for_the_critic_has_the_numbers_of_the_cpu(results: dict[str, dict[str, Any]]) -> None:
    """Policy at DP 2, critic at TP 2: tokens, values and returns change ranks on the way."""
    assert results[TRAINED]["faults"] == []
    fake, plain = results[TRAINED]["fake"], results[TRAINED]["plain"]
    assert fake.keys() == plain.keys() and {"critic/loss", "critic/grad_norm", "policy/grad_norm"} <= plain.keys()
    for name, value in plain.items():
        if isinstance(value, list):
            assert_same_means(fake[name], value, name)
        else:
            assert fake[name] == (pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value), name


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_any_model_stays_on_the_device(results: dict[str, dict[str, Any]], case: str) -> None:
    """By the allocator's own count, after ``enter("generate")``. What is left are Megatron's caches of rotary embeddings and its global
    buffer, with the interleaved schedule the last exchanged activations: less than a tenth of the smallest model's update."""
    for rank in results[case]["fake"]:
        assert rank["residency"] == 0
        assert max(rank["left"]) < 200_000, rank["live"]


@pytest.mark.parametrize("case", CASES)
def test_residency_counts_what_the_allocator_counts(results: dict[str, dict[str, Any]], case: str) -> None:
    for rank in results[case]["fake"]:
        for role in ("policy", "critic"):
            extra = rank[f"{role} allocated"] - rank[f"{role} resident"]
            assert 0 <= extra < 200_000, role  # rotary caches, rounding


def test_frozen_trunk_is_counted_and_moved(results: dict[str, dict[str, Any]]) -> None:
    trained, frozen = results["one"]["fake"][0], results["head only"]["fake"][0]
    state_and_gradients = 16  # float32: parameter, gradient, two moments, of four bytes each
    assert 0.9 < frozen["critic resident"] * state_and_gradients / 4 / trained["critic resident"] < 1.1


@pytest.mark.parametrize("case", [case for case in CASES if case != "pp"])
def test_synchronisations_do_not_grow_with_micro_batches(results: dict[str, dict[str, Any]], case: str) -> None:
    """A pass over four micro-batches waits as often as one over two; a step of the optimizer within a budget."""
    for rank in results[case]["fake"]:
        for name, (few, many) in rank["syncs"].items():
            assert few == many, name
            waits = {place: count for place, count in few.items() if "hybrid_optimizer" not in place}
            assert sum(waits.values()) <= (0 if name.endswith("forward") else 10), (name, waits)


def test_equal_microbatches_save_the_exchange_of_shapes(results: dict[str, dict[str, Any]]) -> None:
    """``parallel.equal_microbatches``: without it pipeline stages tell each other the shapes, and wait, at every micro-batch."""
    for rank, equal in zip(results["pp"]["fake"], results["pp, equal"]["fake"], strict=True):
        for name in ("policy forward", "policy step"):
            few, many = (sum(counts.values()) for counts in rank["syncs"][name])
            assert many > few > sum(equal["syncs"][name][0].values()), name


WORDS = {
    "loss_adds_a_host_tensor": "with host",
    "statistic_on_the_host": "aten.stack",
    "layout_index_on_the_host": "aten.index_select",
    "numpy_of_a_device_tensor": "to numpy",
    "collective_of_a_host_tensor": "NCCL takes",
    "collective_not_waited_for": "before the collective that writes it",
    "host_generator_on_the_device": "a generator on cpu",
    "host_generator_in_place": "a generator on cpu",
    "random_state_of_the_host_restored_on_the_device": "random state of a host generator",
    "microbatch_on_another_device": "cuda:1",
    "forward_of_an_offloaded_model": "has been released",
    "host_copy_read_before_synchronising": "before the stream",
    "host_copy_overwritten_during_upload": "is overwritten while",
    "parameters_loaded_on_an_unordered_stream": "before the stream",
    "memory_freed_while_another_stream_uses_it": "no record_stream",
    "page_locked_memory_not_unregistered": "without cudaHostUnregister",
    "page_locked_twice_and_the_error_not_fetched": "CUDA error 712",
    "frozen_parameters_stay": "bytes left",
    "item_of_every_microbatch": "2 more",
    "gradients_read_by_the_cpu_optimizer_before_they_arrive": "before the stream",
    "device_used_in_a_forked_child": "the child raised",
}
"""Seeded defect -> what the device says of it."""


def test_every_seeded_defect_is_found(tmp_path: Path) -> None:
    result = run_script(HERE / "mutants_worker.py", str(tmp_path / "found.json"), timeout=600, fake_cuda=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("nothing_seeded") is None
    assert {name for name, said in found.items() if said is None} == set()
    assert {name: found[name] for name, words in WORDS.items() if words not in found[name]} == {}
    assert found.keys() == WORDS.keys()
