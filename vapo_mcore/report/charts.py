"""Declare the charts of the page: metrics, meaning, and what a healthy run looks like."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from vapo_mcore.config.verifiers import UNGRADED

Kind = Literal["lines", "evaluations", "histogram", "profile", "phases"]


@dataclass(frozen=True)
class Chart:
    """One chart. ``metrics``: metric name -> legend label. ``log``: start with a logarithmic scale.

    Charts of kind ``evaluations`` and ``phases`` find their metrics themselves; ``profile`` needs ``by``.
    """

    title: str
    about: str
    metrics: dict[str, str]
    kind: Kind = "lines"
    log: bool = False
    unit: str = ""
    by: str = ""


@dataclass(frozen=True)
class Section:
    """Charts under a heading. ``needs``: a metric without which the section is left out."""

    title: str
    about: str
    charts: tuple[Chart, ...]
    needs: str | None = None


SECTIONS = (
    Section(
        "Is it learning?",
        "Training rollouts are sampled from the policy of each step; evaluations use problems that training never sees.",
        (
            Chart(
                "Reward",
                "Mean reward of a step's responses, after scaling and shaping. Healthy: rises, with noise, and then flattens.",
                {"reward/mean": "reward"},
            ),
            Chart(
                "Accuracy",
                "Share of responses that the verifier grades as correct. Healthy: rises with the reward; a reward that rises alone "
                "indicates reward hacking.",
                {"accuracy/mean": "accuracy"},
            ),
            Chart(
                "Evaluation",
                "Mean accuracy on held-out problems with its 95 % interval over problems. Healthy: follows the training accuracy; a "
                "growing gap indicates overfitting.",
                {},
                kind="evaluations",
            ),
            Chart(
                "Groups by verdicts",
                "Share of prompts whose responses are all right, all wrong, or mixed. Only mixed groups give a group estimator a "
                "signal; a critic learns from all groups.",
                {"groups/mixed_frac": "mixed", "groups/all_right_frac": "all right", "groups/all_wrong_frac": "all wrong"},
            ),
            Chart(
                "Group accuracy",
                "Share of prompts by how many of their responses are right, from none to all. Healthy: mass moves to the right; much "
                "mass at the ends means that prompts are too easy or too hard.",
                {"groups/accuracy_histogram": "groups"},
                kind="histogram",
            ),
        ),
    ),
    Section(
        "Responses",
        "Length and diversity of the responses, and how often they are truncated.",
        (
            Chart(
                "Response length",
                "Mean, longest and shortest response. Healthy: changes slowly; growth with reward is usual, growth without it is rambling.",
                {"response/length_mean": "mean", "response/length_max": "longest", "response/length_min": "shortest"},
                unit="tokens",
            ),
            Chart(
                "Truncated responses",
                "Share truncated by rollout.max_response_length. Healthy: a few percent; with more, rewards are lost to the limit.",
                {"response/truncated_frac": "truncated"},
            ),
            Chart(
                "Lengths",
                "Share of responses by length. A peak in the last bin means that the length limit truncates responses.",
                {"response/length_histogram": "responses"},
                kind="histogram",
                unit="tokens",
            ),
            Chart(
                "Responses without a verdict",
                "Left out of training, by cause. Healthy: none; ground truths that cannot be judged against need another "
                "verifier or better data.",
                {f"grading/failed_{cause}": cause.replace("_", " ") for cause in UNGRADED},
                unit="responses",
            ),
            Chart(
                "Entropy",
                "Mean entropy of the sampling distribution over response tokens. Healthy: falls slowly; a fall towards 0 is entropy "
                "collapse, a steady rise is drift.",
                {"policy/entropy": "entropy"},
                unit="nats",
            ),
        ),
    ),
    Section(
        "Policy update",
        "How far each step moves the policy, and whether trainer and rollout engine agree on the log-probs of the samples.",
        (
            Chart(
                "KL of the update",
                "k3 estimate of KL(old || new) over the step's updates. Healthy: small and steady; spikes are steps that were too large.",
                {"policy/approx_kl": "approx. KL"},
                log=True,
            ),
            Chart(
                "Clip fractions",
                "Share of tokens clipped at the upper and at the lower bound. Healthy: a few percent at most; Clip-Higher widens the "
                "upper bound.",
                {"policy/clip_frac_high": "upper", "policy/clip_frac_low": "lower", "policy/clip_frac_dual": "dual"},
            ),
            Chart(
                "Mismatch",
                "Mean and largest |trainer - rollout| log-probability of sampled tokens, with the same weights. Healthy: flat at "
                "rounding (1e-5 in float32, 1e-2 in bfloat16); a rise means stale or differently computed weights.",
                {"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "largest"},
                log=True,
            ),
            Chart(
                "Mismatch KL",
                "k3 estimate of KL(rollout || trainer). Healthy: tiny and flat.",
                {"mismatch/kl": "KL"},
                log=True,
            ),
            Chart(
                "KL to the reference",
                "KL from the policy to the frozen initial policy. Healthy: grows slowly, or settles under a penalty.",
                {"kl/reference": "KL"},
            ),
            Chart(
                "Policy losses",
                "Clipped surrogate and the NLL of correct responses, before its coefficient. The surrogate stays near 0: jumps matter, "
                "its value does not.",
                {"policy/surrogate_loss": "surrogate", "policy/nll_loss": "NLL of correct"},
            ),
            Chart(
                "Policy gradient norm",
                "Gradient norm before clipping. Healthy: steady; clip_grad limits the spikes.",
                {"policy/grad_norm": "norm"},
                log=True,
            ),
        ),
    ),
    Section(
        "Critic",
        "VAPO depends on its critic: advantages are meaningful only if values predict returns.",
        (
            Chart(
                "Value loss",
                "1/2 (V - R)^2 over response tokens. Healthy: falls in value pretraining, then follows the variance of the returns.",
                {"critic/loss": "loss"},
                log=True,
            ),
            Chart(
                "Explained variance",
                "1 - Var(R - V) / Var(R) before the update, R the reward-to-go: 1 is perfect, 0 no better than a constant. Healthy: above "
                "0 after pretraining and rising; far below 0 misleads the policy. Of the targets it flatters below lambda_critic = 1.",
                {
                    "critic/explained_variance_mc": "of the reward-to-go",
                    "critic/probe_explained_variance": "on held-out prompts",
                    "critic/explained_variance": "of the critic's targets",
                },
            ),
            Chart(
                "Values and returns",
                "Means over response tokens. Healthy: values follow returns; a lasting gap is bias.",
                {"critic/values_mean": "values", "critic/returns_mean": "returns"},
            ),
            Chart(
                "By position",
                "Mean value (solid) and return (dashed) in 20 equal parts of a response, first to last. Healthy: the curves coincide; a "
                "gap at the start is the bias that value pretraining and lambda = 1 remove.",
                {"critic/values_by_position": "values", "critic/returns_by_position": "returns"},
                kind="profile",
                by="position",
            ),
            Chart(
                "By response length",
                "Mean value (solid) and return (dashed) by response length. Healthy: the curves coincide; if they diverge for long "
                "responses, length-adaptive lambda matters.",
                {"critic/values_by_length": "values", "critic/returns_by_length": "returns"},
                kind="profile",
                by="length",
            ),
            Chart(
                "Calibration",
                "Mean value (solid) and return (dashed) of tokens binned by predicted value, from the lowest to the highest reward. "
                "Healthy: the curves coincide over a wide range; values in a single bin mean that the critic predicts a constant.",
                {"critic/values_by_prediction": "values", "critic/returns_by_prediction": "returns"},
                kind="profile",
                by="prediction",
            ),
            Chart(
                "Critic gradient norm",
                "Gradient norm before clipping. Healthy: steady.",
                {"critic/grad_norm": "norm"},
                log=True,
            ),
        ),
    ),
    Section(
        "Advantages",
        "The training signal of each token.",
        (
            Chart(
                "Spread of advantages",
                "Standard deviation before whitening. Healthy: shrinks as the critic improves; near 0 there is no training signal left.",
                {"advantages/std": "std"},
            ),
            Chart(
                "Lambda",
                "Mean lambda of the policy's GAE, and the share of responses with lambda = 0. Healthy: near 1 for long responses; a "
                "large share at 0 means that alpha is too small for these lengths.",
                {"gae/lambda_mean": "mean lambda", "gae/lambda_zero_frac": "share at 0"},
            ),
            Chart(
                "Lambda distribution",
                "Share of responses by lambda, in 20 bins of [0, 1].",
                {"gae/lambda_histogram": "responses"},
                kind="histogram",
            ),
        ),
    ),
    Section(
        "Horizon",
        "rollout.horizon: unfinished responses continue in the next step (horizon.md).",
        (
            Chart(
                "Open and ended responses",
                "Responses open in a step, those that ended in it, those that were cut, and ended ones that wait for their group. Healthy: "
                "steady after the first steps.",
                {"horizon/open": "open", "horizon/finished": "ended", "horizon/cut": "cut", "horizon/waiting": "waiting"},
                unit="responses",
            ),
            Chart(
                "Segments a response",
                "Steps that a response took, of those that ended. Healthy: steady; growth means longer responses.",
                {"horizon/segments_mean": "mean", "horizon/segments_max": "most"},
            ),
            Chart(
                "Segments",
                "Share of the ended responses by segments: 1, 2, ..., 15, and at least 16.",
                {"horizon/segments_histogram": "responses"},
                kind="histogram",
            ),
            Chart(
                "Idle replicas and empty slots",
                "Shares of the rollout's engine steps in which a replica has no work, and of slot steps without a running response. "
                "Healthy: lower than without a horizon; if empty slots stay high, a shorter horizon or more responses in flight help.",
                {"generate/idle_frac": "idle replicas", "generate/empty_frac": "empty slots"},
            ),
            Chart(
                "Staleness",
                "Age of the trained tokens in steps (train: completed). Healthy: a mean of one step or two.",
                {"horizon/staleness_mean": "mean", "horizon/staleness_max": "oldest"},
                unit="steps",
            ),
            Chart(
                "Ages of tokens",
                "Share of the trained tokens by age: 0 (sampled in the step), 1, ..., 14, and at least 15 steps (train: completed).",
                {"horizon/staleness_histogram": "tokens"},
                kind="histogram",
            ),
            Chart(
                "Weight of values at cuts",
                "Share of the policy's tokens whose response was cut, and mean weight of the critic's value there in their advantages "
                "(train: segments). Healthy: a small weight.",
                {"horizon/bootstrapped_frac": "cut", "horizon/cut_weight": "weight of the value"},
            ),
            Chart(
                "Error of values at cuts",
                "The critic's value at a cut minus the return that came later, and the calibration error (train: segments). Healthy: the "
                "bias is around 0, within twice its standard error; else the horizon is too short for this critic.",
                {
                    "horizon/cut_value_bias": "bias",
                    "horizon/cut_value_bias_se": "standard error",
                    "horizon/cut_value_error": "calibration error",
                },
            ),
            Chart(
                "Calibration at cuts",
                "Mean value at cuts (solid) and return that came later (dashed), binned by value, from the lowest to the highest reward. "
                "Healthy: the curves coincide.",
                {"critic/values_by_cut": "values", "critic/returns_by_cut": "returns"},
                kind="profile",
                by="cut",
            ),
            Chart(
                "Tokens prefilled again",
                "Prompts and earlier segments of continued responses, against the tokens that the step sampled. Healthy: well below ten "
                "per sampled token, since a prefilled token costs less than a sampled one.",
                {"tokens/reprefilled": "prefilled again", "sampling/tokens": "sampled"},
                unit="tokens",
            ),
        ),
        needs="horizon/open",
    ),
    Section(
        "Time and memory",
        "Time of a step by phase. Each phase is that of its slowest rank, so the phases may sum to slightly more than the step.",
        (
            Chart(
                "Phases",
                "Mean seconds per step by phase. Healthy: generation dominates.",
                {},
                kind="phases",
            ),
            Chart(
                "Seconds per step",
                "Healthy: follows the response length; jumps come from stragglers, checkpoints or other load.",
                {"time/step": "step", "time/generate": "generation", "time/generate_mean": "generation, mean rank"},
                unit="s",
            ),
            Chart(
                "Tokens per second",
                "Prompt and response tokens of the step, divided by its seconds.",
                {"tokens/per_second": "tokens/s"},
            ),
            Chart(
                "Memory",
                "Resident memory of a process and peak allocated device memory, each on the rank with the most. Healthy: flat; a steady "
                "rise is a leak.",
                {"memory/host_gib": "host", "memory/device_peak_gib": "device"},
                unit="GiB",
            ),
        ),
    ),
)


_PLAIN = ("title", "about", "kind", "log", "unit", "by")


def sections(recorded: Collection[str]) -> list[dict[str, Any]]:
    """Return the sections for the page. Recorded metrics without a chart get a small one in a last section."""
    shown = [section for section in SECTIONS if section.needs is None or section.needs in recorded]
    drawn = {name for section in shown for chart in section.charts for name in chart.metrics}
    rest = sorted(name for name in recorded if name not in drawn and not name.startswith("eval/"))
    small = tuple(Chart(name, "", {name: name}) for name in rest)
    last = Section("All other metrics", "All other numbers recorded by the steps; docs/metrics.md describes each.", small)
    return [
        {
            "title": section.title,
            "about": section.about,
            "folded": section is last,
            "charts": [
                {name: getattr(chart, name) for name in _PLAIN} | {"metrics": list(chart.metrics.items())} for chart in section.charts
            ],
        }
        for section in (*shown, last)
        if section.charts
    ]


def titles_and_metrics() -> list[tuple[str, list[str]]]:
    """Return title and metrics of every chart that declares metrics, without sections that not every run has."""
    charts = [chart for section in SECTIONS if section.needs is None for chart in section.charts]
    return [(chart.title, list(chart.metrics)) for chart in charts if chart.metrics]
