"""The run, the model, its layout and the batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vapo_mcore.config.schema.base import NonNegativeFloat, NonNegativeInt, Path, PositiveInt, Section


def _possible_project(name: str) -> str:
    """Check the name by W&B's rule, which W&B applies only when a run starts."""
    found = sorted({character for character in name if character in "/\\#?%:"})
    if found or not 1 <= len(name) <= 128:
        fault = f"has {' '.join(found)}" if found else f"is of {len(name)} characters"
        raise ValueError(f"{name!r} {fault}: W&B takes projects of 1 to 128 characters without / \\ # ? % :")
    return name


class WandbConfig(Section):
    """Run at Weights & Biases, with the id of the run directory; ``--resume`` continues it (watching.md)."""

    project: Annotated[str, AfterValidator(_possible_project)]  # created if it does not exist
    entity: str | None = None  # user or team; null: the owner of the API key
    name: str | None = None  # null: the name of the run directory
    group: str | None = None  # group of related runs
    tags: tuple[str, ...] = Field(strict=False, default=())  # labels of the run
    mode: Literal["online", "offline"] = "online"  # offline: write to <dir>/wandb for a later `wandb sync`
    api_key_variable: str = "WANDB_API_KEY"  # environment variable that holds the API key


class RunConfig(Section):
    dir: Path  # output directory: new or empty, or --clean deletes the run in it
    steps: NonNegativeInt  # RL steps, one rollout each, not counting value pretraining; 0: value pretraining only
    samples_per_step: NonNegativeInt = 4  # responses written to <dir>/samples each step
    tensorboard: bool | None = None  # null: written when tensorboard is installed; true: required
    wandb: WandbConfig | None = None  # null: off
    # Require a certificate without failures (`vapo-mcore certify`) in <dir>_certificate, for these settings and versions.
    certify: bool = False
    dump_every_steps: NonNegativeInt = 0  # dump the rollout every N RL steps to <dir>/dumps for `vapo-mcore replay-step`; 0: none
    dump_steps: tuple[PositiveInt, ...] = Field(strict=False, default=())  # also dump these RL steps

    def dumps_step(self, step: int) -> bool:
        """Return whether the rollout of this RL step is dumped."""
        return step in self.dump_steps or (self.dump_every_steps > 0 and step % self.dump_every_steps == 0)


class RouterConfig(Section):
    """Routers of mixtures of experts, of policy and critic alike (checkpoints.md); refused for dense models."""

    # trainer: all updates of a step send each token to the experts that the log-prob pass (for a critic the value pass) chose for it;
    # engine: the policy's log-prob pass and updates send it to those that the rollout engine chose (a critic as with trainer).
    replay: Literal["off", "trainer", "engine"] = "off"
    balance_coef: NonNegativeFloat = 0.0  # coefficient of each layer's load-balancing loss over a mini-batch; requires replay
    z_coef: NonNegativeFloat = 0.0  # coefficient of each layer's mean squared log-sum-exp of router logits over a mini-batch


class ModelConfig(Section):
    path: Path  # Hugging Face folder with config.json, safetensors and tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of weights and activations
    # te: Transformer Engine, CUDA, float32 without CP; varlen: torch's kernel, CUDA without CP, bfloat16; sdpa: any device; auto: the first
    # of these that can run, for float32 sdpa (te computes float32 in TF32).
    attention: Literal["auto", "te", "varlen", "sdpa"] = "auto"
    # Activations to recompute in the backward pass; selective: the MLP, and attention with sdpa; full: all but each layer's input.
    recompute: Literal["none", "selective", "full"] = "none"
    offload: bool | None = None  # policy, critic and vLLM take turns on the device, the others are in host memory; null: true with CUDA
    router: RouterConfig = RouterConfig()


class ParallelConfig(Section):
    """The ranks, and the policy's layout over them; the critic's too, unless ``critic.parallel`` gives it another."""

    world_size: PositiveInt = 1  # processes, one per GPU
    tensor_model_parallel_size: PositiveInt = 1  # ranks that share each layer
    pipeline_model_parallel_size: PositiveInt = 1  # stages that the layers are split into
    virtual_pipeline_model_parallel_size: PositiveInt | None = None  # model chunks per pipeline rank
    context_parallel_size: PositiveInt = 1  # ranks that share each sequence
    # Ranks that share the experts of each layer of a mixture (EP): ranks of context and data parallelism, which hold copies of everything
    # else; with a smaller expert_tensor_parallel_size also ranks of tensor parallelism.
    expert_model_parallel_size: PositiveInt = 1
    expert_tensor_parallel_size: PositiveInt | None = None  # ranks that share each expert; null: tensor_model_parallel_size
    # world_size / (tensor x pipeline x context).
    data_parallel_size: PositiveInt = Field(default_factory=lambda data: _derived_data_parallel_size(data))
    # Split the activations between layers over TP; default: true with TP.
    sequence_parallel: bool = Field(default_factory=lambda data: data["tensor_model_parallel_size"] > 1)
    # Micro-batches of an optimizer step padded to one size: pipeline stages then exchange no shapes, each of which costs a synchronisation.
    equal_microbatches: bool = False
    # Timeout of collectives; must exceed the longest skew between ranks in generation.
    timeout_minutes: Annotated[float, Field(gt=0, le=100_000)] = 30.0

    @property
    def degrees_text(self) -> str:
        """Describe the degrees, whose product is the number of processes."""
        chunks = self.virtual_pipeline_model_parallel_size
        pipeline = f"{self.pipeline_model_parallel_size}{f' ({chunks} chunks)' if chunks else ''}"
        return (
            f"tensor {self.tensor_model_parallel_size} x pipeline {pipeline} x context {self.context_parallel_size} x data "
            f"{self.data_parallel_size}{self.experts_text}"
        )

    @property
    def experts_text(self) -> str:
        """Describe how experts are shared, for lines that name the other degrees; empty without expert parallelism."""
        return f", experts over {self.expert_model_parallel_size} ranks" if self.expert_model_parallel_size > 1 else ""

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


def minibatch_count(responses: int, size: int) -> int:
    """Return the number of mini-batches of one pass: responses / size, rounded to the nearest whole number, at least 1.

    Their sizes differ by at most one response. A small remainder mini-batch would make a full AdamW step, whose length does not shrink with
    the gradient, on a few responses.
    """
    return max(1, (2 * responses + size) // (2 * size)) if responses else 0


class BatchConfig(Section):
    prompts_per_step: PositiveInt = 512  # prompts per rollout
    responses_per_prompt: PositiveInt = 16  # G, the group size
    # Responses per optimizer step, over all data-parallel ranks; if it does not divide a rollout, mini-batches get nearly equal sizes.
    mini_batch_size: PositiveInt = 512
    max_tokens_per_microbatch: PositiveInt  # hard cap on the padded tokens of a packed micro-batch of one data-parallel rank

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per epoch over one full rollout."""
        return minibatch_count(self.responses_per_step, self.mini_batch_size)


class BestExportConfig(Section):
    """Export of the policy with the best evaluation score to <run.dir>/best_hf, with best.json (step and score). With eval.at_start it
    must beat the untrained policy."""

    metric: str  # a score of the evaluations, such as eval/NAME/avg@1
    mode: Literal["max", "min"] = "max"  # max: higher is better
    every_steps: PositiveInt = 1  # minimum number of steps between exports


class ExportConfig(Section):
    at_end: bool = True  # export the policy to <run.dir>/export/hf, a Hugging Face folder
    best: BestExportConfig | None = None  # null: do not export the best policy
