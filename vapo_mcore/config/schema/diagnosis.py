"""Diagnosis: thresholds of the rules that detect known failures of a run (diagnosis.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vapo_mcore.config.schema.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section, UnitFloat

Illness = Literal[
    "explained_variance",
    "critic_stuck",
    "value_loss_rising",
    "entropy_collapse",
    "length_collapse",
    "truncation_rising",
    "clip_fraction",
    "rollout_mismatch",
    "first_step_kl",
    "stale_weights",
    "lambda_zero",
    "uniform_groups",
    "busiest_expert",
    "grader_failures",
    "missed_ends",
    "skipped_updates",
    "untrained_minibatches",
    "horizon_bias",
]
Ratio = Annotated[float, Field(gt=1)]


class ExplainedVarianceRule(Section):
    window: PositiveInt = 10  # RL steps
    below: Annotated[float, Field(le=1)] = 0.0  # mean of critic/explained_variance_mc, by more than twice its standard error


class CriticStuckRule(Section):
    window: PositiveInt = 20  # RL steps
    below: Annotated[float, Field(le=1)] = 0.05  # mean of critic/explained_variance_mc, by more than twice its standard error


class ValueLossRule(Section):
    window: PositiveInt = 5  # RL steps
    rise: Ratio = 2.0  # relative to the best earlier window; both losses divided by that of the best constant prediction


class EntropyRule(Section):
    window: PositiveInt = 5  # RL steps
    fraction: Fraction = 0.1  # of policy/entropy in the first window


class LengthRule(Section):
    window: PositiveInt = 5  # RL steps
    fraction: Fraction = 0.5  # of response/length_mean in the first window, while accuracy is no higher than there


class TruncationRule(Section):
    window: PositiveInt = 5  # RL steps
    rise: UnitFloat = 0.1  # rise of the mean response/truncated_frac over its lowest earlier window


class ClipRule(Section):
    window: PositiveInt = 5  # RL steps
    above: UnitFloat = 0.2  # mean share of tokens held by a clip


class MismatchRule(Section):
    window: PositiveInt = 1  # RL steps
    above: PositiveFloat | None = None  # mean mismatch/logprob_abs_mean; null: 1e-3 in float32, 5e-2 in bfloat16


class FirstKlRule(Section):
    above: PositiveFloat | None = None  # policy/approx_kl_first; null: 1e-6 in float32, 1e-3 in bfloat16


class StaleWeightsRule(Section):
    window: PositiveInt = 2  # RL steps, all of which must exceed the limit
    growth: Ratio = 5.0  # of mismatch/logprob_abs_mean over that of the first step, in which both sides have the loaded weights


class LambdaZeroRule(Section):
    window: PositiveInt = 5  # RL steps
    above: UnitFloat = 0.5  # mean of gae/lambda_zero_frac


class UniformGroupsRule(Section):
    window: PositiveInt = 5  # RL steps
    above: UnitFloat = 0.9  # mean share of groups that are all right or all wrong


class BusiestExpertRule(Section):
    window: PositiveInt = 5  # RL steps
    above: UnitFloat = 0.9  # mean of policy/experts_busiest_max


class CountRule(Section):
    window: PositiveInt = 1  # steps, including value pretraining
    above: NonNegativeFloat = 0.0  # share of the items that the rule counts


class GraderRule(CountRule):
    above: NonNegativeFloat = 0.01  # share of the responses


class MissedEndRule(CountRule):
    above: NonNegativeFloat = 0.5  # share of the responses


class HorizonBiasRule(Section):
    window: PositiveInt = 10  # RL steps
    # Bias of the mean advantage from the critic's values at cuts, relative to advantages/std; it must exceed twice its standard error.
    above: PositiveFloat = 0.1


class DiagnosisConfig(Section):
    """Rules over the metrics of past steps. A rule that holds is printed with its evidence and counted; ``null`` disables it."""

    explained_variance: ExplainedVarianceRule | None = ExplainedVarianceRule()
    critic_stuck: CriticStuckRule | None = CriticStuckRule()
    value_loss_rising: ValueLossRule | None = ValueLossRule()
    entropy_collapse: EntropyRule | None = EntropyRule()
    length_collapse: LengthRule | None = LengthRule()
    truncation_rising: TruncationRule | None = TruncationRule()
    clip_fraction: ClipRule | None = ClipRule()
    rollout_mismatch: MismatchRule | None = MismatchRule()
    first_step_kl: FirstKlRule | None = FirstKlRule()
    stale_weights: StaleWeightsRule | None = StaleWeightsRule()
    lambda_zero: LambdaZeroRule | None = LambdaZeroRule()
    uniform_groups: UniformGroupsRule | None = UniformGroupsRule()
    busiest_expert: BusiestExpertRule | None = BusiestExpertRule()  # only for mixtures of experts
    grader_failures: GraderRule | None = GraderRule()  # responses without a verdict
    missed_ends: MissedEndRule | None = MissedEndRule()  # truncated responses with an end-of-turn text
    skipped_updates: CountRule | None = CountRule()  # share of the updates
    untrained_minibatches: CountRule | None = CountRule()  # share of the mini-batches
    horizon_bias: HorizonBiasRule | None = HorizonBiasRule()  # only with rollout.horizon and train: segments
    halt_on: tuple[Illness, ...] = Field(strict=False, default=())  # rules that end the run after their step, with a checkpoint
