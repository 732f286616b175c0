"""Measure the memory of one pipeline rank with the real models on the ``meta`` device, without memory or weights, for any world size.

A fake process group replaces the ranks. The models are built and wrapped by the training code; one micro-batch runs forward and backward
through them while live storages are counted. Pipeline schedules are not run: what is alive during each micro-batch follows from
Megatron's 1F1B order (:func:`training_peak`).

GPUs run different kernels. For a GPU the modules with different saved tensors are replaced by stand-ins that save what Transformer
Engine's kernels save: flash attention (q, k, v, output, log-sum-exp) and fused norms (input and one number per token).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.attention import RMSNorm, SegmentAttention
from vapo_mcore.megatron.engine import critic_outputs, wrap_chunks
from vapo_mcore.megatron.host import import_megatron, megatron_scope
from vapo_mcore.megatron.logprob import CHUNK_ELEMENTS, vocab_parallel_logprobs
from vapo_mcore.megatron.losses import CriticLoss, PolicyLoss
from vapo_mcore.megatron.model import build_chunks, trunk_parameters
from vapo_mcore.megatron.offload import release_gather_buffers
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.planning.experts import even_experts
from vapo_mcore.planning.live_bytes import LiveBytes
from vapo_mcore.planning.state import FlatBuffer, Role, ShardGroups, StateBytes, cpu_offload, states_by_data_rank, trains_head_only

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config, ParallelConfig

META = torch.device("meta")


@dataclass(frozen=True)
class ChunkActivations:
    """Activation bytes of one model chunk with one micro-batch.

    Attributes:
        saved: saved for the backward pass, including logits.
        forward: peak of the forward pass in training.
        peak: peak of the backward pass, including saved tensors.
        forward_peak: peak of a forward pass without gradients.
        received: hidden states from the previous stage, 0 for the first one.
        output: output of the chunk.
        logits: the output layer's result, which is part of ``saved``, ``forward``, ``peak`` and ``forward_peak``.
    """

    saved: int
    forward: int
    peak: int
    forward_peak: int
    received: int
    output: int
    logits: int

    def deeper(self, other: ChunkActivations, steps: int) -> ChunkActivations:
        """Extrapolate to ``steps`` more layers than ``self``, where ``other`` has one more layer."""
        deep = ChunkActivations(
            *(mine + steps * (theirs - mine) for mine, theirs in ((getattr(self, name), getattr(other, name)) for name in _FIELDS))
        )
        layer = other.saved - self.saved
        if other.peak - self.peak < layer:
            # Few layers peak at the end of the backward pass (gradient of the embedding), many layers at its beginning.
            return replace(deep, peak=max(deep.peak, deep.saved + layer))
        return deep


_FIELDS = tuple(field.name for field in fields(ChunkActivations))


@dataclass(frozen=True)
class RankState:
    """A model's state on one pipeline rank, by rank of the group that shards its optimizer, and its number of parameters."""

    by_data_rank: tuple[StateBytes, ...]
    parameters: int

    @property
    def largest(self) -> StateBytes:
        return max(self.by_data_rank, key=lambda state: state.optimizer + state.host)


@contextmanager
def pipeline_rank(parallel: ParallelConfig, stage: int) -> Iterator[ParallelContext]:
    """Initialise this process as rank 0 within pipeline stage ``stage`` of a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "planning needs a process without a process group"
    import_megatron()
    rank = stage * (parallel.world_size // parallel.pipeline_model_parallel_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        yield initialize_parallel(parallel)
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_state(config: Config, role: Role, architecture: ModelArchitecture, parallel: ParallelContext, *, on_gpu: bool) -> RankState:
    """Build and wrap a model of this rank like training, and count its buffers."""
    wrapped = _build(config, role, architecture, parallel, on_gpu=on_gpu)
    parameters = sum(parameter.numel() for chunk in wrapped for parameter in chunk.parameters())
    return RankState(tuple(buffer_state(wrapped, parallel, cpu_offload=cpu_offload(config, role))), parameters)


def _build(config: Config, role: Role, architecture: ModelArchitecture, parallel: ParallelContext, *, on_gpu: bool) -> list[Any]:
    # Parameters do not depend on the attention; the stand-ins account for the tensors that another one saves.
    chunks = build_chunks(role, architecture, config.model.model_copy(update={"attention": "sdpa"}), parallel, device=META)
    if trains_head_only(config, role):
        for parameter in trunk_parameters(chunks):
            parameter.requires_grad_(False)
    return wrap_chunks(chunks, overlap=on_gpu, device=META)


def run_chunks(
    config: Config, role: Role, architecture: ModelArchitecture, parallel: ParallelContext, lengths: Sequence[int], *, on_gpu: bool
) -> list[ChunkActivations]:
    """Measure the activations of each chunk of this rank with one micro-batch of sequences of ``lengths`` tokens.

    ``on_gpu``: assume the saved tensors of GPU kernels instead of the CPU's.
    """
    wrapped = _build(config, role, architecture, parallel, on_gpu=on_gpu)
    if on_gpu:
        _use_gpu_stand_ins([chunk.module for chunk in wrapped])
    layout = ThdLayout(
        lengths,
        context_parallel_size=parallel.context_parallel_size,
        context_parallel_rank=parallel.context_parallel_rank,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
    )
    return [_ChunkRun(config, role, architecture, parallel, layout, chunk, on_gpu=on_gpu).measure() for chunk in wrapped]


class ActivationProbe:
    """Extrapolates activations of chunks of any depth from cached runs with two and three layers.

    All layers of a model are equal, so each adds the same number of bytes (tested against runs with all layers).
    """

    _runs: ClassVar[dict[tuple[Any, ...], ChunkActivations]] = {}

    def chunk(
        self,
        config: Config,
        role: Role,
        architecture: ModelArchitecture,
        lengths: Sequence[int],
        *,
        first: bool,
        last: bool,
        layers: int,
        on_gpu: bool,
    ) -> ChunkActivations:
        """Return the activations of a chunk with ``layers`` layers, with the embedding if ``first`` and the head if ``last``."""
        if layers < 2:
            return self._run(config, role, architecture, tuple(lengths), first, last, layers, on_gpu)
        two, three = (self._run(config, role, architecture, tuple(lengths), first, last, depth, on_gpu) for depth in (2, 3))
        return two.deeper(three, layers - 2)

    def _run(
        self,
        config: Config,
        role: Role,
        arch: ModelArchitecture,
        lengths: tuple[int, ...],
        first: bool,
        last: bool,
        depth: int,
        on_gpu: bool,
    ) -> ChunkActivations:
        stages = 1 if first and last else 2 if first or last else 3
        given, arch = config.parallel_of(role), replace(arch, rope_scaling=None)  # scaling does not change the number of frequencies
        frozen = trains_head_only(config, role)
        if not (last or frozen):
            role = "policy"  # below the head both models are the same, except for tied embeddings, which save nothing
        key: tuple[Any, ...] = (role, arch, lengths, first, last, depth, on_gpu, config.model.dtype, config.model.recompute)
        key += (given.tensor_model_parallel_size, given.context_parallel_size, given.sequence_parallel, frozen)
        experts, expert_degree = given.expert_model_parallel_size, given.expert_tensor_parallel_size
        key += (experts, expert_degree) if arch.is_moe else ()
        key += (_loss_bytes(config, role, arch, sum(lengths), on_gpu=on_gpu), config.rollout.temperature) if last else ()
        if key not in self._runs:
            model_parallel = given.tensor_model_parallel_size * given.context_parallel_size
            if arch.is_moe:  # ranks of data parallelism complete the group that shares the experts
                model_parallel = math.lcm(model_parallel, experts * (expert_degree or given.tensor_model_parallel_size))
            parallel = given.model_copy(
                update={
                    "world_size": model_parallel * stages,
                    "pipeline_model_parallel_size": stages,
                    "virtual_pipeline_model_parallel_size": None,
                    "data_parallel_size": model_parallel // (given.tensor_model_parallel_size * given.context_parallel_size),
                    "expert_model_parallel_size": experts if arch.is_moe else 1,
                    "expert_tensor_parallel_size": expert_degree if arch.is_moe else None,
                }
            )
            stage = 0 if first else stages - 1 if last else 1
            shallow = replace(arch, num_layers=depth * stages)
            with pipeline_rank(parallel, stage) as context:
                self._runs[key] = run_chunks(config, role, shallow, context, lengths, on_gpu=on_gpu)[0]
        return self._runs[key]


def buffer_state(wrapped: Sequence[Any], parallel: ParallelContext, *, cpu_offload: bool) -> list[StateBytes]:
    """Compute the state bytes from the DDP buffers and frozen parameters, by rank of the group that shards the optimizer."""
    frozen = sum(parameter.nbytes for chunk in wrapped for parameter in chunk.parameters() if not parameter.requires_grad)
    params, grads = frozen, 0
    flat = []
    for chunk in wrapped:
        experts = len(chunk.buffers)
        for number, buffer in enumerate((*chunk.buffers, *chunk.expert_parallel_buffers)):
            params += buffer.param_data.untyped_storage().nbytes()
            grads += buffer.grad_data.untyped_storage().nbytes()
            ranges = tuple((start, end) for start, end, _ in buffer.param_index_map.values())
            flat.append(FlatBuffer(buffer.param_dtype.itemsize, ranges, tuple(buffer.bucket_indices), number >= experts))
    return states_by_data_rank(params, grads, flat, ShardGroups.of(parallel), cpu_offload=cpu_offload, frozen=frozen)


class _ChunkRun:
    """Runs one chunk with one micro-batch and measures its activations."""

    def __init__(
        self,
        config: Config,
        role: Role,
        architecture: ModelArchitecture,
        parallel: ParallelContext,
        layout: ThdLayout,
        chunk: Any,
        *,
        on_gpu: bool,
    ) -> None:
        self.role, self.architecture, self.parallel, self.layout = role, architecture, parallel, layout
        self.chunk, self.module = chunk, chunk.module
        self.on_cpu = not on_gpu
        self.chunk_elements = CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"]
        self.temperature = config.rollout.temperature
        self.loss = _loss(config, role, architecture)
        buffers = (*chunk.buffers, *chunk.expert_parallel_buffers)
        self.ignored = [tensor for buffer in buffers for tensor in (buffer.param_data, buffer.grad_data)]
        self.ignored += [*self.module.parameters(), *self.module.buffers()]

    def measure(self) -> ChunkActivations:
        with megatron_scope(META), _CpuAttentionOnMeta(), even_experts() if self.architecture.is_moe else nullcontext():
            release_gather_buffers()
            with torch.no_grad(), LiveBytes("meta", self.ignored, on_cpu=self.on_cpu) as live:
                output = self._forward(live)
                num_bytes = output.untyped_storage().nbytes()
                if self.module.post_process:
                    self._head(output, entropy=True)
                forward_peak = live.peak
                del output
            logits = num_bytes if self.module.post_process and self.role == "policy" else 0
            release_gather_buffers()
            with LiveBytes("meta", self.ignored, on_cpu=self.on_cpu) as live:
                saved, forward, peak = self._train(live)
            received = 0 if self.module.pre_process else self._message_bytes()
            peak += received  # the schedule keeps the gradient that it sent until it receives the next one
        return ChunkActivations(saved, forward, peak, forward_peak, received, num_bytes, logits)

    def _message_shape(self) -> tuple[int, int, int]:
        """Return the shape of the hidden states sent between pipeline stages."""
        rows = self.layout.num_local_tokens
        if self.parallel.sequence_parallel:
            rows //= self.parallel.tensor_model_parallel_size
        return rows, 1, self.architecture.hidden_size

    def _message_bytes(self) -> int:
        return math.prod(self._message_shape()) * self.module.config.params_dtype.itemsize

    def _forward(self, live: LiveBytes) -> Tensor:
        layout = self.layout
        params = layout.packed_seq_params()
        tokens = torch.empty((1, layout.num_local_tokens), dtype=torch.int64, device=META)
        if not self.module.pre_process:
            dtype, training = self.module.config.params_dtype, torch.is_grad_enabled()
            received = torch.empty(self._message_shape(), dtype=dtype, device=META, requires_grad=training)
            self.module.set_input_tensor(live.track(received))
        return self.chunk(tokens, None, None, packed_seq_params=params)

    def _head(self, output: Tensor, *, entropy: bool) -> dict[str, Tensor]:
        if self.role == "critic":
            return critic_outputs(output[0], self.architecture)
        labels = torch.empty(output.shape[1], dtype=torch.int64, device=META)
        logprobs, entropies = vocab_parallel_logprobs(
            output[0],
            labels,
            vocab_size=self.architecture.vocab_size,
            group=self.parallel.tensor_model_parallel_group,
            temperature=self.temperature,
            entropy=entropy,
            chunk_elements=self.chunk_elements,
        )
        return {"logprobs": logprobs} if entropies is None else {"logprobs": logprobs, "entropy": entropies}

    def _train(self, live: LiveBytes) -> tuple[int, int, int]:
        """Return the bytes saved between the passes, the peak of the forward pass, and the peak of the backward pass."""
        from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

        output = self._forward(live)
        if self.module.post_process:
            outputs = self._head(output, entropy=self.loss.needs_entropy)
            del output
            total, _ = self.loss(outputs, _loss_inputs(self.loss, self.layout.num_local_tokens))
            saved, forward = live.current, live.peak
            live.reset_peak()
            del outputs
            custom_backward(total, None)  # as the schedule does; Tensor.backward would turn the modes off in which recomputation runs
            return saved, forward, live.peak
        gradient_shape = output.shape
        deallocate_output_tensor(output, True)
        saved, forward = live.current, live.peak
        live.reset_peak()
        gradient = torch.empty(gradient_shape, dtype=output.dtype, device=META)
        if output.requires_grad:  # False for a first stage whose parameters are all frozen
            custom_backward(output, gradient)
        return saved, forward, live.peak


def _loss(config: Config, role: Role, architecture: ModelArchitecture) -> PolicyLoss | CriticLoss:
    """Return the configured loss, able to run on tensors without data."""
    if role == "critic":
        return CriticLoss(config.algorithm.value_loss.clip, architecture.value_bins)
    return PolicyLoss(config, without_data=True)


def _loss_inputs(loss: PolicyLoss | CriticLoss, rows: int) -> dict[str, Tensor]:
    """Return the tensors that the loss reads for a micro-batch of ``rows`` tokens, without data."""
    batch = {name: torch.empty(rows, device=META) for name in loss.tensors}
    return batch | {"mask": torch.empty(rows, dtype=torch.bool, device=META)}


def _loss_bytes(config: Config, role: Role, architecture: ModelArchitecture, rows: int, *, on_gpu: bool) -> tuple[Any, ...]:
    """Measure what the loss requires of the head, the bytes it keeps for its backward pass, and its peak in either pass.

    Chunks whose losses agree in these have the same activation bytes.
    """
    from megatron.core.pipeline_parallel.schedules import custom_backward

    loss = _loss(config, role, architecture)
    if role == "critic":
        leaves = {"output": torch.empty((rows, architecture.value_outputs), device=META, requires_grad=True)}
    else:
        names = ("logprobs", "entropy") if loss.needs_entropy else ("logprobs",)
        leaves = {name: torch.empty(rows, device=META, requires_grad=True) for name in names}
    with LiveBytes("meta", leaves.values(), on_cpu=not on_gpu) as live:
        outputs = critic_outputs(leaves["output"], architecture) if role == "critic" else leaves
        total, _ = loss(outputs, _loss_inputs(loss, rows))
        saved, forward = live.current, live.peak
        live.reset_peak()
        custom_backward(total, None)
    return (saved, forward, live.peak, *((name, leaf.grad is not None) for name, leaf in leaves.items()))


def training_peak(chunks: Sequence[ChunkActivations], stage: int, stages: int, microbatches: int) -> tuple[int, ChunkActivations]:
    """Return the peak of live activations in an update, and the chunk running then, by simulating Megatron's 1F1B order.

    Args:
        chunks: the rank's chunks: one, or one per virtual stage.
        stage: pipeline stage of the rank among ``stages``.
        microbatches: micro-batches of one update; with several chunks, groups of ``stages`` pass one chunk before the next.
    """
    import_megatron()
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    count = len(chunks)
    forwards = [chunk for _, chunk in get_schedule_table(microbatches, count, stages)]
    warmup = min(stages - stage - 1 if count == 1 else (stages - stage - 1) * 2 + (count - 1) * stages, len(forwards))
    waiting, best = 0, (0, chunks[0])

    def run(chunk: ChunkActivations, alive: int) -> None:
        nonlocal best
        best = max(best, (alive, chunk), key=lambda found: found[0])

    for number in range(-warmup, len(forwards)):  # a forward pass, then the backward pass of an earlier one
        if number + warmup < len(forwards):
            chunk = chunks[forwards[number + warmup]]
            run(chunk, waiting + chunk.forward)
            waiting += chunk.saved
        if number >= 0:
            chunk = chunks[count - 1 - forwards[number]]
            waiting -= chunk.saved
            run(chunk, waiting + chunk.peak)
    return best


def forward_peak(chunks: Sequence[ChunkActivations]) -> tuple[int, ChunkActivations]:
    """Return the peak of live activations in a pass without gradients, and the chunk running then."""
    if len(chunks) == 1:  # the schedule keeps a micro-batch's output until it has the next one
        return chunks[0].forward_peak + chunks[0].output, chunks[0]
    # It frees outputs, but not the last input, and every chunk keeps what it received until it receives again.
    kept = sum(chunk.received for chunk in chunks)
    running = max(chunks, key=lambda chunk: chunk.forward_peak)
    return running.forward_peak + kept, running


class _CpuAttentionOnMeta(TorchFunctionMode):
    """Replaces scaled-dot-product attention by the CPU's flash kernel, which torch does not select on ``meta``."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].is_meta:
            query, key, value = args
            causal, mask, scale = kwargs["is_causal"], kwargs["attn_mask"], kwargs["scale"]
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.empty(mask.shape, dtype=query.dtype, device=META)  # torch converts it to a float mask
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)[
                0
            ]
        return func(*args, **kwargs)


def _use_gpu_stand_ins(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        chunk.config.bias_activation_fusion = True
        for module in chunk.modules():
            if hasattr(module, "checkpoint_core_attention"):
                module.checkpoint_core_attention = False  # as model.recompute_settings has it for flash attention
            if isinstance(module, SegmentAttention):
                module.forward = _flash_attention  # type: ignore[method-assign]
            elif isinstance(module, RMSNorm):
                module.forward = _fused_norm_of(module)  # type: ignore[method-assign]


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    output: Tensor = _FlashAttention.apply(query, key, value)
    return output.flatten(1)


def _fused_norm_of(module: RMSNorm) -> Any:
    return lambda x: _FusedNorm.apply(x, module.weight)


class _FlashAttention(torch.autograd.Function):
    """Has the shapes and saved tensors of a variable-length flash attention kernel; [tokens, heads, head_dim] each."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:2], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedNorm(torch.autograd.Function):
    """Has the shapes and saved tensors of a fused RMS norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
