"""Each rule on rows made up to hold and not to hold, and on what it must not mistake for its illness."""

import dataclasses

from vapo_mcore.config.schema import DiagnosisConfig
from vapo_mcore.diagnosis.rules import RULES, Context

FP32 = Context(dtype="float32", group_size=8, recomputes_logprobs=True)
BF16 = dataclasses.replace(FP32, dtype="bfloat16")


def rows(**columns):
    """Rows 1, 2, ... of columns (metric names with ``__`` for the slash); a single number stands for all rows."""
    count = max(len(column) for column in columns.values() if isinstance(column, list))
    spread = {name.replace("__", "/"): column if isinstance(column, list) else [column] * count for name, column in columns.items()}
    return [{"step": n + 1, "stage": "rl"} | {name: column[n] for name, column in spread.items()} for n in range(count)]


def holds(name, history, context=FP32, **changes):
    """The evidence of rule ``name`` after the last of ``history``, with thresholds other than the defaults if given."""
    (rule,) = [rule for rule in RULES if rule.name == name]
    settings = rule.section(DiagnosisConfig())
    return rule.check(history, type(settings)(**changes) if changes else settings, context)


def test_every_rule_has_the_section_of_its_name_and_the_other_way_round():
    assert [rule.name for rule in RULES] == [name for name in DiagnosisConfig.model_fields if name != "halt_on"]
    for rule in RULES:
        off = DiagnosisConfig(**{rule.name: None})
        assert [other.name for other in RULES if other.section(off) is None] == [rule.name]


def test_nothing_is_said_before_there_is_enough_to_see():
    first = [{"step": 1, "stage": "rl"}]
    assert [rule.name for rule in RULES if rule.check(first, rule.section(DiagnosisConfig()), FP32)] == []


def test_explained_variance():
    below = rows(critic__explained_variance=[0.5] * 5 + [-0.1] * 10)
    assert holds("explained_variance", below) == (
        "critic/explained_variance was -0.100 in the mean of steps 6 to 15 (standard error 0.000), below 0"
    )
    assert holds("explained_variance", below[:9]) is None
    assert holds("explained_variance", rows(critic__explained_variance=[-0.05, 0.04] * 8)) is None, "around 0 is not below it"
    noisy = [-0.02, 0.0] * 5  # mean -0.01, standard error 0.00333
    assert holds("explained_variance", rows(critic__explained_variance=noisy)) is not None
    assert holds("explained_variance", below[:9], window=3) is not None
    assert holds("explained_variance", rows(critic__explained_variance=[-1.0, -1.0, *[None] * 8])) is None, "undefined in most steps"
    assert holds("explained_variance", rows(critic__explained_variance=[0.15] * 10), below=0.2) is not None


def test_explained_variance_is_judged_by_monte_carlo_returns_where_they_were_logged():
    flattered = {"critic__explained_variance": [0.59] * 10, "critic__explained_variance_mc": [-0.37] * 10}
    assert holds("explained_variance", rows(**flattered)) == (
        "critic/explained_variance_mc was -0.370 in the mean of steps 1 to 10 (standard error 0.000), below 0"
    )


def test_a_critic_that_stays_near_zero_is_stuck():
    assert holds("critic_stuck", rows(critic__explained_variance_mc=[0.3] * 10 + [0.03, -0.01] * 10)) is not None
    assert holds("critic_stuck", rows(critic__explained_variance_mc=[0.03, -0.01] * 9)) is None, "before there are 20 steps"
    assert holds("critic_stuck", rows(critic__explained_variance_mc=[0.2, -0.1] * 10)) is None, "too noisy to say"
    assert holds("critic_stuck", rows(critic__explained_variance_mc=[0.1] * 20)) is None


def test_a_stuck_critic_gets_a_number_of_updates_and_then_a_rate():
    """To 800 updates in as many steps as there were; with these made, three times the rate; nothing where no updates were logged.

    The logged number counts from the beginning of the run.
    """
    stuck = [0.03, -0.01] * 10
    few = holds("critic_stuck", rows(critic__explained_variance_mc=stuck, critic__updates=[4 * (n + 1) for n in range(20)]))
    assert "has made 80 updates until step 20, value pretraining included" in few and "critic.updates_per_rollout: 40 makes as many" in few
    context = Context(dtype="float32", group_size=8, recomputes_logprobs=True, critic_lr=2e-6)
    many = holds("critic_stuck", rows(critic__explained_variance_mc=stuck, critic__updates=[40 * (n + 1) for n in range(20)]), context)
    assert "has made 800 updates" in many and many.endswith("look at critic.optimizer.lr, now 2e-06: try 6e-06")
    assert "updates" not in holds("critic_stuck", rows(critic__explained_variance_mc=stuck))


def test_value_loss_rising():
    spread = {"critic__returns_std": 0.5}
    rising = rows(critic__loss=[0.1] * 6 + [0.12, 0.16, 0.22, 0.28, 0.34], **spread)
    evidence = holds("value_loss_rising", rising)
    assert evidence == (
        "critic/loss rose from 0.1 (steps 1 to 5) to 0.224 (steps 7 to 11); relative to the best constant prediction from 0.80 to 1.79"
    )
    assert holds("value_loss_rising", rising[:-1]) is None
    # The loss follows the returns' variance, from 0.04 to 0.25: the critic is as good as before.
    grown = [0.2 + 0.03 * n for n in range(11)]
    assert holds("value_loss_rising", rows(critic__loss=[0.45 * s * s for s in grown], critic__returns_std=grown)) is None
    # Nearly all right: the loss relative to a tiny variance rises, while the loss itself falls.
    assert holds("value_loss_rising", rows(critic__loss=[0.1] * 6 + [0.01] * 5, critic__returns_std=[0.5] * 6 + [0.05] * 5)) is None


def test_entropy_collapse():
    fallen = rows(policy__entropy=[0.5] * 5 + [0.2] * 5 + [0.04] * 5)
    assert holds("entropy_collapse", fallen) == "policy/entropy fell from 0.5 to 0.04 (steps 11 to 15), below 0.1 of its start"
    assert holds("entropy_collapse", fallen[:-2]) is None
    assert holds("entropy_collapse", fallen, fraction=0.05) is None


def test_length_collapse():
    lengths = [1000.0] * 5 + [300.0] * 5
    collapsed = rows(response__length_mean=lengths, accuracy__mean=[0.3] * 5 + [0.1] * 5)
    assert holds("length_collapse", collapsed) == (
        "response/length_mean fell from 1000.0 to 300.0 tokens (steps 6 to 10), below 0.5 of its start, and accuracy from 0.300 to 0.100"
    )
    assert holds("length_collapse", rows(response__length_mean=lengths, accuracy__mean=[0.1] * 5 + [0.3] * 5)) is None, "shorter and better"
    assert holds("length_collapse", rows(response__length_mean=[1000.0] * 5 + [600.0] * 5, accuracy__mean=0.1)) is None


def test_truncation_rising():
    rising = rows(response__truncated_frac=[0.0] * 13 + [0.02, 0.06, 0.1, 0.15, 0.16, 0.24])
    assert holds("truncation_rising", rising) == (
        "response/truncated_frac rose from a mean of 0.000 to 0.142 (steps 15 to 19), by more than 0.1"
    )
    assert holds("truncation_rising", rising[:-1]) is None, "0.098 is no rise of more than 0.1"
    assert holds("truncation_rising", rows(response__truncated_frac=[0.6] * 20)) is None, "high, not rising"
    assert holds("truncation_rising", rows(response__truncated_frac=[0.6, 0.4, 0.2, 0.1, 0.05] + [0.02] * 5)) is None, "falling"
    assert holds("truncation_rising", rows(response__truncated_frac=[0.6] * 5 + [0.1] * 5 + [0.3] * 5)) is not None, "falls and rises again"
    assert holds("truncation_rising", rows(response__truncated_frac=[0.0] * 4 + [0.9] * 5)) is None, "no window before the last one"


def test_clip_fraction():
    much = rows(policy__clip_frac_high=[0.15] * 5, policy__clip_frac_low=0.1)
    assert holds("clip_fraction", much) == "0.250 of the tokens were held by a clip in steps 1 to 5 (upper 0.150, lower 0.100), above 0.2"
    assert holds("clip_fraction", rows(policy__clip_frac_high=[0.1] * 5, policy__clip_frac_low=0.1)) is None
    assert holds("clip_fraction", rows(policy__clip_frac_high=[0.9], policy__clip_frac_low=0.0)) is None, "one step is not a window"


def test_rollout_mismatch():
    gap = rows(mismatch__logprob_abs_mean=[1e-7, 2e-3])
    assert holds("rollout_mismatch", gap) == "mismatch/logprob_abs_mean = 2.00e-03 in step 2, above 1e-03 (float32)"
    assert holds("rollout_mismatch", gap, BF16) is None and holds("rollout_mismatch", gap[:1]) is None
    assert holds("rollout_mismatch", rows(mismatch__logprob_abs_mean=[0.06]), BF16) is not None
    assert holds("rollout_mismatch", gap, above=0.01) is None


def test_first_step_kl():
    assert (
        holds("first_step_kl", rows(policy__approx_kl_first=[0.0, 2e-6]))
        == "policy/approx_kl_first = 2.00e-06 in step 2, above 1e-06 (float32)"
    )
    assert holds("first_step_kl", rows(policy__approx_kl_first=[2e-6, 0.0])) is None
    assert holds("first_step_kl", rows(policy__approx_kl_first=[2e-6]), BF16) is None
    assert holds("first_step_kl", rows(policy__approx_kl_first=[0.1]), dataclasses.replace(FP32, recomputes_logprobs=False)) is None


def test_stale_weights():
    # From step 2 the sampler lacks the updates: the gap jumps from rounding to the size of an update, and stays below the mismatch limit.
    stale = rows(mismatch__logprob_abs_mean=[6e-8, 6e-4, 8e-4])
    assert "was 6.0e-08 before the first update and is 7.0e-04 in steps 2 to 3, more than 1.0e-04" in holds("stale_weights", stale)
    assert holds("rollout_mismatch", stale) is None
    assert holds("stale_weights", stale[:-1]) is None
    assert holds("stale_weights", rows(mismatch__logprob_abs_mean=[6e-8, 6e-7, 9e-5])) is None, "rounding, however much it has grown"
    assert holds("stale_weights", rows(mismatch__logprob_abs_mean=[0.03, 0.05, 0.04]), BF16) is None, "bfloat16's own gap"
    assert holds("stale_weights", rows(mismatch__logprob_abs_mean=[0.03, 0.2, 0.3]), BF16) is not None


def test_lambda_zero():
    short = rows(gae__lambda_zero_frac=[0.9] * 5, response__length_mean=12.0)
    assert holds("lambda_zero", short) == (
        "lambda was 0 for 0.90 of the responses in steps 1 to 5, above 0.5; the mean response has 12 tokens"
    )
    assert holds("lambda_zero", rows(gae__lambda_zero_frac=[0.1] * 5, response__length_mean=12.0)) is None


def test_uniform_groups():
    easy = rows(groups__all_right_frac=[0.85] * 5, groups__all_wrong_frac=0.1)
    assert holds("uniform_groups", easy) == (
        "0.95 of the groups had equal verdicts in steps 1 to 5 (all right 0.85, all wrong 0.10), above 0.9"
    )
    assert holds("uniform_groups", rows(groups__all_right_frac=[0.5] * 5, groups__all_wrong_frac=0.3)) is None
    assert holds("uniform_groups", easy, dataclasses.replace(FP32, group_size=1)) is None, "a group of one has equal verdicts"


def test_busiest_expert():
    collapsed = rows(policy__experts_busiest_max=[0.5, 0.92, 0.94, 0.96, 0.98, 1.0], policy__experts_entropy_min=0.55)
    assert holds("busiest_expert", collapsed) == (
        "one expert of a layer took 0.96 of the tokens in steps 2 to 6, above 0.9; the lowest entropy of a layer's load was 0.55 of an "
        "even one's"
    )
    assert holds("busiest_expert", collapsed[:5]) is None, "0.86 in the mean"
    assert holds("busiest_expert", collapsed, above=0.97) is None
    assert holds("busiest_expert", rows(response__length_mean=[12.0] * 6)) is None, "a dense model"


def test_grader_failures():
    failed = rows(grading__failed=[0, 3], response__count=128, grading__failed_timeout=[0, 2], grading__failed_ground_truth=[0, 1])
    assert holds("grader_failures", failed) == (
        "3 of 128 responses had no verdict in step 2 and were left out (1: the ground truth cannot be judged against; "
        "2: grading took longer than `reward.timeout_seconds`)"
    )
    assert holds("grader_failures", rows(grading__failed=[2], response__count=200)) is None, "1 % is let pass"
    assert holds("grader_failures", rows(grading__failed=[3], response__count=200)) is not None
    assert holds("grader_failures", failed[:1]) is None
    assert holds("grader_failures", failed, above=0.05) is None and holds("grader_failures", failed, above=0.01, window=2) is not None


def test_missed_ends():
    missed = rows(response__missed_end=[64, 65], response__count=128)
    assert holds("missed_ends", missed) == "65 of 128 responses were truncated in step 2 though they have an end-of-turn text"
    assert holds("missed_ends", missed[:1]) is None, "half of them are let pass"


def test_skipped_updates():
    skipped = rows(policy__updates_skipped=[0, 1], policy__updates=[2, 3], critic__updates_skipped=0, critic__updates=[4, 8])
    assert holds("skipped_updates", skipped) == "1 updates of the policy and 0 of the critic were skipped in step 2"
    assert holds("skipped_updates", skipped[:1]) is None
    assert holds("skipped_updates", skipped, above=0.2) is None, "1 of 6"
    assert holds("skipped_updates", skipped, above=0.15) is not None


def test_untrained_minibatches():
    masked = rows(policy__minibatches_masked=[0, 1], critic__minibatches_masked=[0, 2], tokens__trained=[90, 40])
    assert holds("untrained_minibatches", masked) == ("1 mini-batches of the policy and 2 of the critic had no trainable token in step 2")
    assert holds("untrained_minibatches", masked[:1]) is None
    assert holds("untrained_minibatches", rows(tokens__trained=[9, 0])).endswith("; 1 of these steps had no token to train on")


def test_a_horizon_is_too_short_if_values_at_cuts_are_wrong_and_weigh():
    context = dataclasses.replace(FP32, horizon=2000, max_response_length=20_000)
    seen = {"horizon__cuts_ended": [50, 150] * 5, "horizon__cut_value_bias": [0.4, 0.2] * 5, "horizon__cut_value_bias_se": [0.05, 0.02] * 5}
    seen |= {"horizon__cut_weight": [0.3, 0.5] * 5, "advantages__std": 0.5}
    assert holds("horizon_bias", rows(**seen), context) == (
        "the critic's value at a cut was 0.25 above the return that came later in steps 1 to 10 (1000 cuts, standard error 0.0087); with a "
        "mean weight of 0.4 in the advantages this shifts them by 0.20 of their standard deviation 0.5, above 0.1; rollout.horizon.tokens "
        "is 2000: with such a critic, rollout.horizon.tokens: 4000"
    )
    low = rows(**seen | {"horizon__cut_value_bias": [-0.4, -0.2] * 5})
    assert "was 0.25 below the return" in holds("horizon_bias", low, context)
    much = holds("horizon_bias", rows(**seen | {"advantages__std": 0.04}), context)
    assert much.endswith("with such a critic, no horizon below the longest response")
    assert holds("horizon_bias", rows(**seen | {"horizon__cut_weight": [0.1, 0.2] * 5}), context) is None, "it hardly weighs"
    assert holds("horizon_bias", rows(**seen | {"horizon__cut_value_bias_se": [2.0, 1.0] * 5}), context) is None, "it may be chance"
    assert holds("horizon_bias", rows(**seen)[:9], context) is None
    assert holds("horizon_bias", rows(**seen | {"horizon__cut_value_bias": [None] * 6 + [0.4] * 4}), context) is None
    assert holds("horizon_bias", rows(**seen), FP32) is None, "no horizon"
