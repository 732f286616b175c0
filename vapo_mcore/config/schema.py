"""The configuration as frozen pydantic models: every key, its type, its default and its own range.

Rules over several keys are in ``rules.py``, which keys have no effect in which mode in ``applicability.py``, YAML files,
``extends:`` and overrides in ``loading.py``. Load with ``vapo_mcore.config.load_config``; a ``Config`` built directly has
passed the field checks only. ``null`` for a key that cannot be null means "not given": its default applies.

Defaults are the recipe of the VAPO paper (arXiv 2504.05118, section 5.1); those the paper does not state are ours: weight
decay 0.1, betas 0.9/0.999, eps 1e-8, clip_grad 1.0, 10 warm-up rollouts, whitening over the batch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vapo_mcore.config.verifiers import verifier_name_fault

# Sizes are bounded where the libraries below stop: 32 bits, seeds 63.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def _greedy_or_sampled(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise ValueError(f"{temperature} must be 0 (greedy) or at least 0.01")
    return temperature


def _known_verifier(name: str) -> str:
    fault = verifier_name_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


def _possible_path(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"{path!r} is not a path")
    return path


SamplingTemperature = Annotated[float, Field(ge=0.01, le=2)]  # what the rollout engines take
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Path = Annotated[str, AfterValidator(_possible_path)]
Interval = Annotated[tuple[float, float], Field(strict=False)]

Estimator = Literal["gae", "grpo", "grpo_process", "dr_grpo", "rloo", "reinforce", "reinforce_pp"]
GROUP_ESTIMATORS = ("grpo", "grpo_process", "dr_grpo", "rloo")


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion (a number in quotes is a fault), no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(Section):
    dir: Path  # everything that the run writes; new or empty, or --clean deletes the run in it
    steps: PositiveInt  # RL steps: one rollout each; value pretraining counts apart
    samples_per_step: NonNegativeInt = 4  # responses written to <dir>/samples each step
    tensorboard: bool | None = None  # null: written when tensorboard is installed; true: required


class ModelConfig(Section):
    path: Path  # Hugging Face folder with config.json, safetensors and tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of weights and activations
    # te: Transformer Engine; varlen: torch's kernel, CUDA without CP; sdpa: any device; auto: the first of these that can run.
    attention: Literal["auto", "te", "varlen", "sdpa"] = "auto"
    # Activations made again in the backward pass; selective: attention and MLP; full: all but each layer's input.
    recompute: Literal["none", "selective", "full"] = "none"
    offload: bool | None = None  # policy, critic and vLLM take turns on the device, the others wait in host memory; null: with CUDA


class ParallelConfig(Section):
    """Degrees of both models; policy and critic share one layout."""

    world_size: PositiveInt = 1  # processes, one per GPU
    tensor_model_parallel_size: PositiveInt = 1  # ranks that share each layer
    pipeline_model_parallel_size: PositiveInt = 1  # stages that the layers are split into
    virtual_pipeline_model_parallel_size: PositiveInt | None = None  # model chunks per pipeline rank
    context_parallel_size: PositiveInt = 1  # ranks that share each sequence
    expert_model_parallel_size: PositiveInt = 1  # 1: mixtures of experts cannot be trained yet
    # world_size / (tensor x pipeline x context).
    data_parallel_size: PositiveInt = Field(default_factory=lambda data: _derived_data_parallel_size(data))
    # Activations between the layers split over TP; by default with TP.
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_model_parallel_size"] > 1)
    # Of the process groups; above the longest skew between ranks in generation.
    timeout_minutes: Annotated[float, Field(gt=0, le=100_000)] = 30.0

    @property
    def model_parallel_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """Each packed sequence is padded to a multiple of this many tokens (two zig-zag chunks per CP rank)."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def microbatch_multiple(self) -> int:
        """The total of a packed micro-batch is padded to a multiple of this many tokens."""
        return self.sequence_multiple * self.tensor_model_parallel_size


def _derived_data_parallel_size(data: dict[str, Any]) -> int:
    # 1 where the division leaves a rest, so that the world-size rule and not this default reports it.
    degrees = data["tensor_model_parallel_size"] * data["pipeline_model_parallel_size"] * data["context_parallel_size"]
    return max(1, data["world_size"] // degrees)


class BatchConfig(Section):
    prompts_per_step: PositiveInt = 512  # of a rollout
    responses_per_prompt: PositiveInt = 16  # G, the group size
    mini_batch_size: PositiveInt = 512  # responses per optimizer step, over all data-parallel ranks
    max_tokens_per_microbatch: PositiveInt  # hard cap on the padded tokens of a packed micro-batch of one data-parallel rank

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per epoch over one full rollout; a partial last mini-batch counts."""
        return -(-self.responses_per_step // self.mini_batch_size)


class FieldsConfig(Section):
    """Which field of a row holds what; a dotted name reaches into nested objects."""

    prompt: str = "prompt"  # a text, or a list of chat messages
    answer: str = "answer"  # the ground truth: a text or a number
    id: str | None = None  # null: the row's number


class FileSource(Section):
    """Prompts with ground truth from a ``.jsonl``, ``.json`` or ``.parquet`` file."""

    kind: Literal["file"]  # what the source is
    path: Path  # relative to the current directory
    # Of its metrics and prompts; by default the file's, without the ending.
    name: Name = Field(default_factory=lambda data: data["path"].replace("\\", "/").rsplit("/", 1)[-1].split(".")[0])
    verifier: Annotated[str, AfterValidator(_known_verifier)]  # a built-in one (verifiers.md), or package.module:function
    weight: PositiveFloat = 1.0  # of training sources: passes over this one relative to the others
    fields: FieldsConfig = FieldsConfig()


class ReasoningGymSource(Section):
    """A procedural task of the package reasoning-gym, graded by its own scorer."""

    kind: Literal["reasoning_gym"]  # what the source is
    task: Name  # its name in reasoning-gym
    name: Name = Field(default_factory=lambda data: data["task"])  # of its metrics and prompts; by default the task's
    size: PositiveInt  # problems
    seed: Seed = 0  # of the problems
    weight: PositiveFloat = 1.0  # as for files
    options: dict[str, Any] = {}  # of the task


Source = Annotated[FileSource | ReasoningGymSource, Field(discriminator="kind")]


class DataConfig(Section):
    train: tuple[Source, ...] = Field(strict=False, min_length=1)  # what training draws its prompts from
    eval: tuple[Source, ...] = Field(strict=False, default=())  # the evaluation sets; none: no evaluation
    max_prompt_length: PositiveInt  # tokens, chat template included
    overlong_prompts: Literal["refuse", "drop"] = "refuse"  # longer ones end the start, or are dropped and counted
    shuffle: bool = True  # each pass over a source has an order of its own; false: the file's
    chat_template: bool = True  # the tokenizer's; false: a prompt is plain text
    system_prompt: str | None = None  # a system message before each prompt
    prompt_suffix: str = ""  # appended to each prompt


class VllmConfig(Section):
    enforce_eager: bool = True  # false: CUDA graphs
    kv_cache_gib: PositiveFloat = 1.0  # on CPU
    gpu_memory_utilization: Fraction = 0.5  # on GPU
    max_num_seqs: PositiveInt = 256  # responses that a replica generates at a time
    max_num_batched_tokens: PositiveInt | None = None  # of one engine step; null: vLLM's own
    num_gpu_blocks: PositiveInt | None = None  # pins the KV block count, for exact repeats


class DynamicSamplingConfig(Section):
    """Groups with all verdicts alike are dropped and further prompts drawn (DAPO, arXiv 2503.14476, Eq. 11)."""

    enabled: bool = False  # not in value pretraining and evaluation
    max_rounds: PositiveInt = 3  # of sampling in a step, the first included
    on_exhausted: Literal["train", "stop"] = "train"  # batch not full after max_rounds: train on what there is, or stop the run


class RolloutConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"  # transformers: for machines without vLLM
    tensor_parallel_size: PositiveInt | None = None  # null: parallel.tensor_model_parallel_size
    max_response_length: PositiveInt  # tokens, EOS included
    temperature: SamplingTemperature = 1.0  # of training; the trainer's log-probs are at this temperature too
    top_p: Fraction = 1.0  # 1.0 alone: training samples from the whole distribution
    top_k: int = -1  # -1 alone, for the same reason
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # recompute: by the trainer, in a pass of its own; rollout: the sampler's
    verify_weights: bool = False  # compare checksums of all tensors in each weight sync
    vllm: VllmConfig = VllmConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()


class RewardScaleConfig(Section):
    """Affine map of the verifier's score: ``source`` interval onto ``target`` interval."""

    source: Interval = (0.0, 1.0)  # scores outside are clamped to it
    target: Interval = (-1.0, 1.0)  # rewards at the ends of source


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO Eq. 13) with L_max = rollout.max_response_length."""

    cache: PositiveInt  # the punishment rises over the last so many tokens before L_max
    penalty: PositiveFloat = 1.0  # subtracted at L_max


class RewardConfig(Section):
    workers: PositiveInt = 1  # grading processes per rollout replica
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 5.0  # per response, queue time excluded
    scale: RewardScaleConfig | None = None
    overlong: OverlongConfig | None = None
    truncated_factor: UnitFloat | None = None  # multiplies the reward of a response cut by the length limit


class LambdaConfig(Section):
    """GAE lambda of the policy: ``fixed`` value; ``length_adaptive`` 1 - 1/(alpha l); ``sigmoid`` of the standardised length."""

    kind: Literal["fixed", "length_adaptive", "sigmoid"] = "length_adaptive"  # l: the response's length in tokens
    value: UnitFloat = 0.95  # lambda
    alpha: PositiveFloat = 0.05  # the advantage reaches over about alpha l tokens
    min: UnitFloat = 0.3  # lambda that short responses approach
    max: UnitFloat = 0.95  # lambda that long responses approach


class AdvantageConfig(Section):
    estimator: Estimator = "gae"  # gae has a critic, the others build none; grpo_process has no step rewards yet and is refused
    gamma: Fraction = 1.0  # discount
    lambda_policy: LambdaConfig = LambdaConfig()
    lambda_critic: UnitFloat = 1.0  # of the critic's targets; 1: Monte-Carlo returns
    # That the advantages use: predicted before or after the critic's update of the step.
    values: Literal["before_update", "after_update"] = "before_update"
    # Advantages to mean 0 and variance 1; by default batch for gae and reinforce_pp, off for the others.
    whiten: Literal["batch", "minibatch", "off"] = Field(
        default_factory=lambda data: "batch" if data["estimator"] in ("gae", "reinforce_pp") else "off"
    )
    # After a response cut by the length limit: V = 0, the critic's V, or the response carries no loss.
    truncation: Literal["terminal", "bootstrap", "mask"] = "terminal"

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae"


class ImportanceCorrectionConfig(Section):
    """Correction of the gap between the rollout's and the trainer's old log-probs.

    ``token_truncate`` weights by min(ratio, cap); the masks drop tokens or sequences whose ratio is outside [low, cap].
    """

    kind: Literal["off", "token_truncate", "token_mask", "sequence_mask"] = "off"  # off: the gap is measured only
    cap: PositiveFloat = 2.0  # largest ratio
    low: PositiveFloat = 0.5  # smallest ratio


class PolicyLossConfig(Section):
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: PositiveFloat = 0.28  # 0.2 is the symmetric clip, 0.28 Clip-Higher
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # c: where A < 0 the objective is not below c A; null: off
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"  # fixed_length divides by rollout.max_response_length
    importance_correction: ImportanceCorrectionConfig = ImportanceCorrectionConfig()


class ValueLossConfig(Section):
    clip: PositiveFloat | None = None  # range around the values predicted before the update; null: off


class PositiveLmConfig(Section):
    coef: NonNegativeFloat = 0.1  # of the mean NLL of correct responses; 0: off


class KlConfig(Section):
    place: Literal["off", "reward", "loss"] = "off"  # penalty to the frozen initial policy: none, in the token rewards, or in the loss
    kind: Literal["k1", "k2", "k3"] = "k3"  # estimator; k1 is refused in the loss
    coef: NonNegativeFloat = 0.0  # of the penalty


class EntropyConfig(Section):
    coef: NonNegativeFloat = 0.0  # of the entropy bonus in the loss; 0: off


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    positive_lm: PositiveLmConfig = PositiveLmConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then a constant rate: update k (from 1) has lr * min(1, k/W)."""

    lr: PositiveFloat = 1.0e-6  # peak learning rate
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of the first moment
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999  # of the second moment
    eps: PositiveFloat = 1.0e-8  # in the denominator
    weight_decay: NonNegativeFloat = 0.1  # of matrices; biases and norms have none
    clip_grad: PositiveFloat = 1.0  # largest global gradient norm
    warmup_rollouts: NonNegativeInt = 10  # W is the number of updates of so many rollouts


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 2.0e-6


class PolicyConfig(Section):
    epochs: PositiveInt = 1  # passes over each rollout
    optimizer: OptimizerConfig = OptimizerConfig()


class UntilConfig(Section):
    """Value pretraining ends once every given threshold has held for ``window`` steps in a row, at ``max_steps`` at the latest."""

    value_loss_below: PositiveFloat | None = None  # critic/loss of the step
    explained_variance_above: Annotated[float, Field(lt=1)] | None = None  # critic/explained_variance of the step
    window: PositiveInt = 5  # steps in a row
    max_steps: PositiveInt  # going on with a notice when they were not enough


class ValuePretrainingConfig(Section):
    """Critic-only steps on Monte-Carlo returns of the fixed initial policy (VC-PPO, arXiv 2503.01491; VAPO section 4.1)."""

    steps: NonNegativeInt = 50  # rollouts; 0: none
    lr: PositiveFloat | None = None  # null: critic.optimizer.lr
    head_only: bool = False  # the trunk keeps its weights
    until: UntilConfig | None = None

    @property
    def max_steps(self) -> int:
        return self.until.max_steps if self.until is not None else self.steps


class CriticConfig(Section):
    epochs: PositiveInt = 1  # passes over each rollout
    # Weights of model.path with a new head, of a reward model, or of a critic saved by an earlier run.
    init: Literal["policy", "reward_model", "saved"] = "policy"
    path: Path | None = None  # Hugging Face folder of the reward model or of the saved critic
    head_init: Literal["zero", "small"] = "zero"  # of a new head; small: values of about 0.1
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()


class EvalConfig(Section):
    """Evaluation on ``data.eval``: mean accuracy over ``samples_per_prompt`` responses (avg@k)."""

    every_steps: NonNegativeInt = 0  # 0: only at start and end
    at_start: bool = True  # before the first step
    at_end: bool = True  # after the last step
    samples_per_prompt: PositiveInt = 1  # k of avg@k
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_greedy_or_sampled)] = 1.0  # 0: greedy
    top_p: Fraction = 0.7  # of evaluation; training samples from the whole distribution
    max_prompts: PositiveInt | None = None  # the first so many of each set; null: all


class ExportConfig(Section):
    at_end: bool = True  # Hugging Face folder <run.dir>/export/hf


class Config(Section):
    """The whole configuration of a run."""

    seed: Seed = 1234  # of sampling, prompt order, mini-batches and new heads
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    batch: BatchConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()

    @property
    def uses_critic(self) -> bool:
        """Critic-free estimators build no critic at all; ``critic`` then holds unused defaults."""
        return self.algorithm.advantage.uses_critic

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.kl.place != "off"

    @property
    def rollout_tensor_parallel_size(self) -> int:
        return self.rollout.tensor_parallel_size or self.parallel.tensor_model_parallel_size

    @property
    def max_sequence_length(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    def to_yaml(self) -> str:
        """The resolved configuration: every key that has an effect, defaults included; loads back to the same Config."""
        from vapo_mcore.config.loading import dump_yaml

        return dump_yaml(self)
