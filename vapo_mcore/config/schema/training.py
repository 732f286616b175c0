"""Optimizers, the policy and the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeFloat, NonNegativeInt, Path, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then a constant rate: update k (from 1) has lr * min(1, k/W)."""

    lr: PositiveFloat = 1.0e-6  # peak learning rate
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of the first moment
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # of the second moment
    eps: PositiveFloat = 1.0e-8  # in the denominator
    weight_decay: NonNegativeFloat = 0.1  # of matrices; biases and norms have none
    clip_grad: PositiveFloat = 1.0  # largest global gradient norm
    warmup_rollouts: NonNegativeInt = 10  # W is the number of updates in this many rollouts
    # Main weights and moments stay in host memory and AdamW runs on the CPU: for few devices; an update moves gradients and weights.
    cpu_offload: bool = False


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 2.0e-6


class PolicyConfig(Section):
    path: Path | None = None  # a checkpoint of an earlier run whose policy this one starts from; null: the weights of model.path
    epochs: PositiveInt = 1  # passes over each rollout
    optimizer: OptimizerConfig = OptimizerConfig()


class UntilConfig(Section):
    """Value pretraining ends once every given threshold has held for ``window`` steps in a row, or once the probe's explained variance
    has stopped rising (``patience``); at ``max_steps`` at the latest."""

    value_loss_below: PositiveFloat | None = None  # critic/loss of the step
    explained_variance_above: Annotated[float, Field(lt=1)] | None = None  # critic/explained_variance of the step
    probe_explained_variance_above: Annotated[float, Field(lt=1)] | None = None  # critic/probe_explained_variance (critic.probe)
    window: PositiveInt = 5  # steps in a row
    # Ends it as well: this many steps in which critic/probe_explained_variance rose by less than min_rise above its best; null: never.
    patience: PositiveInt | None = None
    min_rise: NonNegativeFloat = 0.01  # of the probe's explained variance, for patience
    max_steps: PositiveInt  # going on with a notice when they were not enough

    @property
    def has_thresholds(self) -> bool:
        return any(
            limit is not None for limit in (self.value_loss_below, self.explained_variance_above, self.probe_explained_variance_above)
        )


class ValuePretrainingConfig(Section):
    """Critic-only steps on Monte-Carlo returns of the fixed initial policy (VC-PPO, arXiv 2503.01491; VAPO section 4.1)."""

    steps: NonNegativeInt = 50  # rollouts; 0: none
    lr: PositiveFloat | None = None  # null: critic.optimizer.lr
    head_only: bool = False  # the trunk keeps its weights
    until: UntilConfig | None = None

    @property
    def max_steps(self) -> int:
        return self.until.max_steps if self.until is not None else self.steps


class ProbeConfig(Section):
    """Explained variance of the critic on held-out prompts: responses of the current policy to the same prompts with the same seeds,
    against their Monte-Carlo returns. The critic never trains on them."""

    prompts: PositiveInt = 64  # spread over data.eval; none may be a training prompt
    responses_per_prompt: PositiveInt = 2  # sampled once for all of value pretraining, again in each measured RL step
    every_steps: PositiveInt = 10  # RL steps; value pretraining measures after each step


class CategoricalConfig(Section):
    """A head with a logit for each bin of [low, high], trained by cross-entropy on Gaussian histograms of the returns (HL-Gauss,
    arXiv 2403.03950); the value is the expectation. More than 1 % of returns outside the bounds end the run."""

    low: float = -1.2  # lower bound: below the lowest return by some sigma, since targets at a bound are cut there
    high: float = 1.2  # upper bound, as far above the highest
    bins: Annotated[int, Field(ge=2, le=1024)] = 51  # of equal width
    sigma: PositiveFloat = 0.75  # standard deviation of the targets, in widths of a bin


class CriticConfig(Section):
    epochs: PositiveInt = 1  # passes over each rollout
    # Optimizer steps a rollout in place of whole passes, through its mini-batches in turn; null: epochs decides.
    updates_per_rollout: PositiveInt | None = None
    # Weights of model.path with a new head, of a reward model, or of a critic saved by an earlier run.
    init: Literal["policy", "reward_model", "saved"] = "policy"
    path: Path | None = None  # folder of the reward model or of the saved critic; or a checkpoint of an earlier run with a critic
    head: Literal["linear", "mlp"] = "linear"  # of a new head; mlp: two layers with tanh between
    head_init: Literal["zero", "small"] = "zero"  # of a new head's last layer; small: values of about 0.1
    # Bias of a new head: 0, or the mean return of the first rollout, so that no update is spent on the mean.
    head_bias: Literal["zero", "mean_return"] = "zero"
    categorical: CategoricalConfig | None = None  # of a new head; null: a scalar, trained by regression
    head_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # in training steps, before both layers of an mlp head
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    probe: ProbeConfig | None = None  # null: no held-out measure

    @property
    def bins_of_new_head(self) -> tuple[float, float, int, float] | None:
        """(low, high, bins, sigma) of a categorical head; None of a scalar."""
        new = self.categorical
        return None if new is None else (new.low, new.high, new.bins, new.sigma)
