"""Optimizers, the policy and the critic."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vapo_mcore.config.schema.base import NonNegativeFloat, NonNegativeInt, Path, PositiveFloat, PositiveInt, Section


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then a constant rate: update k (from 1) has lr * min(1, k/W)."""

    lr: PositiveFloat = 1.0e-6  # peak learning rate
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the first moment
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # decay of the second moment
    eps: PositiveFloat = 1.0e-8  # added to the denominator
    weight_decay: NonNegativeFloat = 0.1  # for matrices only, not for biases and norms
    clip_grad: PositiveFloat = 1.0  # maximum global gradient norm
    warmup_rollouts: NonNegativeInt = 10  # W is the number of updates in this many rollouts
    # Keep main weights and moments in host memory and run AdamW on the CPU, for few devices; an update moves gradients and weights.
    cpu_offload: bool = False


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 2.0e-6


class PolicyConfig(Section):
    path: Path | None = None  # start from the policy of this checkpoint of an earlier run; null: model.path
    epochs: PositiveInt = 1  # passes over each rollout
    optimizer: OptimizerConfig = OptimizerConfig()


class UntilConfig(Section):
    """Ends value pretraining once all given thresholds have held for ``window`` consecutive steps, or once the probe's explained variance
    has stopped rising (``patience``); at ``max_steps`` at the latest."""

    value_loss_below: PositiveFloat | None = None  # threshold of critic/loss
    explained_variance_above: Annotated[float, Field(lt=1)] | None = None  # threshold of critic/explained_variance
    probe_explained_variance_above: Annotated[float, Field(lt=1)] | None = None  # threshold of critic/probe_explained_variance
    window: PositiveInt = 5  # consecutive steps
    # End after this many steps without a rise of critic/probe_explained_variance by min_rise above its best; null: never.
    patience: PositiveInt | None = None
    min_rise: NonNegativeFloat = 0.01  # minimum rise of the probe's explained variance, for patience
    max_steps: PositiveInt  # stop after this many steps at the latest, with a notice

    @property
    def has_thresholds(self) -> bool:
        return any(
            limit is not None for limit in (self.value_loss_below, self.explained_variance_above, self.probe_explained_variance_above)
        )


class ValuePretrainingConfig(Section):
    """Critic-only steps on Monte-Carlo returns of the fixed initial policy (VC-PPO, arXiv 2503.01491; VAPO section 4.1)."""

    steps: NonNegativeInt = 50  # number of rollouts; 0: none
    lr: PositiveFloat | None = None  # null: critic.optimizer.lr
    head_only: bool = False  # freeze the trunk
    until: UntilConfig | None = None

    @property
    def max_steps(self) -> int:
        return self.until.max_steps if self.until is not None else self.steps


class ProbeConfig(Section):
    """Measures the critic's explained variance of Monte-Carlo returns on held-out prompts, from responses of the current policy to the
    same prompts with the same seeds. The critic never trains on them."""

    prompts: PositiveInt = 64  # number of prompts, spread over data.eval; none may be a training prompt
    responses_per_prompt: PositiveInt = 2  # sampled once for all of value pretraining, again in each measured RL step
    every_steps: PositiveInt = 10  # RL steps; value pretraining measures after each step


class CategoricalConfig(Section):
    """A head with a logit for each bin of [low, high], trained by cross-entropy on Gaussian histograms of the returns (HL-Gauss,
    arXiv 2403.03950); the value is the expectation. The run ends if more than 1 % of the returns are outside the bounds."""

    low: float = -1.2  # lower bound; a few sigma below the lowest return, because targets are truncated at the bounds
    high: float = 1.2  # upper bound; a few sigma above the highest return
    bins: Annotated[int, Field(ge=2, le=1024)] = 51  # number of bins of equal width
    sigma: PositiveFloat = 0.75  # standard deviation of the targets, in bin widths


class CriticParallelConfig(Section):
    """A layout of the critic over the ranks of ``parallel``, for the same settings there. A degree that is not given is 1, not the
    policy's; data parallelism takes the ranks that the degrees leave."""

    tensor_model_parallel_size: PositiveInt = 1  # ranks that share each layer of the critic
    pipeline_model_parallel_size: PositiveInt = 1  # stages that the critic's layers are split into
    virtual_pipeline_model_parallel_size: PositiveInt | None = None  # chunks of the critic per pipeline rank
    context_parallel_size: PositiveInt = 1  # ranks that share each sequence in the critic's passes
    expert_model_parallel_size: PositiveInt = 1  # ranks that share the experts of each layer of a critic that is a mixture
    expert_tensor_parallel_size: PositiveInt | None = None  # ranks that share each expert; null: the critic's tensor_model_parallel_size
    # Split the critic's activations between layers over TP; default: true with TP.
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_model_parallel_size"] > 1)
    equal_microbatches: bool = False  # the critic's micro-batches of an optimizer step padded to one size


class CriticConfig(Section):
    epochs: PositiveInt = 1  # passes over each rollout
    # Optimizer steps per rollout instead of whole epochs, cycling through its mini-batches; null: use epochs.
    updates_per_rollout: PositiveInt | None = None
    # Start from model.path with a new head, from a reward model, or from a critic saved by an earlier run.
    init: Literal["policy", "reward_model", "saved"] = "policy"
    path: Path | None = None  # folder of the reward model or of the saved critic; or a checkpoint of an earlier run with a critic
    head: Literal["linear", "mlp"] = "linear"  # type of a new head; mlp: two layers with tanh between
    head_init: Literal["zero", "small"] = "zero"  # initial weights of a new head's last layer; small: predicts values of about 0.1
    # Bias of a new head: 0, or the mean return of the first rollout, so that no update is spent on the mean.
    head_bias: Literal["zero", "mean_return"] = "zero"
    categorical: CategoricalConfig | None = None  # categorical new head; null: a scalar head, trained by regression
    head_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # dropout before both layers of an mlp head, in training steps
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    parallel: CriticParallelConfig | None = None
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()
    probe: ProbeConfig | None = None  # null: no held-out measurement

    @property
    def bins_of_new_head(self) -> tuple[float, float, int, float] | None:
        """(low, high, bins, sigma) of a categorical head; None for a scalar head."""
        new = self.categorical
        return None if new is None else (new.low, new.high, new.bins, new.sigma)
