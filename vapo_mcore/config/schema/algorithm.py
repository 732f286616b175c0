"""Advantages and losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vapo_mcore.config.schema.base import (
    Estimator,
    Fraction,
    Interval,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Reference,
    Section,
    UnitFloat,
)


class LambdaConfig(Section):
    """GAE lambda of the policy: ``fixed`` value; ``length_adaptive`` 1 - 1/(alpha l); ``sigmoid`` of the standardised length."""

    kind: Literal["fixed", "length_adaptive", "sigmoid"] = "length_adaptive"  # l: the response's length in tokens
    value: UnitFloat = 0.95  # lambda
    alpha: PositiveFloat = 0.05  # the advantage reaches over about alpha l tokens
    min: UnitFloat = 0.3  # lambda that short responses approach
    max: UnitFloat = 0.95  # lambda that long responses approach


class ProcessConfig(Section):
    """Process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): step rewards come from a verifier that gives them."""

    normalise: Literal["group", "batch"] = "group"  # step rewards, over all steps of the prompt's responses or of the rollout
    outcome: bool = True  # count the response's reward as one more step, at its last token; false: only the steps


class CustomEstimatorConfig(Section):
    """A user-defined advantage estimator (extending.md)."""

    function: Reference  # package.module:name or path/to/file.py:name; its parameters say what it reads
    critic: bool = False  # build a critic, trained on lambda_critic's returns, whose values the function may read
    options: dict[str, Any] = Field({})  # its keyword-only parameters


class AdvantageConfig(Section):
    # gae has a critic, the others build none (custom: on request); grpo_process reads the step rewards of a verifier
    estimator: Estimator = "gae"
    custom: CustomEstimatorConfig | None = None
    gamma: Fraction = 1.0  # discount
    lambda_policy: LambdaConfig = LambdaConfig()
    lambda_critic: UnitFloat = 1.0  # lambda of the critic's targets; 1: Monte-Carlo returns
    # Values that the advantages use: predicted before or after this step's critic update.
    values: Literal["before_update", "after_update"] = "before_update"
    # Scale advantages to mean 0 and variance 1; default: batch for gae and reinforce_pp, off for the others.
    whiten: Literal["batch", "minibatch", "off"] = Field(
        default_factory=lambda data: "batch" if data["estimator"] in ("gae", "reinforce_pp") else "off"
    )
    # Clip whitened advantages to [lowest, highest]; null: unbounded.
    clip: Interval | None = None
    # After a response truncated by the length limit: V = 0, the critic's V, or the response carries no loss.
    truncation: Literal["terminal", "bootstrap", "mask"] = "terminal"

    process: ProcessConfig = ProcessConfig()  # settings of grpo_process

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae" or (self.estimator == "custom" and self.custom is not None and self.custom.critic)


class ImportanceCorrectionConfig(Section):
    """Correction of the difference between the rollout's and the trainer's old log-probs.

    ``token_truncate`` weights by min(ratio, cap); the masks drop tokens or sequences whose ratio is outside [low, cap]: the token's, the
    geometric mean over the response, or their product, which then is the weight of all its tokens (``sequence_product_mask``).
    """

    kind: Literal["off", "token_truncate", "token_mask", "sequence_mask", "sequence_product_mask"] = "off"  # off: only measure the mismatch
    cap: PositiveFloat = 2.0  # largest ratio
    low: PositiveFloat = 0.5  # smallest ratio


class CustomLossConfig(Section):
    """A user-defined objective that replaces the surrogate (extending.md): one value per token, weighted by ``aggregation``."""

    function: Reference  # package.module:name or path/to/file.py:name; its parameters say what it reads
    options: dict[str, Any] = Field({})  # its keyword-only parameters


class CovarianceConfig(Section):
    """Choice of the tokens that ``clip_cov`` leaves out or ``kl_cov`` penalises, by the covariance of log-prob and advantage."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 2.0e-4  # fraction of the mini-batch's tokens, at least one token
    low: float = 1.0  # clip_cov draws from the tokens with a covariance above low and
    high: float = 5.0  # below high
    kl_coef: PositiveFloat = 1.0  # kl_cov: coefficient of |log ratio| at these tokens


class PolicyLossConfig(Section):
    # Clipped token ratios; clipped ratio of the whole response (arXiv 2507.18071); clipped weights of log-probs (arXiv 2506.13585);
    # unclipped ratios, some tokens of high covariance left out or penalised by a KL term (arXiv 2505.22617).
    kind: Literal["ppo", "gspo", "cispo", "clip_cov", "kl_cov", "custom"] = "ppo"
    custom: CustomLossConfig | None = None
    covariance: CovarianceConfig = CovarianceConfig()
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: PositiveFloat = 0.28  # 0.2 is the symmetric clip, 0.28 Clip-Higher
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # c: lower bound c A of the objective where A < 0; null: off
    # Mean over tokens; over responses of their token means; of their token sums; of these by rollout.max_response_length.
    aggregation: Literal["token", "sequence", "sequence_sum", "fixed_length"] = "token"
    importance_correction: ImportanceCorrectionConfig = ImportanceCorrectionConfig()

    @property
    def sequence_level(self) -> bool:
        """Return whether the ratio is that of the whole response."""
        return self.kind == "gspo"


class ValueLossConfig(Section):
    clip: PositiveFloat | None = None  # range around the values predicted before the update; null: off


class PositiveLmConfig(Section):
    coef: NonNegativeFloat = 0.1  # coefficient of the mean NLL of correct responses; 0: off
    skip_overlong: bool = False  # exclude truncated responses and those penalised for length (reward.overlong)


class KlConfig(Section):
    place: Literal["off", "reward", "loss"] = "off"  # KL penalty to the frozen initial policy: none, in the token rewards or in the loss
    kind: Literal["k1", "k2", "k3"] = "k3"  # estimator; k1 is refused in the loss
    coef: NonNegativeFloat = 0.0  # coefficient of the penalty
    clamp: PositiveFloat | None = None  # bounds each token's estimate to [-clamp, clamp]; null: unbounded


class EntropyConfig(Section):
    coef: NonNegativeFloat = 0.0  # coefficient of the entropy bonus in the loss; 0: off


def _has_an_effect(coef: float) -> float:
    if coef == 0:
        raise ValueError("0 leaves the term without effect: remove the term")
    return coef


class LossTermConfig(Section):
    """A user-defined term of the policy's loss: loss += coef x sum of w_t term_t, w_t the weights of ``policy_loss.aggregation``."""

    name: Name  # names its metric, policy/term/<name>
    function: Reference  # package.module:name or path/to/file.py:name; its parameters say what it reads
    coef: Annotated[float, AfterValidator(_has_an_effect)]  # multiplies the weighted sum; below 0: the term is maximised
    options: dict[str, Any] = Field({})  # its keyword-only parameters


class SelfImitationConfig(Section):
    """Keeps correct responses of the run and trains on some of them in separate NLL steps (Oh et al., arXiv 1806.05635)."""

    capacity: PositiveInt = 512  # responses kept
    # Which responses are kept: the best of the run, the newest, or permanently the first ones (of value pretraining, if there is one).
    keep: Literal["top_reward", "fifo", "frozen"] = "top_reward"
    skip_overlong: bool = False  # exclude truncated responses and those penalised for length (reward.overlong)
    top_k: PositiveInt = 1  # best responses kept per prompt and rollout
    every_steps: PositiveInt = 1  # RL steps between imitation steps
    batch_size: PositiveInt = 64  # responses per imitation step, drawn uniformly
    coef: PositiveFloat = 1.0  # coefficient of their mean NLL; acts through clip_grad and the second moment, which both losses share
    lr: PositiveFloat | None = None  # null: the policy's current rate
    value_coef: NonNegativeFloat = 0.0  # coefficient of the value loss on the same responses, in a critic step; 0: none


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    positive_lm: PositiveLmConfig = PositiveLmConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()
    loss_terms: tuple[LossTermConfig, ...] = Field(strict=False, default=())  # user-defined terms (extending.md)
    self_imitation: SelfImitationConfig | None = None
