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
    dir: Path
    steps: PositiveInt  # RL steps: one rollout each; value pretraining counts apart
    samples_per_step: NonNegativeInt = 4  # responses written to <dir>/samples each step
    tensorboard: bool | None = None  # null: written when tensorboard is installed; true: required


class ModelConfig(Section):
    path: Path  # Hugging Face folder with config.json, safetensors and tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    attention: Literal["auto", "te", "varlen", "sdpa"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    offload: bool | None = None  # policy, critic and vLLM take turns on the device, the others wait in host memory; null: with CUDA


class ParallelConfig(Section):
    """Degrees of both models; policy and critic share one layout."""

    world_size: PositiveInt = 1
    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None  # model chunks per pipeline rank
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = Field(default_factory=lambda data: _derived_data_parallel_size(data))
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
    prompts_per_step: PositiveInt = 512
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

    prompt: str = "prompt"
    answer: str = "answer"
    id: str | None = None


class FileSource(Section):
    """Prompts with ground truth from a ``.jsonl``, ``.json`` or ``.parquet`` file."""

    kind: Literal["file"]
    path: Path
    name: Name = Field(default_factory=lambda data: data["path"].replace("\\", "/").rsplit("/", 1)[-1].split(".")[0])
    verifier: Annotated[str, AfterValidator(_known_verifier)]
    weight: PositiveFloat = 1.0  # of training sources: passes over this one relative to the others
    fields: FieldsConfig = FieldsConfig()


class ReasoningGymSource(Section):
    """A procedural task of the package reasoning-gym, graded by its own scorer."""

    kind: Literal["reasoning_gym"]
    task: Name
    name: Name = Field(default_factory=lambda data: data["task"])
    size: PositiveInt
    seed: Seed = 0
    weight: PositiveFloat = 1.0
    options: dict[str, Any] = {}


Source = Annotated[FileSource | ReasoningGymSource, Field(discriminator="kind")]


class DataConfig(Section):
    train: tuple[Source, ...] = Field(strict=False, min_length=1)
    eval: tuple[Source, ...] = Field(strict=False, default=())
    max_prompt_length: PositiveInt  # tokens, chat template included
    overlong_prompts: Literal["refuse", "drop"] = "refuse"
    shuffle: bool = True
    chat_template: bool = True
    system_prompt: str | None = None
    prompt_suffix: str = ""


class VllmConfig(Section):
    enforce_eager: bool = True
    kv_cache_gib: PositiveFloat = 1.0  # on CPU
    gpu_memory_utilization: Fraction = 0.5  # on GPU
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt | None = None
    num_gpu_blocks: PositiveInt | None = None  # pins the KV block count, for exact repeats


class DynamicSamplingConfig(Section):
    """Groups with all verdicts alike are dropped and further prompts drawn (DAPO, arXiv 2503.14476, Eq. 11)."""

    enabled: bool = False
    max_rounds: PositiveInt = 3
    on_exhausted: Literal["train", "stop"] = "train"


class RolloutConfig(Section):
    engine: Literal["vllm", "transformers"] = "vllm"
    tensor_parallel_size: PositiveInt | None = None  # null: parallel.tensor_model_parallel_size
    max_response_length: PositiveInt  # tokens, EOS included
    temperature: SamplingTemperature = 1.0
    top_p: Fraction = 1.0
    top_k: int = -1
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    verify_weights: bool = False
    vllm: VllmConfig = VllmConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()


class RewardScaleConfig(Section):
    """Affine map of the verifier's score: ``source`` interval onto ``target`` interval."""

    source: Interval = (0.0, 1.0)
    target: Interval = (-1.0, 1.0)


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO Eq. 13) with L_max = rollout.max_response_length."""

    cache: PositiveInt
    penalty: PositiveFloat = 1.0


class RewardConfig(Section):
    workers: PositiveInt = 1  # grading processes per rollout replica
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 5.0  # per response, queue time excluded
    scale: RewardScaleConfig | None = None
    overlong: OverlongConfig | None = None
    truncated_factor: UnitFloat | None = None  # multiplies the reward of a response cut by the length limit


class LambdaConfig(Section):
    """GAE lambda of the policy: ``fixed`` value; ``length_adaptive`` 1 - 1/(alpha l); ``sigmoid`` of the standardised length."""

    kind: Literal["fixed", "length_adaptive", "sigmoid"] = "length_adaptive"
    value: UnitFloat = 0.95
    alpha: PositiveFloat = 0.05
    min: UnitFloat = 0.3
    max: UnitFloat = 0.95


class AdvantageConfig(Section):
    estimator: Estimator = "gae"
    gamma: Fraction = 1.0
    lambda_policy: LambdaConfig = LambdaConfig()
    lambda_critic: UnitFloat = 1.0
    values: Literal["before_update", "after_update"] = "before_update"
    whiten: Literal["batch", "minibatch", "off"] = Field(
        default_factory=lambda data: "batch" if data["estimator"] in ("gae", "reinforce_pp") else "off"
    )
    truncation: Literal["terminal", "bootstrap", "mask"] = "terminal"

    @property
    def uses_critic(self) -> bool:
        return self.estimator == "gae"


class ImportanceCorrectionConfig(Section):
    """Correction of the gap between the rollout's and the trainer's old log-probs.

    ``token_truncate`` weights by min(ratio, cap); the masks drop tokens or sequences whose ratio is outside [low, cap].
    """

    kind: Literal["off", "token_truncate", "token_mask", "sequence_mask"] = "off"
    cap: PositiveFloat = 2.0
    low: PositiveFloat = 0.5


class PolicyLossConfig(Section):
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: PositiveFloat = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"  # fixed_length divides by rollout.max_response_length
    importance_correction: ImportanceCorrectionConfig = ImportanceCorrectionConfig()


class ValueLossConfig(Section):
    clip: PositiveFloat | None = None


class PositiveLmConfig(Section):
    coef: NonNegativeFloat = 0.1


class KlConfig(Section):
    place: Literal["off", "reward", "loss"] = "off"
    kind: Literal["k1", "k2", "k3"] = "k3"
    coef: NonNegativeFloat = 0.0


class EntropyConfig(Section):
    coef: NonNegativeFloat = 0.0


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    value_loss: ValueLossConfig = ValueLossConfig()
    positive_lm: PositiveLmConfig = PositiveLmConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then a constant rate: update k (from 1) has lr * min(1, k/W)."""

    lr: PositiveFloat = 1.0e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: PositiveFloat = 1.0e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_grad: PositiveFloat = 1.0
    warmup_rollouts: NonNegativeInt = 10


class CriticOptimizerConfig(OptimizerConfig):
    lr: PositiveFloat = 2.0e-6


class PolicyConfig(Section):
    epochs: PositiveInt = 1  # passes over each rollout
    optimizer: OptimizerConfig = OptimizerConfig()


class UntilConfig(Section):
    """Value pretraining ends once every given threshold has held for ``window`` steps in a row, at ``max_steps`` at the latest."""

    value_loss_below: PositiveFloat | None = None
    explained_variance_above: Annotated[float, Field(lt=1)] | None = None
    window: PositiveInt = 5
    max_steps: PositiveInt


class ValuePretrainingConfig(Section):
    """Critic-only steps on Monte-Carlo returns of the fixed initial policy (VC-PPO, arXiv 2503.01491; VAPO section 4.1)."""

    steps: NonNegativeInt = 50
    lr: PositiveFloat | None = None  # null: critic.optimizer.lr
    head_only: bool = False
    until: UntilConfig | None = None

    @property
    def max_steps(self) -> int:
        return self.until.max_steps if self.until is not None else self.steps


class CriticConfig(Section):
    epochs: PositiveInt = 1
    init: Literal["policy", "reward_model", "saved"] = "policy"
    path: Path | None = None  # Hugging Face folder of the reward model or of the saved critic
    head_init: Literal["zero", "small"] = "zero"
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    value_pretraining: ValuePretrainingConfig = ValuePretrainingConfig()


class EvalConfig(Section):
    """Evaluation on ``data.eval``: mean accuracy over ``samples_per_prompt`` responses (avg@k)."""

    every_steps: NonNegativeInt = 0  # 0: only at start and end
    at_start: bool = True
    at_end: bool = True
    samples_per_prompt: PositiveInt = 1
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_greedy_or_sampled)] = 1.0  # 0: greedy
    top_p: Fraction = 0.7
    max_prompts: PositiveInt | None = None


class ExportConfig(Section):
    at_end: bool = True  # Hugging Face folder <run.dir>/export/hf


class Config(Section):
    """The whole configuration of a run."""

    seed: Seed = 1234
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
