"""What training reads, from rewards to advantages, on rollouts small enough for hand computation."""

import dataclasses
import math

import pytest
import torch

from tests.unit.trainer.rollouts import make_config, make_experience, make_rows
from vapo_mcore.errors import TrainingError
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.records.metrics import StepMetrics
from vapo_mcore.trainer.advantages import AdvantageEstimator, check_experience, imitable_rows, shaped_rewards
from vapo_mcore.trainer.step_metrics import record_values

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


def test_step_rewards_are_added_where_steps_end_and_reach_advantages_and_returns():
    config = make_config(advantage={"lambda_policy": FIXED, "whiten": "off"})
    experience = make_experience(config, make_rows([3, 2], [1.0, 0.0], steps={0: [(0, 0.5), (2, 0.25)], 1: [(0, -1.0)]}))
    row = estimate(config, experience, [0.0] * 5)
    assert responses(experience, "rewards") == [[0.5, 0.0, 1.25], [-1.0, 0.0]]
    assert responses(experience, "returns") == [[1.75, 1.25, 1.25], [-1.0, 0.0]]
    assert responses(experience, "advantages") == [[1.75, 1.25, 1.25], [-1.0, 0.0]]
    assert row["advantages/max"] == 1.75


def process_config(**process):
    return make_config(advantage={"estimator": "grpo_process", "process": process, "truncation": "mask"}, positive_lm={"coef": 0.0})


def test_process_supervision_sums_normalised_rewards_of_own_and_later_steps():
    # Group 0: rewards 1 and 0 of the first response's steps, 1 of the second's; the outcomes are 1 and 0. Group 1 has no verdict.
    rows = make_rows(
        [4, 2, 2],
        [1.0, 0.0, 0.0],
        groups=[0, 0, 1],
        graded=[True, True, False],
        steps={0: [(1, 1.0), (2, 0.0)], 1: [(0, 1.0)], 2: [(0, 9.0)]},
    )
    config = process_config(outcome=False)
    experience = make_experience(config, rows)
    estimate(config, experience)
    mean, std = 2 / 3, math.sqrt(2) / 3
    right, wrong = (1 - mean) / (std + 1e-6), -mean / (std + 1e-6)
    first, second, third = responses(experience, "advantages")
    assert first == pytest.approx([right + wrong, right + wrong, wrong, 0.0], rel=1e-5)
    assert second == pytest.approx([right, 0.0], rel=1e-5)
    assert third == [0.0, 0.0]
    config = process_config(outcome=True)
    experience = make_experience(config, rows)
    estimate(config, experience)
    mean, std = 3 / 5, math.sqrt(6) / 5  # of 1, 0, 1 and the outcomes 1 and 0
    right, wrong = (1 - mean) / (std + 1e-6), -mean / (std + 1e-6)
    first, second, _ = responses(experience, "advantages")
    assert first == pytest.approx([2 * right + wrong, 2 * right + wrong, right + wrong, right], rel=1e-5)
    assert second == pytest.approx([right + wrong, wrong], rel=1e-5)


def test_process_supervision_normalised_over_the_rollout_or_the_group():
    rows = make_rows([1, 1, 1, 1], [0.0] * 4, groups=[0, 0, 1, 1], steps={0: [(0, 0.0)], 1: [(0, 1.0)], 2: [(0, 2.0)], 3: [(0, 3.0)]})
    got = {}
    for normalise in ("group", "batch"):
        config = process_config(outcome=False, normalise=normalise)
        experience = make_experience(config, rows)
        estimate(config, experience)
        got[normalise] = [x for response in responses(experience, "advantages") for x in response]
    assert got["group"] == pytest.approx([-1.0, 1.0, -1.0, 1.0], rel=1e-5)
    assert got["batch"] == pytest.approx([(r - 1.5) / math.sqrt(1.25) for r in range(4)], rel=1e-5)


def test_process_supervision_without_steps_is_grpo():
    rows = make_rows([2, 3, 1], [1.0, 0.0, 0.0], groups=[0, 0, 0], cut=[2])
    config = process_config()
    experience = make_experience(config, rows)
    estimate(config, experience)
    process = responses(experience, "advantages")
    config = make_config(advantage={"estimator": "grpo", "truncation": "mask"}, positive_lm={"coef": 0.0})
    experience = make_experience(config, rows)
    estimate(config, experience)
    for one, other in zip(process, responses(experience, "advantages"), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    assert process[2] == [0.0]  # cut: no loss, in the statistics


def test_process_supervision_is_the_same_whichever_rank_owns_a_response():
    """A rank that owns one response of a group normalises with the whole group's steps."""
    rows = make_rows([3, 2], [1.0, 0.0], groups=[0, 0], steps={0: [(0, 1.0)], 1: [(1, 0.5)]})
    config = process_config()
    whole = make_experience(config, rows)
    estimate(config, whole)
    part = make_experience(config, rows)
    batch = part.batch.select([1])
    part = dataclasses.replace(part, batch=batch, cu_seqlens=batch.cu_seqlens)
    estimate(config, part)
    assert part.batch["advantages"].tolist() == whole.batch["advantages"][5:].tolist()
    assert part.batch["advantages"].abs().sum() > 0


def test_group_estimators_compare_all_that_a_response_earned():
    config = make_config(advantage={"estimator": "dr_grpo"}, positive_lm={"coef": 0.0})
    experience = make_experience(config, make_rows([1, 1], [1.0, 0.0], groups=[0, 0], steps={1: [(0, 3.0)]}))
    estimate(config, experience)
    assert responses(experience, "advantages") == [[-1.0], [1.0]]


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


def test_group_centred_rewards_whitened_over_the_batch_are_reinforce_pp_baselines():
    config = make_config(advantage={"estimator": "dr_grpo", "whiten": "batch"})
    experience = make_experience(config, make_rows([1, 1, 2, 2], [1.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1]))
    estimate(config, experience)
    deviation = math.sqrt(0.5 / 6)  # six tokens with 0.5, -0.5 and four times 0
    assert [x for response in responses(experience, "advantages") for x in response] == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, 0.0, 0.0, 0.0, 0.0], abs=1e-5
    )


def test_advantages_are_clipped_after_whitening_and_counted():
    config = make_config(advantage={"estimator": "reinforce_pp", "clip": [-0.5, 5.0]})
    experience = make_experience(config, make_rows([1, 1, 1, 1], [1.0, 0.0, 1.0, 1.0]))
    row = estimate(config, experience)
    expected = 0.25 / math.sqrt(3 / 16)  # the wrong response's -sqrt(3) is clipped
    assert [x for response in responses(experience, "advantages") for x in response] == pytest.approx(
        [expected, -0.5, expected, expected], abs=1e-5
    )
    assert row["advantages/clipped_frac"] == 0.25


def test_nan_at_a_response_token_names_the_response_and_at_a_masked_one_does_nothing():
    config = make_config(advantage={"estimator": "reinforce"})
    experience = make_experience(config, make_rows([2, 2], [1.0, 0.0], groups=[7, 7]))
    estimate(config, experience)
    experience.batch["old_logprobs"] = torch.tensor([math.nan, math.nan, -1.0, -1.0, math.nan, math.nan, -1.0, -1.0])
    check_experience(experience)
    experience.batch["old_logprobs"][7] = math.nan
    with pytest.raises(TrainingError, match=r"old_logprobs: response set/7#0 sample 1"):
        check_experience(experience)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["rewards", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns"])
def test_what_is_not_finite_stops_the_run_at_trained_tokens_only(name, value):
    experience = make_experience(make_config(advantage={"estimator": "reinforce"}), make_rows([2, 2], [1.0, 0.0], groups=[3, 3], cut=[1]))
    experience.batch[name] = torch.zeros(8)
    experience.batch[name][[0, 1, 4, 5]] = value  # prompts
    check_experience(experience)
    experience.batch[name][6] = value
    with pytest.raises(TrainingError, match=rf"{name}: response set/3#0 sample 1"):
        check_experience(experience)
    experience.batch["response_mask"][6:] = False  # filtered
    check_experience(experience)


def test_importance_weights_of_the_three_corrections():
    gaps = torch.tensor([math.log(0.1), 0.0, math.log(3.0)])
    expected = {"token_truncate": [0.1, 1.0, 2.0], "token_mask": [0.0, 1.0, 0.0], "sequence_mask": [0.1, 1.0, 3.0]}
    for kind, weights in expected.items():
        config = make_config(advantage={"estimator": "reinforce"}, policy_loss={"importance_correction": {"kind": kind}})
        experience = make_experience(config, make_rows([3], [1.0]))
        experience.batch["old_logprobs"] = experience.batch["rollout_logprobs"] + torch.cat([torch.tensor([math.nan] * 2), gaps])
        AdvantageEstimator(config, None).correct_importance(experience, StepMetrics(METRICS))
        assert responses(experience, "importance_weights")[0] == pytest.approx(weights, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "low", "high", "rejected", "lost"), [("token_mask", 2 / 5, 1 / 5, 2 / 3, 2 / 3), ("sequence_mask", 3 / 5, 0.0, 2 / 3, 2 / 3)]
)
def test_what_a_mask_rejects_is_counted_on_both_sides_in_tokens_and_responses(kind, low, high, rejected, lost):
    """Ratios 0.01, 4 | 1, 1 | 0.1: the first response's geometric mean is 0.2."""
    gaps = torch.tensor([0.01, 4.0, 1.0, 1.0, 0.1]).log()
    config = make_config(advantage={"estimator": "reinforce"}, policy_loss={"importance_correction": {"kind": kind}})
    experience = make_experience(config, make_rows([2, 2, 1], [1.0, 0.0, 1.0]))
    old = experience.batch["rollout_logprobs"].clone()
    old[experience.mask] += gaps
    experience.batch["old_logprobs"] = old
    metrics = StepMetrics(METRICS)
    AdvantageEstimator(config, None).correct_importance(experience, metrics)
    row = metrics.reduce(None)
    assert (row["mismatch/rejected_low_frac"], row["mismatch/rejected_high_frac"]) == pytest.approx((low, high))
    assert (row["mismatch/responses_rejected_frac"], row["mismatch/responses_lost_frac"]) == pytest.approx((rejected, lost))
    zero = (experience.batch["importance_weights"][experience.mask] == 0).double().mean()
    assert float(zero) == pytest.approx(low + high)


def test_explained_variance_of_bootstrapped_returns_flatters_a_critic_of_noise():
    """lambda_critic = 0.95 puts the values into their own targets; the Monte-Carlo returns know nothing of them."""
    generator = torch.Generator().manual_seed(0)
    config = make_config(advantage={"lambda_critic": 0.95}, rollout={"max_response_length": 128})
    experience = make_experience(config, make_rows([100] * 40, [float(i % 2) for i in range(40)]))
    estimator = AdvantageEstimator(config, None)
    estimator.place_rewards(experience)
    experience.batch["values"] = (0.5 + 0.6 * torch.randn(40, generator=generator)).repeat_interleave(102)
    estimator.returns(experience)
    metrics = StepMetrics(METRICS)
    record_values(metrics, experience, estimator.monte_carlo_returns(experience), 128, None, config.reward.interval)
    row = metrics.reduce(None)
    expected = torch.tensor([float(i % 2) for i in range(40)]).repeat_interleave(100)
    values = experience.batch["values"][experience.mask]
    assert row["critic/explained_variance_mc"] == pytest.approx(float(1 - (expected - values).var() / expected.var()), abs=1e-5)
    assert row["critic/explained_variance_mc"] < -1.0 and row["critic/explained_variance"] > 0.5


def test_rloo_subtracts_each_responses_summed_kl_before_the_baseline():
    config = make_config(advantage={"estimator": "rloo"}, positive_lm={"coef": 0.0}, kl={"place": "reward", "kind": "k1", "coef": 0.1})
    experience = make_experience(config, make_rows([3, 1, 2], [1.0, 0.0, 0.0], groups=[0, 0, 0]))
    batch, mask = experience.batch, experience.mask
    batch["old_logprobs"] = torch.where(mask, -1.0, math.nan)
    gaps = torch.tensor([0.5, 0.5, 1.0, -1.0, 2.0, 1.0])  # log pi - log pi_ref: sums 2, -1, 3
    batch["ref_logprobs"] = batch["old_logprobs"].clone()
    batch["ref_logprobs"][mask] -= gaps
    estimate(config, experience)
    rewards = [1 - 0.2, 0 + 0.1, 0 - 0.3]
    expected = [reward - (sum(rewards) - reward) / 2 for reward in rewards]
    assert [response[0] for response in responses(experience, "advantages")] == pytest.approx(expected, abs=1e-6)


def test_correct_responses_that_were_cut_or_punished_for_length_can_be_left_out_of_imitation():
    config = make_config(reward={"overlong": {"cache": 8}}, rollout={"max_response_length": 32})
    rows = make_rows([24, 25, 32, 10, 5], [1.0, 1.0, 1.0, 1.0, 0.0], cut=[2, 3])
    assert imitable_rows(config, rows, skip_overlong=False).tolist() == [True, True, True, True, False]
    assert imitable_rows(config, rows, skip_overlong=True).tolist() == [True, False, False, False, False]
    punished = shaped_rewards(config, rows) < rows.score
    assert punished.tolist() == [False, True, True, False, False]
