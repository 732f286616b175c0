"""Rates by hand: what plan's formulas make of measured seconds, what is a warning, and options that plan takes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.config_helpers import QWEN2, write_base
from vapo_mcore.certify.checks import rates as check
from vapo_mcore.certify.rates import Assumed, GenerationWork, PassWork, compare_with_plan, options, solve
from vapo_mcore.config import load_config
from vapo_mcore.config.architecture import architecture_from_config
from vapo_mcore.planning.devices import DEVICES, Device, choose_device

H100 = DEVICES["h100"]


def assumed(folder: Path, *settings: str, device: Device = H100) -> Assumed:
    config = load_config(write_base(folder), ["model.dtype=bfloat16", *settings])
    return Assumed(config, architecture_from_config(QWEN2, "x"), device)


def operations_a_token(length: int) -> float:
    """Of the model of QWEN2, by hand: two a weight in matrix products, and causal attention of ``length`` tokens."""
    heads, hidden, layers = 4, 128, 4
    head = hidden // heads
    layer = 2 * hidden * heads * head + 2 * hidden * 2 * head + 3 * hidden * 264  # q and o, k and v of two heads, MLP
    biases = (heads + 2 * 2) * head + 2 * hidden  # and norms, which plan counts alike
    weights = layers * (layer + biases) + 96 * hidden  # the output layer is the embedding
    return 2 * weights + 2 * layers * heads * head * length


@pytest.mark.parametrize("training", [False, True])
def test_a_pass_by_hand(tmp_path: Path, training: bool) -> None:
    """Two micro-batches of two sequences of 100 tokens; no recomputation, one rank: nothing is sent."""
    plan = assumed(tmp_path, "model.recompute=none")
    work = PassWork((100, 100), 2)
    operations = 400 * operations_a_token(100) * (3 if training else 1)
    efficiency = 0.45 if training else 0.50
    compute, exchange = plan.pass_seconds(work, training=training)
    assert compute == pytest.approx(operations / (989e12 * efficiency), rel=1e-6) and exchange == 0.0
    seconds = 4 * compute
    assert plan.efficiency(work, seconds, training=training) == pytest.approx(efficiency / 4, rel=1e-6)
    assert plan.utilisation(work, seconds, training=training) == pytest.approx(efficiency / 4, rel=1e-6)


def test_recomputed_operations_are_work_of_the_device_but_not_of_the_model(tmp_path: Path) -> None:
    """Full recomputation: four forward passes' operations where the model has three."""
    plan, work = assumed(tmp_path, "model.recompute=full"), PassWork((64,), 1)
    compute, _ = plan.pass_seconds(work, training=True)
    assert plan.utilisation(work, compute, training=True) == pytest.approx(0.45 * 3 / 4, rel=1e-6)


def test_the_options_give_what_was_measured(tmp_path: Path) -> None:
    """Put into plan's table, the derived rates make its formulas give the measured seconds; two ranks reduce 1 GB of gradients."""
    plan = assumed(tmp_path, "parallel.world_size=2").on(node_rate=50e9)
    work = PassWork((128, 128, 32), 1)
    rates = {}
    for name, training, seconds in (("forward_efficiency", False, 0.011), ("train_efficiency", True, 0.35)):
        efficiency = plan.efficiency(work, seconds, training=training, reduced_bytes=1e9 if training else 0)
        assert efficiency is not None
        rates[name] = efficiency
    generation = GenerationWork(responses=16, tokens=700, longest=60, prompt_length=20)
    assert options({"train_efficiency": 0.123456, "host_rate": 5.5e10}) == "--rate train_efficiency=0.1235 --rate host_rate=5.5e+10"
    rates |= plan.on(**rates).decode_rates(generation, 1.7)
    device = choose_device("h100", ["node_rate=50e9", *options(rates).replace("--rate ", "").split()])
    given = Assumed(plan.config, plan.architecture, device)
    assert sum(given.pass_seconds(work, training=False)) == pytest.approx(0.011, rel=1e-3)
    assert sum(given.pass_seconds(work, training=True, reduced_bytes=1e9)) == pytest.approx(0.35, rel=1e-3)
    assert given.generation_seconds(generation) == pytest.approx(1.7, rel=1e-3)


def test_generation_by_hand(tmp_path: Path) -> None:
    """8 responses of 50 tokens in 50 engine steps: each reads the weights and the cache of 8 sequences of 20 + 25 tokens once."""
    plan = assumed(tmp_path)
    timer = plan.timer(PassWork((1,), 1).workload(1))
    weights = 2 * (timer.model_operations("policy", training=False) - 2 * 4 * 4 * 32) / 2  # bytes of bfloat16, the output layer's too
    cache = 2 * 4 * 2 * 32 * 2
    step = (weights + 8 * 45 * cache) / (3.35e12 * 0.65) + 2e-3
    seconds = plan.generation_seconds(GenerationWork(8, 400, 50, 20))
    assert seconds == pytest.approx(50 * step, rel=1e-3)


def test_communication_alone_gives_no_efficiency(tmp_path: Path) -> None:
    plan = assumed(tmp_path)
    assert plan.efficiency(PassWork((64,), 1), 0.5, training=True, reduced_bytes=0.6 * H100.node_rate) is None
    assert plan.decode_rates(GenerationWork(1, 10, 10, 4), 1e-12) == {}


def test_solve_finds_a_factor_or_none() -> None:
    assert solve(lambda factor: 3 * factor + 1, 7.0) == pytest.approx(2.0)
    assert solve(lambda factor: 3 * factor + 1, 0.5) is None
    assert solve(lambda factor: factor, 1e5) is None


@pytest.mark.parametrize(
    ("value", "seconds", "gpu", "verdict", "says"),
    [
        (49.0, False, True, "warning", "plan assumes 100 GB/s, measured is 0.49 times as fast"),
        (51.0, False, True, "information", "0.51 times"),
        (200.0, False, True, "information", "measured is 2 times"),
        (49.0, False, False, "information", "0.49 times"),
        (201.0, True, True, "warning", "measured is 0.5 times"),
        (199.0, True, True, "information", "measured is 0.5 times"),
    ],
)
def test_only_a_gpu_that_is_far_slower_is_a_warning(value: float, seconds: bool, gpu: bool, verdict: str, says: str) -> None:
    found = compare_with_plan("x", value, "GB/s", 100.0, gpu=gpu, seconds=seconds)
    assert (found.verdict, found.value) == (verdict, value)
    assert says in found.measured
    assert bool(found.remedy) == (verdict == "warning")


def test_a_device_that_plan_does_not_know_is_compared_with_nothing() -> None:
    found = compare_with_plan("x", 1234.5, "tokens/s", None, gpu=True)
    assert (found.verdict, found.measured) == ("information", "1,234 tokens/s; plan does not know this device")


def test_passes_that_take_long_are_measured_with_fewer_tokens(tmp_path: Path) -> None:
    """Micro-batches are packed as plan packs them, of the recipe's 4096 tokens; on a device 10^9 times slower, of what takes 2 s."""
    plan = assumed(tmp_path)
    full = check.pass_work(plan)
    assert 3900 < sum(full.lengths) <= 4096 and full.microbatches == 1
    slow = plan.on(flops=H100.flops / 1e9)
    work = check.pass_work(slow)
    assert sum(work.lengths) < sum(full.lengths)
    assert sum(slow.pass_seconds(work, training=True)) <= check.LONGEST_SECONDS or sum(work.lengths) <= 16
    assert check.pass_work(replace_pipeline(plan)).microbatches == 4


def replace_pipeline(plan: Assumed) -> Assumed:
    parallel = plan.config.parallel.model_copy(update={"world_size": 2, "pipeline_model_parallel_size": 2})
    return Assumed(plan.config.model_copy(update={"parallel": parallel}), plan.architecture, plan.device)


def test_bandwidths_in_nodes_and_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of three, of which two share a host: the sum over all is the network's, the pair's the node's; 64 MiB, 2 (n - 1) / n times."""
    sums = iter([0.5, 0.25])
    groups = []
    monkeypatch.setattr(check, "timed_sum", lambda timeout, group=None: (None, next(sums)))
    monkeypatch.setattr(check.dist, "new_group", lambda ranks: groups.append(ranks) or ("group", *ranks))
    monkeypatch.setattr(check.dist, "destroy_process_group", lambda group: groups.append(group))
    monkeypatch.setattr(check.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(check, "all_gather_objects", lambda rate: [rate, rate / 2, None])
    found = check.bandwidths(["a", "a", "b"], timedelta(seconds=1))
    assert found["network_rate"] == pytest.approx(4 / 3 * 2**26 / 0.5)
    assert found["node_rate"] == pytest.approx(2**26 / 0.25 / 2)
    assert groups[:2] == [[0, 1], [2]] and groups[2:] == [("group", 0, 1), ("group", 2)]
