"""Metrics that only runs with ``rollout.horizon`` or a mixture of experts have; ``metric_table`` puts them into the table of all."""

from __future__ import annotations

from vapo_mcore.records.metrics import Metric, Reduction

POOLED, SAME = Reduction.POOLED, Reduction.REPLICATED

HORIZON = (
    Metric("horizon/open", SAME, "responses", "With `rollout.horizon`: responses open in the step, new ones included (horizon.md)."),
    Metric("horizon/finished", SAME, "responses", "Those of them that ended in the step."),
    Metric("horizon/cut", SAME, "responses", "Those of them that were cut and continue in the next step."),
    Metric("horizon/waiting", SAME, "responses", "Ended responses that wait for the rest of their group, after the step."),
    Metric(
        "horizon/moved_tokens",
        SAME,
        "tokens",
        "Response tokens of open responses that moved to another replica before the step, to balance the replicas' work.",
    ),
    Metric("horizon/segments_mean", SAME, "responses", "Mean number of segments of the step's responses, without those that were cut."),
    Metric("horizon/segments_max", SAME, "responses", "Largest such number."),
    Metric("horizon/segments_histogram", SAME, "responses", "Number of these responses with 1, 2, ..., 15, and with at least 16 segments."),
    Metric(
        "horizon/bootstrapped_frac",
        SAME,
        "response tokens",
        "With `train: segments`: share of the policy's tokens whose response was cut, so that the critic's value replaces the rest.",
    ),
    Metric(
        "horizon/cut_weight",
        SAME,
        "response tokens",
        "With `train: segments`: mean weight of the critic's value at a cut in the advantages, gamma (gamma lambda)^k for the token k "
        "before the cut, 0 in a response that has ended. An error of that value times this is its error in the mean advantage.",
    ),
    Metric(
        "horizon/cuts_ended",
        SAME,
        "cuts",
        "With `train: segments`: earlier cuts of the responses that ended in the step, whose return is now known; those without a verdict "
        "left out.",
    ),
    Metric(
        "horizon/cut_value_bias",
        SAME,
        "cuts",
        "Mean of the critic's value at these cuts, as the advantages read it then, minus the discounted rewards that came later.",
    ),
    Metric("horizon/cut_value_bias_se", SAME, "responses", "Its standard error over the responses; null with fewer than two."),
    Metric(
        "horizon/cut_value_error",
        SAME,
        "cuts",
        "Calibration error: mean distance between value and return of the bins of `critic/tokens_by_cut`, weighted by their cuts.",
    ),
    Metric(
        "critic/tokens_by_cut",
        SAME,
        "cuts",
        "Number of these cuts by the critic's value there: 10 equal bins of the reward range, as of `critic/tokens_by_prediction`.",
    ),
    Metric("critic/values_by_cut", SAME, "cuts", "Mean value at the cuts of each bin."),
    Metric("critic/returns_by_cut", SAME, "cuts", "Mean return that came later, of each bin."),
    Metric("horizon/staleness_mean", SAME, "response tokens", "Mean age of the tokens that carry a loss: steps since they were sampled."),
    Metric("horizon/staleness_max", SAME, "response tokens", "Age of the oldest of them."),
    Metric("horizon/staleness_histogram", SAME, "response tokens", "Tokens of age 0, 1, ..., 14, and of at least 15."),
    Metric("horizon/stale_tokens", SAME, "response tokens", "Tokens older than `rollout.horizon.max_staleness`, of graded responses."),
    Metric("horizon/stale_responses", SAME, "responses", "Graded responses with such tokens: masked in part, or dropped (`stale`)."),
    Metric(
        "tokens/reprefilled",
        SAME,
        "tokens",
        "Tokens of prompts and earlier segments that were prefilled again to continue responses (`rollout.horizon`).",
    ),
    Metric(
        "mismatch/off_policy_kl",
        POOLED,
        "response tokens",
        "As `mismatch/kl`, but tokens that older policies sampled included (`rollout.horizon`); the other `mismatch/*`, up to those of a "
        "mask, leave them out.",
    ),
    Metric("mismatch/off_policy_ess", POOLED, "response tokens", "As `mismatch/ess`, those tokens included."),
    Metric("mismatch/off_policy_beyond_cap_frac", POOLED, "response tokens", "As `mismatch/beyond_cap_frac`, those tokens included."),
)


def _routing(role: str, passed: str) -> tuple[Metric, ...]:
    """Return the metrics of one model's routers, if it is a mixture of experts."""
    pairs = "tokens (prompts too, without pads) and layers of all updates"
    return (
        Metric(
            f"{role}/experts_busiest_max",
            POOLED,
            pairs,
            "Share of a layer's tokens that its busiest expert takes, in the layer where it is largest; topk / experts for an even load.",
        ),
        Metric(f"{role}/experts_busiest_mean", POOLED, pairs, "The same in the mean over the layers."),
        Metric(
            f"{role}/experts_entropy_min",
            POOLED,
            pairs,
            "Entropy of a layer's load over its experts, as a share of log(experts), in the layer where it is smallest; 1 is an even load.",
        ),
        Metric(f"{role}/experts_entropy_mean", POOLED, pairs, "The same in the mean over the layers."),
        Metric(
            f"{role}/experts_replayed_frac",
            POOLED,
            pairs,
            f"Share of (token, layer) pairs that the present weights would send to other experts than the {passed} did: what "
            "`model.router.replay` changes.",
        ),
        Metric(
            f"{role}/balance_loss",
            POOLED,
            "updates",
            "Load-balancing loss of a mini-batch summed over the layers, before its coefficient (1 a layer if the load is even); not part "
            f"of `{role}/loss`.",
        ),
        Metric(
            f"{role}/router_z_loss",
            POOLED,
            "updates",
            f"z-loss of a mini-batch summed over the layers, before its coefficient; not part of `{role}/loss`.",
        ),
    )


ROUTERS = (
    *_routing("policy", "log-prob pass"),
    *_routing("critic", "value pass"),
    Metric(
        "mismatch/experts_frac",
        POOLED,
        "tokens (prompts too, without pads) and layers",
        "Share of (token, layer) pairs that the trainer's log-prob pass would send to other experts than the rollout engine did, with the "
        "same weights, and does not with `model.router.replay: engine` (recorded only there).",
    ),
)
