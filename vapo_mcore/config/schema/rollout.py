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
    enforce_eager: bool | None = None  # false: CUDA graphs, which make decoding fast (on CPU: compiled); null: false with CUDA, true on CPU
    kv_cache_gib: PositiveFloat = 1.0  # on CPU
    gpu_memory_utilization: Fraction = 0.5  # on GPU
    max_num_seqs: PositiveInt = 256  # responses that a replica generates at a time
    max_num_batched_tokens: PositiveInt | None = None  # of one engine step; null: vLLM's own
    num_gpu_blocks: PositiveInt | None = None  # pins the KV block count, for exact repeats


def runs_eagerly(config: VllmConfig, *, cuda: bool) -> bool:
    """Return whether vLLM runs without CUDA graphs (``rollout.vllm.enforce_eager``; by default on CPU alone)."""
    return not cuda if config.enforce_eager is None else config.enforce_eager


class DynamicSamplingConfig(Section):
    """Groups with all verdicts alike are dropped and further prompts drawn (DAPO, arXiv 2503.14476, Eq. 11)."""

    enabled: bool = False  # not in value pretraining and evaluation
    # Groups that are kept: with right and wrong verdicts both, or with scores (steps and turns included) that are not all equal.
    keep: Literal["mixed_verdicts", "different_scores"] = "mixed_verdicts"
    max_rounds: PositiveInt = 3  # of sampling in a step, the first included
    on_exhausted: Literal["train", "stop"] = "train"  # batch not full after max_rounds: train on what there is, or stop the run


class HorizonConfig(Section):
    """A step samples at most ``tokens`` of each open response; unfinished responses continue in the next step (horizon.md)."""

    tokens: PositiveInt  # H: most tokens of a response that a step samples
    # completed: responses train in the step in which they end (of group estimators, their whole group). segments: the policy trains on the
    # step's tokens, with the critic's value where a response was cut.
    train: Literal["completed", "segments"] = "completed"
    # With train: segments. ended: the critic trains on all tokens of the responses that have ended; segments: on the step's tokens, with
    # its own value where a response was cut.
    critic: Literal["ended", "segments"] = "ended"
    in_flight: PositiveInt | None = None  # responses open at a time; null: batch.prompts_per_step x batch.responses_per_prompt
    max_segments: PositiveInt | None = None  # a response is not cut in its segment of this number, but sampled to its end; null: no limit
    # Oldest tokens that are trained, in steps since they were sampled; null: all.
    max_staleness: NonNegativeInt | None = None
    stale: Literal["mask", "drop"] = "mask"  # of older tokens: they carry no loss, or their whole response carries none


def _known_environment(name: str) -> str:
    fault = environment_name_fault(name)
    if fault is not None:
        raise ValueError(fault)
    return name


class EnvironmentConfig(Section):
    """Multi-turn responses: a tool or game answers what the model writes, and the model continues (environments.md)."""

    name: Annotated[str, AfterValidator(_known_environment)]  # calculator, or package.module:function
    max_turns: Annotated[int, Field(ge=2, lt=2**31)] = 4  # of the model; the sampled tokens of all turns share max_response_length
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
    # vllm; transformers, for machines without vLLM; or a class of your own: package.module:Class (extending.md).
    engine: Annotated[str, AfterValidator(_known_engine)] = "vllm"
    tensor_parallel_size: PositiveInt | None = None  # null: parallel.tensor_model_parallel_size
    max_response_length: PositiveInt  # sampled tokens, EOS included
    temperature: SamplingTemperature = 1.0  # of training; the trainer's log-probs are at this temperature too
    top_p: Fraction = 1.0  # 1.0 alone: training samples from the whole distribution
    top_k: int = -1  # -1 alone, for the same reason
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # recompute: by the trainer, in a separate pass; rollout: the sampler's
    # These end a response, besides the EOS tokens of model and tokenizer and the chat template's end of turn.
    stop_token_ids: tuple[NonNegativeInt, ...] = Field(strict=False, default=())
    # Texts that end a response too: at the token that completes one, which is kept and trained on. Special tokens: stop_token_ids.
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

    source: Interval = (0.0, 1.0)  # of the verifiers; a score outside is no verdict, the upper end is "correct"
    target: Interval = (-1.0, 1.0)  # rewards at the ends of source


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
        """Lowest and highest reward of a verdict, before shaping: verifiers score in [0, 1] where nothing scales."""
        low, high = (0.0, 1.0) if self.scale is None else self.scale.target
        return min(low, high), max(low, high)
