"""What training reads, from rewards to advantages, on rollouts small enough for hand computation."""

import math

import pytest
import torch

from tests.unit.trainer.rollouts import make_config, make_experience, make_rows
from vapo_mcore.errors import TrainingError
from vapo_mcore.trainer.advantages import AdvantageEstimator, check_experience
from vapo_mcore.trainer.metric_table import METRICS
from vapo_mcore.trainer.metrics import StepMetrics

FIXED = {"kind": "fixed", "value": 1.0}


def estimate(config, experience, values=None):
    """Rewards, returns and advantages; ``values`` are those of all response tokens in order, NaN everywhere else."""
    metrics, estimator = StepMetrics(METRICS), AdvantageEstimator(config, None)
    if values is not None:
        full = torch.full((experience.batch.num_tokens,), math.nan)
        positions = torch.cat(
            [torch.arange(b - r, b) for b, r in zip(experience.cu_seqlens[1:], experience.rows.response_length, strict=True)]
        )
        full[positions] = torch.tensor(values)
        experience.batch["values"] = full
    estimator.place_rewards(experience)
    if values is not None:
        estimator.returns(experience)
    estimator.advantages(experience, metrics)
    return metrics.reduce(None)


def responses(experience, name):
    """A tensor at the response tokens, as a list per response."""
    x, rows = experience.batch[name], experience.rows
    return [x[b - r : b].tolist() for b, r in zip(experience.cu_seqlens[1:].tolist(), rows.response_length.tolist(), strict=True)]


def test_kl_in_the_reward_reaches_advantages_and_returns():
    config = make_config(kl={"place": "reward", "kind": "k1", "coef": 0.1}, advantage={"lambda_policy": FIXED, "whiten": "off"})
    experience = make_experience(config, make_rows([3], [1.0]))
    experience.batch["old_logprobs"] = torch.tensor([math.nan, math.nan, -1.0, -2.0, -1.5])
    experience.batch["ref_logprobs"] = experience.batch["old_logprobs"] - 2
    estimate(config, experience, [0.0, 0.0, 0.0])
    for name in ("advantages", "returns"):
        assert responses(experience, name)[0] == pytest.approx([0.4, 0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize(("truncation", "expected"), [("terminal", [-0.2, -0.4]), ("bootstrap", [0.4, 0.2])])
def test_a_cut_response_ends_at_zero_or_at_the_next_states_value(truncation, expected):
    config = make_config(advantage={"lambda_policy": FIXED, "whiten": "off", "truncation": truncation})
    experience = make_experience(config, make_rows([2, 2], [0.0, 0.0], cut=[0]))
    experience.bootstrap_values = torch.tensor([0.6, 7.0])  # the second response finished: its value is not used
    estimate(config, experience, [0.2, 0.4, 0.2, 0.4])
    assert responses(experience, "advantages")[0] == pytest.approx(expected, abs=1e-6)
    assert responses(experience, "advantages")[1] == pytest.approx([-0.2, -0.4], abs=1e-6)


def test_length_adaptive_lambda_leaves_the_returns_alone():
    config = make_config(advantage={"whiten": "off"}, rollout={"max_response_length": 128})
    experience = make_experience(config, make_rows([10, 20, 100], [1.0, 1.0, 1.0]))
    row = estimate(config, experience, [0.25] * 130)
    assert all(value == pytest.approx(1.0) for response in responses(experience, "returns") for value in response)
    first, second, third = responses(experience, "advantages")
    assert first == pytest.approx([0.0] * 9 + [0.75])  # lambda 0: the TD error alone
    assert second == pytest.approx([0.0] * 19 + [0.75])
    assert third == pytest.approx([0.75 * 0.8**k for k in range(99, -1, -1)], abs=1e-6)
    assert row["gae/lambda_mean"] == pytest.approx(0.8 / 3)
    assert row["gae/lambda_zero_frac"] == pytest.approx(2 / 3)
    assert sum(row["gae/lambda_histogram"]) == 3


def test_sigmoid_lambda_is_relative_to_the_lengths_of_the_whole_rollout():
    config = make_config(advantage={"lambda_policy": {"kind": "sigmoid", "min": 0.3, "max": 0.95}, "truncation": "mask"})
    rows = make_rows([4, 8, 12, 30], [1.0, 0.0, 0.0, 0.0], graded=[True, True, True, False], cut=[2])
    lam = AdvantageEstimator(config, None).lambdas(make_experience(config, rows))
    std = math.sqrt(32 / 3)  # of 4, 8 and 12: the cut response counts, the one without a verdict does not
    expected = [0.3 + 0.65 / (1 + math.exp(-(length - 8) / std)) for length in (4, 8)]
    assert lam[:2].tolist() == pytest.approx(expected, rel=1e-12)


def test_masked_cut_responses_stay_in_group_statistics_and_failed_gradings_do_not():
    config = make_config(advantage={"estimator": "grpo", "truncation": "mask"}, positive_lm={"coef": 0.0})
    rows = make_rows([2, 2, 2, 2], [1.0, 0.0, 0.0, 0.0], groups=[0, 0, 0, 0], graded=[True, True, True, False], cut=[1])
    experience = make_experience(config, rows)
    estimate(config, experience)
    mean, std = 1 / 3, math.sqrt(2) / 3
    got = responses(experience, "advantages")
    assert got[0] == pytest.approx([(1 - mean) / (std + 1e-6)] * 2, rel=1e-5)
    assert got[1] == [0.0, 0.0]  # cut: no loss, but its reward is in the mean
    assert got[2] == pytest.approx([-mean / (std + 1e-6)] * 2, rel=1e-5)
    assert got[3] == [0.0, 0.0]
    assert experience.minibatches[0].denominators.tokens == 4
    assert experience.minibatches[0].denominators.positive_tokens == 2


def test_overlong_penalty_and_scaling_change_the_reward_and_not_the_verdict():
    config = make_config(
        rollout={"max_response_length": 30}, reward={"scale": {"source": [0, 1], "target": [-1, 1]}, "overlong": {"cache": 10}}
    )
    experience = make_experience(config, make_rows([10, 25, 30], [1.0, 1.0, 0.0], cut=[2]))
    assert experience.rows.reward.tolist() == pytest.approx([1.0, 0.5, -2.0])
    assert experience.rows.verdict.tolist() == [True, True, False]
    assert responses(experience, "positive_mask") == [[True] * 10, [True] * 25, [False] * 30]


def test_whitening_by_minibatch_standardises_each():
    config = make_config(advantage={"estimator": "reinforce_pp", "whiten": "minibatch"})
    experience = make_experience(config, make_rows([1, 1, 1, 1], [1.0, 0.0, 1.0, 1.0]), [[0, 1], [2, 3]])
    estimate(config, experience)
    assert [x for response in responses(experience, "advantages") for x in response] == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_nan_at_a_response_token_names_the_response_and_at_a_masked_one_does_nothing():
    config = make_config(advantage={"estimator": "reinforce"})
    experience = make_experience(config, make_rows([2, 2], [1.0, 0.0], groups=[7, 7]))
    estimate(config, experience)
    experience.batch["old_logprobs"] = torch.tensor([math.nan, math.nan, -1.0, -1.0, math.nan, math.nan, -1.0, -1.0])
    check_experience(experience)
    experience.batch["old_logprobs"][7] = math.nan
    with pytest.raises(TrainingError, match=r"old_logprobs: response set/7#0 sample 1"):
        check_experience(experience)


def test_importance_weights_of_the_three_corrections():
    gaps = torch.tensor([math.log(0.1), 0.0, math.log(3.0)])
    expected = {"token_truncate": [0.1, 1.0, 2.0], "token_mask": [0.0, 1.0, 0.0], "sequence_mask": [0.1, 1.0, 3.0]}
    for kind, weights in expected.items():
        config = make_config(advantage={"estimator": "reinforce"}, policy_loss={"importance_correction": {"kind": kind}})
        experience = make_experience(config, make_rows([3], [1.0]))
        experience.batch["old_logprobs"] = experience.batch["rollout_logprobs"] + torch.cat([torch.tensor([math.nan] * 2), gaps])
        AdvantageEstimator(config, None).correct_importance(experience)
        assert responses(experience, "importance_weights")[0] == pytest.approx(weights, rel=1e-5)
