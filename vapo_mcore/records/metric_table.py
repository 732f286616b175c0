"""Declare all metrics with their reductions. ``docs/metrics.md`` is generated from this table:

python -m vapo_mcore.records.metric_table > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from vapo_mcore.config.verifiers import UNGRADED
from vapo_mcore.records.metrics import Metric, Reduction
from vapo_mcore.records.option_metrics import HORIZON, ROUTERS

MEAN, STD, MAX, MIN = Reduction.MEAN, Reduction.STD, Reduction.MAX, Reduction.MIN
POOLED, SAME = Reduction.POOLED, Reduction.REPLICATED

_PROGRESS = (
    Metric("step", SAME, "-", "Number of the step in its stage, from 1. A step is one rollout."),
    Metric("stage", SAME, "-", "`value_pretraining` or `rl`."),
    Metric("policy/updates", SAME, "-", "Optimizer steps of the policy since the start; what learning-rate schedules count."),
    Metric("critic/updates", SAME, "-", "Optimizer steps of the critic since the start, value pretraining included."),
)
_RESPONSES = (
    Metric(
        "reward/mean",
        SAME,
        "graded responses",
        "Mean reward after scaling and shaping, without step rewards and KL penalty.",
    ),
    Metric("reward/std", SAME, "graded responses", "Population standard deviation of that reward."),
    Metric("reward/raw_mean", SAME, "graded responses", "Mean raw score of the verifier."),
    Metric("reward/steps_mean", SAME, "graded responses", "Mean sum of the rewards of a response's steps and turns (0 without any)."),
    Metric("reward/steps_per_response", SAME, "graded responses", "Mean number of rewards inside a response."),
    Metric("accuracy/mean", SAME, "graded responses", 'Share of responses whose raw verdict is "correct", after dynamic sampling.'),
    Metric(
        "groups/mixed_frac",
        SAME,
        "groups",
        "Share of groups with both right and wrong verdicts (the others give a group estimator no signal).",
    ),
    Metric("groups/all_right_frac", SAME, "groups", "Share of groups with all graded verdicts right."),
    Metric("groups/all_wrong_frac", SAME, "groups", "Share of groups with all graded verdicts wrong."),
    Metric(
        "groups/accuracy_histogram",
        SAME,
        "groups",
        "Counts of groups by the share of right verdicts: exactly 0, then 10 equal bins between 0 and 1, then exactly 1.",
    ),
    Metric("response/length_mean", SAME, "responses", "Mean response length in tokens, EOS included."),
    Metric("response/length_max", SAME, "responses", "Longest response in tokens."),
    Metric("response/length_min", SAME, "responses", "Shortest response in tokens."),
    Metric(
        "response/length_histogram",
        SAME,
        "responses",
        "Counts in 16 equal bins of 1 to `rollout.max_response_length` tokens; empty responses are in the first.",
    ),
    Metric("response/truncated_frac", SAME, "responses", "Share of responses truncated by `rollout.max_response_length`."),
    Metric(
        "response/missed_end",
        SAME,
        "responses",
        "Truncated responses that contain an end-of-turn text, such as `<end_of_turn>`: the engine did not stop there.",
    ),
    Metric("response/count", SAME, "responses", "Responses of the step, after dynamic sampling."),
    Metric(
        "grading/failed",
        SAME,
        "responses",
        "Responses without a verdict; left out of training and of group statistics.",
    ),
    *(Metric(f"grading/failed_{cause}", SAME, "responses", f"Those of them for which {text}.") for cause, text in UNGRADED.items()),
    Metric(
        "grading/restarts",
        SAME,
        "replicas",
        "Times since the last step that the graders of a replica could not be kept alive and were all replaced (`faults.grader_restarts`).",
    ),
    Metric(
        "sampling/engine_rebuilds",
        SAME,
        "-",
        "Rebuilds of a failed rollout engine since the last step (`faults.engine_rebuilds`); its requests are repeated "
        "with the same seeds.",
    ),
    Metric(
        "generate/idle_frac",
        SAME,
        "engine steps",
        "Share of the replicas' engine steps without work, until the slowest replica has sampled its last token; computed from the "
        "lengths, with `rollout.vllm.max_num_seqs` responses at a time, without prefills (null with an environment or dynamic sampling).",
    ),
    Metric(
        "generate/empty_frac",
        SAME,
        "engine steps",
        "Share of slot steps without a running response until then, including `generate/idle_frac`: the time lost to long responses.",
    ),
    Metric("sampling/rounds", SAME, "-", "Rounds of dynamic sampling (1 without it)."),
    Metric("sampling/prompts_tried", SAME, "prompts", "Prompts sampled, dropped ones included."),
    Metric("sampling/responses", SAME, "responses", "Responses sampled, those of dropped groups included."),
    Metric("sampling/tokens", SAME, "response tokens", "Tokens of all of them."),
    Metric(
        "sampling/accuracy",
        SAME,
        "graded responses sampled",
        "Share of all sampled responses that are correct. Dynamic sampling drops the groups that are all right, so `accuracy/mean`, which "
        "covers only the kept ones, hides progress.",
    ),
    Metric("sampling/dropped_all_right", SAME, "groups", "Groups dropped by dynamic sampling because all verdicts were right."),
    Metric("sampling/dropped_all_wrong", SAME, "groups", "Groups dropped by dynamic sampling because all verdicts were wrong."),
    Metric("sampling/dropped_ungraded", SAME, "groups", "Groups dropped by dynamic sampling because no response had a verdict."),
    Metric("sampling/dropped_surplus", SAME, "groups", "Informative groups beyond a full batch, dropped."),
    Metric("turns/mean", SAME, "responses", "Mean number of the model's turns in a response (1 without an environment)."),
    Metric("turns/limit_frac", SAME, "responses", "Share of responses that the limit `max_turns` ended before the environment did."),
    Metric("turns/observations_cut", SAME, "observations", "Observations longer than `max_observation_length`, which were truncated."),
    Metric("tokens/tool", SAME, "tokens", "Tokens between the turns that the environment wrote; they carry no loss."),
    Metric("tokens/response", SAME, "response tokens", "Response tokens of the step, sampled by the model."),
    Metric("tokens/total", SAME, "tokens", "Prompt and response tokens of the step."),
    Metric(
        "tokens/trained",
        SAME,
        "response tokens",
        "Response tokens that carry a loss (graded, not masked by `truncation: mask`, not too old).",
    ),
)
_POLICY = (
    Metric(
        "policy/loss",
        MEAN,
        "updates",
        "The mini-batch's whole policy loss (surrogate + coef x NLL + coef x KL - coef x entropy + coef x each user-defined term).",
    ),
    Metric("policy/surrogate_loss", MEAN, "updates", "Clipped surrogate part of the loss, importance weights included."),
    Metric(
        "policy/nll_loss",
        MEAN,
        "updates",
        "Positive-example NLL per token of correct responses, before its coefficient; exactly 0 without a correct response.",
    ),
    Metric("policy/kl_loss", MEAN, "updates", "KL to the reference as in the loss, before its coefficient (`kl.place: loss`)."),
    Metric(
        "policy/entropy",
        MEAN,
        "response tokens",
        "Entropy of the sampling distribution before the step's updates (with `old_logprobs: rollout`: in the first update alone).",
    ),
    Metric("policy/approx_kl", MEAN, "response tokens of all updates", "k3 estimate r - 1 - log r of KL(old || new), r = new / old."),
    Metric(
        "policy/approx_kl_first",
        MEAN,
        "response tokens of the first update",
        "The same before the step's first update: must be at most 1e-6 in fp32 and 1e-3 in bf16, else `warnings` counts it.",
    ),
    Metric(
        "policy/clip_frac_high",
        MEAN,
        "response tokens of all updates",
        "Share of tokens held by the upper clip (A > 0, r > 1 + clip_high); with `cispo` of either sign of A.",
    ),
    Metric(
        "policy/clip_frac_low", MEAN, "response tokens of all updates", "Share of tokens held by the lower clip (A < 0, r < 1 - clip_low)."
    ),
    Metric(
        "policy/clip_frac_dual", MEAN, "response tokens of all updates", "Share of tokens held by the dual clip (A < 0, r > dual_clip)."
    ),
    Metric(
        "policy/covarying_frac",
        SAME,
        "response tokens",
        "Share of tokens that `clip_cov` leaves out or `kl_cov` punishes, chosen in each mini-batch (with these objectives).",
    ),
    Metric("policy/ratio_mean", MEAN, "response tokens of all updates", "Mean ratio new / old."),
    Metric("policy/grad_norm", MEAN, "updates", "Global gradient norm before clipping."),
    Metric("policy/lr", SAME, "-", "Learning rate of the step's last update."),
    Metric(
        "policy/updates_skipped",
        SAME,
        "updates",
        "Updates skipped on all ranks because the loss or a gradient was not finite on one of them, or the loss was a spike.",
    ),
    Metric("policy/loss_spikes", SAME, "updates", "Those of them that were skipped for a spike (with `faults.loss_spike`)."),
    Metric("policy/minibatches_masked", SAME, "mini-batches", "Mini-batches without a trainable token, in each pass: skipped, no update."),
    Metric(
        "policy/positive_tokens",
        SAME,
        "response tokens",
        "Tokens of correct responses, the denominators of the NLL summed over the mini-batches of one pass.",
    ),
)
_CRITIC = (
    Metric(
        "critic/loss",
        MEAN,
        "updates",
        "Value loss, 1/2 (V - R)^2 (with `value_loss.clip` the larger of that and the clipped one) averaged over response tokens of the "
        "mini-batch. Of a categorical head (`critic.categorical`) that of its expectation, which is not what it minimises.",
    ),
    Metric("critic/cross_entropy", MEAN, "updates", "The loss of a categorical head, in nats: cross-entropy with the returns' histograms."),
    Metric(
        "critic/returns_outside_frac",
        SAME,
        "response tokens",
        "Share of returns outside the bounds of a categorical head; above 1 % the run ends.",
    ),
    Metric("critic/clip_frac", MEAN, "response tokens of all updates", "Share of tokens where the clipped value loss was the larger one."),
    Metric(
        "critic/explained_variance",
        POOLED,
        "response tokens",
        "1 - Var(R - V) / Var(R), R the critic's targets, from the values predicted before the step's updates; null when the returns are "
        "constant. With `lambda_critic` < 1 the targets contain the values, which flatters: a critic of pure noise reaches 0.6 at 0.95.",
    ),
    Metric(
        "critic/explained_variance_mc",
        POOLED,
        "response tokens",
        "The same against the reward-to-go (Monte-Carlo returns), whatever `lambda_critic` is; what the diagnosis judges. Its ceiling is "
        "the task's, often far below 1: no critic predicts what sampling has yet to decide.",
    ),
    Metric(
        "critic/probe_explained_variance",
        POOLED,
        "response tokens of the probe",
        "The same on held-out prompts (`critic.probe`), after the step's critic updates and against Monte-Carlo returns: in each step of "
        "value pretraining, in every `critic.probe.every_steps`-th RL step and the last; absent in others.",
    ),
    Metric(
        "critic/probe_explained_variance_before",
        POOLED,
        "response tokens of the probe",
        "That of the critic before its first update; in the first step of value pretraining (after a resume: before the step's update).",
    ),
    Metric("critic/grad_norm", MEAN, "updates", "Global gradient norm before clipping."),
    Metric("critic/lr", SAME, "-", "Learning rate of the step's last update."),
    Metric(
        "critic/updates_skipped",
        SAME,
        "updates",
        "Updates skipped on all ranks because the loss or a gradient was not finite on one of them, or the loss was a spike.",
    ),
    Metric("critic/loss_spikes", SAME, "updates", "Those of them that were skipped for a spike (with `faults.loss_spike`)."),
    Metric("critic/minibatches_masked", SAME, "mini-batches", "Mini-batches without a trainable token, in each pass: skipped, no update."),
    Metric("critic/values_mean", MEAN, "response tokens", "Values predicted before the step's updates."),
    Metric("critic/values_min", MIN, "response tokens", "Smallest of them."),
    Metric("critic/values_max", MAX, "response tokens", "Largest of them."),
    Metric("critic/returns_mean", MEAN, "response tokens", "Targets of the critic."),
    Metric("critic/returns_std", STD, "response tokens", "Their spread."),
    Metric(
        "critic/values_by_position",
        POOLED,
        "response tokens",
        "Mean predicted value in 20 equal parts of a response, first to last; null for a part without tokens.",
    ),
    Metric("critic/returns_by_position", POOLED, "response tokens", "Mean target of the critic there."),
    Metric("critic/tokens_by_position", POOLED, "response tokens", "Tokens there."),
    Metric(
        "critic/explained_variance_by_position",
        POOLED,
        "response tokens",
        "`critic/explained_variance_mc` of the tokens there alone; null where their Monte-Carlo returns are constant.",
    ),
    Metric(
        "critic/values_by_length",
        POOLED,
        "response tokens",
        "Mean predicted value by the length of the response, in the bins of `response/length_histogram`; null for a bin without tokens.",
    ),
    Metric("critic/returns_by_length", POOLED, "response tokens", "Mean target of the critic there."),
    Metric("critic/tokens_by_length", POOLED, "response tokens", "Tokens there."),
    Metric(
        "critic/explained_variance_by_length",
        POOLED,
        "response tokens",
        "`critic/explained_variance_mc` of the tokens there alone; null where their Monte-Carlo returns are constant.",
    ),
    Metric(
        "critic/values_by_prediction",
        POOLED,
        "response tokens",
        "Calibration: mean predicted value of the tokens whose value is in each of 10 equal parts of the range of rewards (values beyond "
        "it in the end bins); null for a part without tokens.",
    ),
    Metric("critic/returns_by_prediction", POOLED, "response tokens", "Mean Monte-Carlo return there: the same, for a calibrated critic."),
    Metric("critic/tokens_by_prediction", POOLED, "response tokens", "Tokens there."),
)
_ADVANTAGES = (
    Metric("advantages/mean", MEAN, "response tokens", "Before whitening."),
    Metric("advantages/std", STD, "response tokens", "Before whitening."),
    Metric("advantages/min", MIN, "response tokens", "Before whitening."),
    Metric("advantages/max", MAX, "response tokens", "Before whitening."),
    Metric("advantages/clipped_frac", MEAN, "response tokens", "Share outside `algorithm.advantage.clip`, after whitening."),
    Metric("gae/lambda_mean", SAME, "trained responses", "Mean lambda of the policy's GAE."),
    Metric(
        "gae/lambda_zero_frac",
        SAME,
        "trained responses",
        "Share of responses whose lambda is 0 (length-adaptive: at most 1 / alpha tokens).",
    ),
    Metric("gae/lambda_histogram", SAME, "trained responses", "Counts in 20 equal bins of [0, 1]."),
    Metric(
        "kl/reference", MEAN, "response tokens", "KL estimate to the frozen reference, of the configured kind, before the step's updates."
    ),
)
_IMITATION = (
    Metric("imitation/nll", SAME, "response tokens drawn", "Mean NLL of the responses of the imitation step, before its coefficient."),
    Metric("imitation/responses", SAME, "responses", "Responses drawn from the buffer for it."),
    Metric("imitation/grad_norm", SAME, "-", "Global gradient norm of the imitation step, before clipping."),
    Metric("imitation/lr", SAME, "-", "Its learning rate."),
    Metric("imitation/skipped", SAME, "-", "Steps of policy and critic that were skipped because a loss or gradient was not finite."),
    Metric("imitation/value_loss", SAME, "response tokens drawn", "Value loss on these responses, before its coefficient."),
    Metric("imitation/buffer", SAME, "responses", "Responses in the buffer after the step."),
    Metric("imitation/age_mean", SAME, "responses in the buffer", "Mean number of rollouts since a response was last sampled."),
    Metric("imitation/age_max", SAME, "responses in the buffer", "Largest such number."),
)
_MISMATCH = (
    Metric(
        "mismatch/logprob_abs_mean",
        POOLED,
        "response tokens",
        "Mean |trainer - rollout| log-probability of the sampled token, same weights on both sides (all of `mismatch/*`: with "
        "`old_logprobs: rollout` over the first update's mini-batch alone).",
    ),
    Metric("mismatch/logprob_abs_max", POOLED, "response tokens", "Largest such difference."),
    Metric("mismatch/kl", POOLED, "response tokens", "k3 estimate of KL(rollout || trainer)."),
    Metric(
        "mismatch/ess",
        POOLED,
        "response tokens",
        "Effective sample size of the weights exp(trainer - rollout) as a share of the tokens, 1 when equal.",
    ),
    Metric(
        "mismatch/beyond_cap_frac",
        POOLED,
        "response tokens",
        "Share of these weights above `importance_correction.cap` (2 where nothing is corrected).",
    ),
)
_REJECTED = (
    Metric(
        "mismatch/rejected_low_frac",
        MEAN,
        "response tokens",
        "Share of tokens that a mask of `importance_correction` rejects because the ratio it judges (the token's or its response's) is "
        "below `low`.",
    ),
    Metric("mismatch/rejected_high_frac", MEAN, "response tokens", "Share that it rejects because that ratio is above `cap`."),
    Metric("mismatch/responses_rejected_frac", MEAN, "responses", "Share of responses that lose at least one token to the mask."),
    Metric("mismatch/responses_lost_frac", MEAN, "responses", "Share of responses that lose all their tokens to it."),
)
_SYSTEM = (
    Metric("warnings", SAME, "-", "Number of diagnosis rules that hold after this step (diagnosis.md lists the rules)."),
    Metric("trackers/failed", SAME, "-", "Trackers (TensorBoard, W&B) that failed and are switched off; absent without any."),
    Metric("weights/tensors", SAME, "tensors", "Tensors sent to the rollout engine in the step's weight sync."),
    Metric("weights/bytes", SAME, "bytes", "Their size."),
    Metric("packing/fill", SAME, "micro-batches", "Tokens / (micro-batches x `batch.max_tokens_per_microbatch`)."),
    Metric("packing/microbatches", SAME, "micro-batches", "Micro-batches of a data-parallel rank in one pass over the step."),
    Metric("packing/imbalance", SAME, "data-parallel ranks", "Largest / mean number of tokens of a data-parallel rank over the step."),
    Metric("tokens/per_second", SAME, "tokens", "tokens/total divided by time/step."),
    Metric("time/step", MAX, "ranks", "Seconds of the whole step."),
    Metric("time/generate", MAX, "ranks", "Seconds of sampling."),
    Metric("time/generate_mean", MEAN, "data-parallel ranks", "Its mean; replicas waited for the slowest in the rest of `time/generate`."),
    Metric("time/environment", MAX, "ranks", "Seconds of waiting for the environment between the turns (only with one)."),
    Metric("time/engine_rebuild", MAX, "ranks", "Seconds of rebuilding a failed rollout engine, in steps that had to."),
    Metric("time/reward", MAX, "ranks", "Seconds of grading, waiting for the slowest replica included."),
    Metric("time/exchange", MAX, "ranks", "Seconds of packing and of moving tokens to their owners."),
    Metric("time/logprobs", MAX, "ranks", "Seconds of the log-prob passes of policy and reference."),
    Metric("time/values", MAX, "ranks", "Seconds of the critic's forward passes."),
    Metric("time/probe", MAX, "ranks", "Seconds of sampling the critic's probe and of the critic's passes over it."),
    Metric("time/advantages", MAX, "ranks", "Seconds of rewards, advantages, whitening and checks."),
    Metric("time/critic_update", MAX, "ranks", "Seconds of the critic's updates."),
    Metric("time/policy_update", MAX, "ranks", "Seconds of the policy's updates."),
    Metric("time/imitation", MAX, "ranks", "Seconds of the self-imitation steps of policy and critic."),
    Metric("time/checkpoint", MAX, "ranks", "Seconds that the step waited to be copied for a checkpoint."),
    Metric("time/dump", MAX, "ranks", "Seconds of writing the step's rollout, in steps that are dumped (`run.dump_steps`)."),
    Metric("time/weight_sync", MAX, "ranks", "Seconds of export and loading into the rollout engine."),
    Metric("time/other", MAX, "ranks", "Seconds of the step outside the phases above."),
    Metric("time/run", SAME, "-", "Seconds since the run's models were built, evaluations and the processes it was resumed from included."),
    Metric("time/gpu_hours", SAME, "-", "The same in hours of all processes together (without GPUs a process counts as one)."),
    Metric("memory/host_gib", MAX, "ranks", "Resident memory of a process at the end of the step."),
    Metric("memory/device_peak_gib", MAX, "ranks", "Peak of PyTorch's allocator on the device during the step (GPU only)."),
)

_TERM = Metric("policy/term/<name>", MEAN, "updates", "User-defined loss term, weighted and summed, before its coefficient.")


_FOUND = Metric("diagnosis/<rule>", SAME, "steps", "Steps so far in which the rule has held; absent as long as it never has.")


_BY_SOURCE = (
    Metric("source/<name>/responses", SAME, "responses", "Responses to prompts of this source; all `source/*` with several sources only."),
    Metric("source/<name>/reward", SAME, "graded responses", "Mean reward of this source."),
    Metric("source/<name>/accuracy", SAME, "graded responses", 'Share of its responses whose raw verdict is "correct".'),
    Metric("source/<name>/length_mean", SAME, "responses", "Mean response length of this source in tokens."),
)


def metrics_of(loss_terms: Iterable[str], sources: Collection[str] = ()) -> tuple[Metric, ...]:
    """Return the table of a run: ``METRICS``, one for each user-defined loss term and, with several training sources, those of each."""
    named = [(_TERM, name) for name in loss_terms]
    named += [(metric, name) for name in sources for metric in _BY_SOURCE] if len(sources) > 1 else []
    return (*METRICS, *(replace(metric, name=metric.name.replace("<name>", name)) for metric, name in named))


METRICS: tuple[Metric, ...] = (
    *_PROGRESS,
    *_RESPONSES,
    *_ADVANTAGES,
    *_POLICY,
    *_CRITIC,
    *ROUTERS,
    *_IMITATION,
    *_MISMATCH,
    *HORIZON,
    *_REJECTED,
    *_SYSTEM,
)

EVALUATION = (
    ("avg@k", "Mean over problems of the mean verdict of their k graded responses."),
    ("ci_low", "Lower end of its 95 % interval over problems: bootstrap, or Wilson's where all problems score the same."),
    ("ci_high", "Upper end."),
    ("pass@k", "Share of problems with a right one among k responses (unbiased estimate); for k > 1."),
    ("maj@k", "Share of problems whose most frequent answer is right (evaluation.md); for k > 1; null if the verifier extracts none."),
    ("prompts", "Problems with at least one graded response."),
    ("failed", "Responses without a verdict; left out."),
    ("length_mean", "Mean response length in tokens."),
    ("length_max", "Longest response in tokens."),
    ("truncated_frac", "Share of responses truncated by the length limit."),
)

TOKEN_LISTS = (
    ("text", "What the token adds to the text, special tokens included."),
    ("rollout_logprob", "Log-prob by the rollout engine, when it was sampled."),
    ("logprob", "Log-prob by the trainer before the step's updates (none in value pretraining)."),
    ("value", "V of the state before the token, as the advantages read it (with `values: after_update` after the critic's update)."),
    ("return", "The critic's target."),
    ("advantage", "As the policy loss reads it: whitened, if that is configured (none in value pretraining)."),
)

_REDUCTION_TEXT = {
    MEAN: "mean (sum / count over DP, micro-batches and updates)",
    STD: "population standard deviation over DP",
    POOLED: "over the tokens of all DP ranks together",
    MAX: "maximum over ranks",
    MIN: "minimum over ranks",
    SAME: "from the replicated rows or settings: same on all ranks",
}


def render_markdown() -> str:
    """Return the text of ``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "`<run.dir>/metrics.jsonl` has one JSON object a step; TensorBoard shows the same numbers, except lists. A metric that",
        "the mode does not have (a critic's, without a critic) is absent; one that is undefined in a step is `null`; a number that is not",
        'finite is `null` and named in `metrics/nonfinite`. "Response tokens" are those that carry a loss, over all data-parallel ranks,',
        'unless stated otherwise. "Updates" are the ones applied: means leave out skipped updates. This page is written by',
        "`python -m vapo_mcore.records.metric_table`.",
        "",
        "| metric | over | reduction | meaning |",
        "|---|---|---|---|",
    ]
    bar = r"\|"  # a bar inside a cell
    shown = (*METRICS, *_BY_SOURCE, _TERM, _FOUND)
    lines += [f"| `{m.name}` | {m.over} | {_REDUCTION_TEXT[m.reduction]} | {m.text.replace('|', bar)} |" for m in shown]
    lines += [
        "",
        "## Evaluations",
        "",
        "Evaluated steps carry, for each set of `data.eval`, `eval/<set>/...`; `time/eval` is the time of all of them, outside",
        "`time/step`. An evaluation before the first step is a separate row with `step` 0.",
        "",
        "| metric | meaning |",
        "|---|---|",
    ]
    lines += [f"| `eval/<set>/{name}` | {text} |" for name, text in EVALUATION]
    lines += [
        "",
        "## Samples",
        "",
        "`samples/step_NNNN.jsonl`, `value_pretraining_NNNN.jsonl` (`run.samples_per_step` responses) and `eval_step_NNNN.jsonl` have",
        "one response a line: its prompt, text, verdict, score and length. Those of training have `reward` and, unless the response is",
        "left out of training, `tokens`: lists with an entry for each token after the prompt, null where it carries no loss.",
        "With `rollout.horizon`, a response that was sampled in earlier steps has `segments`: tokens and age in steps of each.",
        "",
        "| list | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {text} |" for name, text in TOKEN_LISTS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
