"""Generation and rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vapo_mcore.config.engines import engine_name_fault
from vapo_mcore.config.environments import environment_name_fault
from vapo_mcore.config.schema.base import (
    Fraction,
    Interval,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SamplingTemperature,
    Section,
    UnitFloat,
)


class VllmConfig(Section):
    enforce_eager: bool | None = None  # false: CUDA graphs, for fast decoding (on CPU: compilation); null: false with CUDA, true on CPU
    kv_cache_gib: PositiveFloat = 1.0  # size of the KV cache on CPU
    gpu_memory_utilization: Fraction = 0.5  # fraction of the GPU memory that vLLM may use
    max_num_seqs: PositiveInt = 256  # maximum number of responses that a replica generates at a time
    max_num_batched_tokens: PositiveInt | None = None  # maximum number of tokens of an engine step; null: vLLM's default
    num_gpu_blocks: PositiveInt | None = None  # pins the KV block count, for exact repeats


def runs_eagerly(config: VllmConfig, *, cuda: bool) -> bool:
    """Return whether vLLM runs without CUDA graphs (``rollout.vllm.enforce_eager``; by default on CPU only)."""
    return not cuda if config.enforce_eager is None else config.enforce_eager


class DynamicSamplingConfig(Section):
    """Drops groups whose verdicts are all equal and draws further prompts (DAPO, arXiv 2503.14476, Eq. 11)."""

    enabled: bool = False  # never in value pretraining and evaluation
    # Groups to keep: those with right and wrong verdicts, or those whose scores (including steps and turns) are not all equal.
    keep: Literal["mixed_verdicts", "different_scores"] = "mixed_verdicts"
    max_rounds: PositiveInt = 3  # rounds of sampling in a step, including the first
    on_exhausted: Literal["train", "stop"] = "train"  # if the batch is not full after max_rounds: train on the groups kept, or stop the run


class HorizonConfig(Section):
    """A step samples at most ``tokens`` of each open response; unfinished responses continue in the next step (horizon.md)."""

    tokens: PositiveInt  # H: maximum number of tokens of a response that a step samples
    # completed: responses train in the step in which they end (with a group estimator, in which their group ends). segments: the policy
    # trains on the step's tokens; the critic's value replaces the rest of a response that was cut.
    train: Literal["completed", "segments"] = "completed"
    # Only with train: segments. ended: the critic trains on all tokens of the responses that have ended; segments: on the step's tokens,
    # bootstrapping from its value where a response was cut.
    critic: Literal["ended", "segments"] = "ended"
    in_flight: PositiveInt | None = None  # responses open at a time; null: batch.prompts_per_step x batch.responses_per_prompt
    max_segments: PositiveInt | None = None  # segment number from which a response is sampled to its end; null: no limit
    # Maximum age of trained tokens, in steps since they were sampled; null: no limit.
    max_staleness: NonNegativeInt | None = None
    stale: Literal["mask", "drop"] = "mask"  # older tokens carry no loss (mask), or their whole response carries none (drop)


def _known_environment(name: str) -> str:
    fault = environment_name_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


class EnvironmentConfig(Section):
    """Multi-turn responses: a tool or game replies to each turn of the model (environments.md)."""

    name: Annotated[str, AfterValidator(_known_environment)]  # calculator, or package.module:function
    max_turns: Annotated[int, Field(ge=2, lt=2**31)] = 4  # turns of the model; the sampled tokens of all turns share max_response_length
    max_observation_length: PositiveInt = 128  # tokens, format included; longer observations are truncated and counted
    # Text around {observation}; null: the chat template's user turn, without a chat template the observation alone.
    format: str | None = None
    stop_tokens: tuple[str, ...] = Field(strict=False, default=())  # tokens that end a turn, besides the model's own stop tokens


def _not_empty(texts: tuple[str, ...]) -> tuple[str, ...]:
    if not all(texts) or len(set(texts)) < len(texts):
        raise ValueError("must be different texts, none of them empty")
    return texts


def _known_engine(name: str) -> str:
    fault = engine_name_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


class RolloutConfig(Section):
    # vllm; transformers, for machines without vLLM; or a user-defined class, package.module:Class (extending.md).
    engine: Annotated[str, AfterValidator(_known_engine)] = "vllm"
    tensor_parallel_size: PositiveInt | None = None  # null: parallel.tensor_model_parallel_size
    max_response_length: PositiveInt  # sampled tokens, EOS included
    temperature: SamplingTemperature = 1.0  # of training rollouts and of the trainer's log-probs
    top_p: Fraction = 1.0  # must be 1.0: training samples from the whole distribution
    top_k: int = -1  # must be -1, for the same reason
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # recompute: in a pass of the trainer; rollout: the engine's
    # Token ids that end a response, in addition to the EOS tokens of model and tokenizer and the chat template's end of turn.
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(strict=False, default=())
    # Texts that end a response, at the token that completes one; that token is kept and trained on. For special tokens use stop_token_ids.
    stop: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_not_empty)] = ()
    verify_weights: bool = False  # compare checksums of all tensors in each weight sync
    vllm: VllmConfig = VllmConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    environment: EnvironmentConfig | None = None
    horizon: HorizonConfig | None = None

    @property
    def trains_segments(self) -> bool:
        """Return whether the policy trains on this step's tokens only, instead of whole responses."""
        return self.horizon is not None and self.horizon.train == "segments"


class RewardScaleConfig(Section):
    """Affine map of the verifier's score: ``source`` interval onto ``target`` interval."""

    source: Interval = (0.0, 1.0)  # range of the verifiers' scores; a score outside it gives no verdict, its upper end means "correct"
    target: Interval = (-1.0, 1.0)  # range of the rewards


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO Eq. 13) with L_max = rollout.max_response_length."""

    cache: PositiveInt  # the penalty rises over this many tokens before L_max
    penalty: PositiveFloat = 1.0  # subtracted at L_max


def _two_tags(tags: tuple[str, str]) -> tuple[str, str]:
    if not all(tag.strip() for tag in tags) or tags[0] in tags[1] or tags[1] in tags[0]:
        raise ValueError("must be two tags, an opening and a closing one, neither part of the other")
    return tags


class RewardConfig(Section):
    workers: PositiveInt = 1  # grading processes per rollout replica
    timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 5.0  # per response, queue time excluded
    # Where a response's answer counts; null: after_thinking if the chat template has both tags, else anywhere.
    answer_region: Literal["after_thinking", "anywhere"] | None = None
    thinking_tags: Annotated[tuple[str, str], Field(strict=False), AfterValidator(_two_tags)] = ("<think>", "</think>")  # open, close
    scale: RewardScaleConfig | None = None
    overlong: OverlongConfig | None = None
    truncated_factor: UnitFloat | None = None  # multiplies the reward of a response truncated by the length limit

    @property
    def interval(self) -> tuple[float, float]:
        """Lowest and highest reward of a verdict, before shaping; without ``scale`` the range of scores, [0, 1]."""
        low, high = (0.0, 1.0) if self.scale is None else self.scale.target
        return min(low, high), max(low, high)
