"""A user's estimator and loss terms: right numbers, independent of the split into micro-batches, and refused where they break the rules."""

import math

import pytest
import torch

from tests.torchrun import ROOT
from tests.unit.trainer.rollouts import make_config, make_experience, make_rows
from vapo_mcore.config.schema import CustomEstimatorConfig, LossTermConfig
from vapo_mcore.errors import ConfigError, TrainingError
from vapo_mcore.experience.extension_checks import check_extensions
from vapo_mcore.extensions.points import TERM_INPUTS, CustomTerm
from vapo_mcore.megatron.losses import PolicyLoss
from vapo_mcore.records.metric_table import METRICS, metrics_of
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.advantages import AdvantageEstimator

NAN = math.nan
EXAMPLE = f"{ROOT}/examples/extensions/arithmetic.py"
SEQUENCE_TERMS = ROOT / "tests" / "integration" / "sequence_terms.py"
TERMS = """
def distance(logprobs, old_logprobs, *, power=2.0):
    return (logprobs - old_logprobs).abs().pow(power)

def centred(logprobs):
    return logprobs - logprobs.mean()

def ordered(logprobs):
    return logprobs.cumsum(0)

def detached(logprobs):
    return logprobs.detach()

def constant(advantages):
    return advantages

def total(logprobs):
    return logprobs.sum()

def infinite(logprobs):
    return logprobs / 0

def raises(logprobs):
    return logprobs.no_such_method()

def with_entropy(entropy, advantages):
    return entropy * advantages

def with_returns(logprobs, returns):
    return logprobs * returns

def with_reference(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

def per_group(rows, row_ids, mask, cu_seqlens):
    return mask.float()

def wrong_shape(rewards):
    return rewards[:-1]

def not_a_number(rewards):
    return rewards / 0

def values_above(values, mask, *, threshold):
    return values - threshold
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("terms") / "terms.py"
    path.write_text(TERMS)
    return str(path)


def term(mine: str, name: str, coef: float = 1.0, **options) -> dict:
    return {"name": name, "function": f"{mine}:{name}", "coef": coef, "options": options}


def test_the_weighted_sum_and_its_gradient_by_hand(mine):
    custom = CustomTerm(LossTermConfig(**term(mine, "distance")))
    logprobs = torch.tensor([-1.0, NAN, -2.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.5, NAN, -2.0, -2.0])
    mask, weights = torch.tensor([True, False, True, True]), torch.tensor([0.5, 0.0, 0.25, 0.25])
    found = custom({"logprobs": logprobs, "old_logprobs": old}, mask, weights)
    assert found.item() == pytest.approx(0.5 * 0.25 + 0.0 + 0.25 * 1.0)
    found.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.5 * 2 * 0.5, 0.0, 0.0, 0.25 * 2 * -1.0])


def policy_batch(tokens: int, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) > 0.3
    batch = {
        "mask": mask,
        "labels": torch.arange(tokens),
        "old_logprobs": logprobs + 0.1 * torch.randn(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
        "policy_weights": mask / mask.sum(),
        "positive_weights": torch.zeros(tokens),
    }
    return logprobs, batch


def test_a_term_reads_the_bounds_of_the_response_tokens_by_hand_in_one_micro_batch_or_two():
    """Three sequences of 4, 1 and 5 tokens, 2, 0 and 3 of them response tokens; NaN elsewhere."""
    settings = [term(str(SEQUENCE_TERMS), "place", 0.5), term(str(SEQUENCE_TERMS), "share", 2.0)]
    loss, plain = PolicyLoss(make_config(loss_terms=settings)), PolicyLoss(make_config())
    mask = torch.tensor([False, False, True, True, False, False, True, True, True, False])
    weights = torch.tensor([NAN, NAN, 0.1, 0.2, NAN, NAN, 0.3, 0.4, 0.5, NAN]).nan_to_num(0.0)
    batch = {
        "mask": mask,
        "labels": torch.arange(10),
        "old_logprobs": torch.where(mask, -1.0, NAN),
        "advantages": torch.where(mask, 1.0, NAN),
        "policy_weights": weights,
        "positive_weights": torch.zeros(10),
    }

    def run(objective, parts):
        leaf = torch.where(mask, -1.0, NAN).requires_grad_()
        found = [0.0, 0.0, 0.0]
        for first, last, bounds in parts:
            part = {name: tensor[first:last] for name, tensor in batch.items()} | {"cu_seqlens": torch.tensor(bounds)}
            total, stats = objective({"logprobs": leaf[first:last]}, part)
            total.backward()
            for number, value in enumerate((total.detach(), stats.get("term/place/sum", 0.0), stats.get("term/share/sum", 0.0))):
                found[number] += float(value)
        return found, leaf.grad

    place, share = 0.1 * 1 + 0.2 * 2 + 0.3 * 1 + 0.4 * 2 + 0.5 * 3, (0.1 + 0.2) / 2 + (0.3 + 0.4 + 0.5) / 3
    (surrogate, _, _), before = run(plain, [(0, 10, [0, 4, 5, 10])])
    for parts in ([(0, 10, [0, 4, 5, 10])], [(0, 5, [0, 4, 5]), (5, 10, [0, 5])], [(0, 4, [0, 4]), (4, 10, [0, 1, 6])]):
        found, gradient = run(loss, parts)
        assert found == pytest.approx([surrogate + 0.5 * place + 2.0 * share, place, share], rel=1e-6)
        torch.testing.assert_close(gradient - before, 2.5 * weights)


def test_a_term_that_reads_sequences_may_not_depend_on_others():
    check_extensions(make_config(loss_terms=[term(str(SEQUENCE_TERMS), "place"), term(str(SEQUENCE_TERMS), "share")]))
    (fault,) = faults_of(loss_terms=[term(str(SEQUENCE_TERMS), "across")])
    assert "returned different values for the same tokens in another micro-batch" in fault


def test_the_loss_does_not_depend_on_micro_batches(mine):
    settings = [term(mine, "distance", 0.5, power=1.0), term(mine, "with_entropy", -0.25)]
    loss, plain = PolicyLoss(make_config(loss_terms=settings)), PolicyLoss(make_config())
    assert loss.needs_entropy and not plain.needs_entropy
    assert set(loss.tensors) - set(plain.tensors) == set() and "old_logprobs" in loss.tensors
    logprobs, batch = policy_batch(40)
    entropy = -logprobs

    def run(parts, objective):
        leaf = logprobs.clone().requires_grad_()
        total = leaf.new_zeros(())
        sums: dict[str, float] = {}
        for part in parts:
            value, stats = objective(
                {"logprobs": leaf[part], "entropy": entropy[part]}, {name: tensor[part] for name, tensor in batch.items()}
            )
            total = total + value
            for name, stat in stats.items():
                sums[name] = sums.get(name, 0.0) + stat.item()
        total.backward()
        return total.item(), leaf.grad, sums

    whole = run([slice(0, 40)], loss)
    split = run([slice(0, 7), slice(7, 7), slice(7, 31), slice(31, 40)], loss)
    assert split[0] == pytest.approx(whole[0], abs=1e-6) and torch.allclose(split[1], whole[1], atol=1e-7)
    weights, mask = batch["policy_weights"], batch["mask"]
    distance = ((logprobs - batch["old_logprobs"]).abs() * weights)[mask].sum().item()
    spread = (entropy * batch["advantages"] * weights)[mask].sum().item()
    assert whole[0] - run([slice(0, 40)], plain)[0] == pytest.approx(0.5 * distance - 0.25 * spread, abs=1e-6)
    for found in (whole[2], split[2]):
        assert found["term/distance/sum"] == pytest.approx(distance, abs=1e-6)
        assert found["term/with_entropy/sum"] == pytest.approx(spread, abs=1e-6)


def test_each_term_has_a_metric():
    names = [metric.name for metric in metrics_of(["a", "b_max"])]
    assert names[len(METRICS) :] == ["policy/term/a", "policy/term/b_max"]


def faults_of(**algorithm) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_extensions(make_config(**algorithm))
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("centred", "different values for the same tokens in another micro-batch"),
        ("ordered", "different values for the same tokens in another micro-batch"),
        ("detached", "returned numbers without a gradient"),
        ("constant", "takes neither 'logprobs' nor 'entropy'"),
        ("total", "returned a tensor torch.float32 []; expected one value per token, [12]"),
        ("infinite", "returned values that are not finite"),
        ("raises", "failed on a synthetic batch: AttributeError: 'Tensor' object has no attribute 'no_such_method'"),
        ("with_reference", "asks for 'ref_logprobs', which needs the reference model"),
    ],
)
def test_terms_that_break_the_rules(mine, name, message):
    (fault,) = faults_of(loss_terms=[term(mine, name)])
    assert fault.startswith("algorithm.loss_terms.0: ") and message in fault and name in fault


def test_all_faults_come_at_once(mine):
    advantage = {"estimator": "custom", "custom": {"function": f"{mine}:values_above"}}
    faults = faults_of(advantage=advantage, loss_terms=[term(mine, "with_returns"), term(mine, "distance", powr=1)])
    assert faults == [
        f"algorithm.advantage.custom: {mine}:values_above asks for 'values', "
        "which needs a critic: set algorithm.advantage.custom.critic: true",
        f"algorithm.advantage.custom: {mine}:values_above needs the option 'threshold'",
        f"algorithm.loss_terms.0: {mine}:with_returns asks for 'returns', which needs a critic, and this estimator builds none",
        f"algorithm.loss_terms.1: {mine}:distance has no option 'powr': its options are power",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [("wrong_shape", "returned a tensor torch.float32 \\[15\\]; expected one advantage per token"), ("not_a_number", "not finite")],
)
def test_estimators_that_break_the_rules(mine, name, message):
    with pytest.raises(ConfigError, match=message):
        check_extensions(make_config(advantage={"estimator": "custom", "custom": {"function": f"{mine}:{name}"}}))


def test_what_is_sound_passes(mine):
    custom = {"function": f"{mine}:values_above", "critic": True, "options": {"threshold": 0.5}}
    terms = [term(mine, "with_returns"), term(mine, "with_entropy"), term(mine, "with_reference")]
    config = make_config(advantage={"estimator": "custom", "custom": custom}, loss_terms=terms, kl={"place": "loss", "coef": 0.1})
    check_extensions(config)
    assert config.uses_critic


def test_the_example_s_estimator_by_hand():
    custom = {"function": f"{EXAMPLE}:against_the_best_other", "options": {"share": 0.5}}
    config = make_config(advantage={"estimator": "custom", "custom": custom})
    assert not config.uses_critic and config.algorithm.advantage.whiten == "off"
    # Group 0: rewards 1, 0, 0.5; group 1: 1, and one without a verdict; the failed one is in nobody's baseline.
    rows = make_rows([3, 2, 0, 2, 1], [1.0, 0.0, 0.5, 1.0, 0.0], groups=[0, 0, 0, 1, 1], graded=[True, True, True, True, False])
    experience = make_experience(config, rows)
    estimator = AdvantageEstimator(config, None)
    estimator.place_rewards(experience)
    metrics = StepMetrics(METRICS)
    estimator.advantages(experience, metrics)
    mask = experience.mask
    assert experience.batch["advantages"][mask].tolist() == [1 - 0.25] * 3 + [0 - 0.5] * 2 + [1 - 0.5] * 2
    assert not experience.batch["advantages"][~mask].any()
    assert metrics.reduce(None)["advantages/max"] == 0.75


def test_an_estimator_with_values_of_the_critic(mine):
    custom = {"function": f"{mine}:values_above", "critic": True, "options": {"threshold": 0.5}}
    config = make_config(advantage={"estimator": "custom", "custom": custom, "whiten": "batch"})
    experience = make_experience(config, make_rows([2, 2], [1.0, 0.0]))
    experience.batch["values"] = torch.tensor([NAN, NAN, 0.5, 1.5, NAN, NAN, 2.5, 3.5])
    estimator = AdvantageEstimator(config, None)
    estimator.place_rewards(experience)
    estimator.advantages(experience, StepMetrics(METRICS))
    found = experience.batch["advantages"]
    assert found[experience.mask].tolist() == pytest.approx([-1.5 / 1.25**0.5, -0.5 / 1.25**0.5, 0.5 / 1.25**0.5, 1.5 / 1.25**0.5])
    assert found[~experience.mask].tolist() == [0.0] * 4, "NaN at masked tokens goes nowhere"


def test_a_wrong_shape_in_the_run_is_told(mine):
    config = make_config(advantage={"estimator": "custom", "custom": {"function": f"{mine}:wrong_shape"}})
    assert isinstance(config.algorithm.advantage.custom, CustomEstimatorConfig)
    experience = make_experience(config, make_rows([2], [1.0]))
    estimator = AdvantageEstimator(config, None)
    estimator.place_rewards(experience)
    with pytest.raises(TrainingError, match=r"wrong_shape returned a tensor torch.float32 \[3\]; .* float \[4\]"):
        estimator.advantages(experience, StepMetrics(METRICS))


OWN_GSPO = """
import torch

def objective(logprobs, old_logprobs, advantages, mask, sequences, *, clip):
    mean = sequences.mean(logprobs - old_logprobs, mask)
    ratio = sequences.spread(mean.exp()).float() * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)

def over_the_batch(logprobs, advantages):
    return -(logprobs - logprobs.mean()) * advantages

def detached(logprobs):
    return logprobs.detach()

def by_row(logprobs, row_reward, row_length):
    return -logprobs * row_reward / row_length
"""


def objective_config(path, name, **options):
    return {"kind": "custom", "custom": {"function": f"{path}:{name}", "options": options}, "aggregation": "sequence"}


def test_an_objective_from_one_file_replaces_the_surrogate_and_reads_whole_sequences(tmp_path):
    """GSPO written as a user would, beside the built-in one; NaN at masked tokens."""
    path = tmp_path / "own.py"
    path.write_text(OWN_GSPO)
    own = PolicyLoss(make_config(policy_loss=objective_config(path, "objective", clip=0.02)))
    built_in = PolicyLoss(make_config(policy_loss={"kind": "gspo", "clip_low": 0.02, "clip_high": 0.02, "aggregation": "sequence"}))
    results = []
    for loss in (own, built_in):
        logprobs, batch = policy_batch(20)
        logprobs = torch.where(batch["mask"], logprobs, torch.nan).requires_grad_()
        total, stats = loss({"logprobs": logprobs}, batch | {"cu_seqlens": torch.tensor([0, 4, 5, 20])})
        total.backward()
        results.append((total.item(), logprobs.grad, stats["approx_kl"].item()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6) and results[0][2] == pytest.approx(results[1][2], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-7)
    assert results[0][1].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("over_the_batch", {}, "returned different values for the same sequence next to other sequences"),
        ("detached", {}, "returned numbers without a gradient"),
        ("objective", {}, "needs the option 'clip'"),
        ("absent", {}, "has no function 'absent'"),
    ],
)
def test_a_wrong_objective_is_refused_before_a_model_loads(tmp_path, name, options, message):
    path = tmp_path / "own.py"
    path.write_text(OWN_GSPO)
    (fault,) = faults_of(policy_loss=objective_config(path, name, **options))
    assert fault.startswith("algorithm.policy_loss.custom: ") and message in fault


def test_sound_objectives_pass_and_read_rows(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_GSPO)
    check_extensions(make_config(policy_loss=objective_config(path, "objective", clip=0.02)))
    check_extensions(make_config(policy_loss=objective_config(path, "by_row")))
    loss = PolicyLoss(make_config(policy_loss=objective_config(path, "by_row")))
    assert {"row_reward", "row_length"} <= set(loss.tensors)
    experience = make_experience(make_config(), make_rows([2, 3], [1.0, 0.5]))
    for name in TERM_INPUTS:
        if name.startswith("row_"):
            assert experience.rows_column(name.removeprefix("row_")).shape == (2,)
