"""One engine for policy and critic: forward passes and training steps over packed micro-batches.

Everything runs through Megatron-Core's pipeline schedules. Two conventions meet here and nowhere else:

- *Frames.* Callers hold token-aligned tensors (entry t is about token t). A model's output i predicts token i + 1, so loss
  inputs are shifted left inside each sequence, padded and split over context parallelism; outputs go the other way.
- *Scaling.* Losses arrive as sums of terms already divided by the whole mini-batch's denominators. Gradients are summed
  over data and context parallelism and over micro-batches, and divided by nothing (see ``_ready_sum``). Policy and critic
  use the same path, so packing, the number of micro-batches and the layout cannot change a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.algorithm.histogram import bias_of_mean, expected_values
from vapo_mcore.config.architecture import ModelArchitecture, padded_vocab_size
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.host import HAS_CUDA, megatron_scope
from vapo_mcore.megatron.logprob import vocab_parallel_logprobs
from vapo_mcore.megatron.model import MlpValueHead, Role, ValueHead, WeightLoader, build_chunks, trunk_parameters
from vapo_mcore.megatron.optimizer import Optimizer, Skipped
from vapo_mcore.megatron.parallel import ParallelContext

if TYPE_CHECKING:
    from vapo_mcore.config.schema import ModelConfig, OptimizerConfig


class LossFunction(Protocol):
    """A loss over one micro-batch, as a sum of per-token terms that already carry their weights.

    Attributes:
        tensors: names of the MicroBatch tensors it reads, besides ``response_mask``.
        temperature: softmax temperature of the log-probs (ignored for a critic).
        needs_entropy: whether ``outputs["entropy"]`` is computed, with its gradient.
    """

    tensors: tuple[str, ...]
    temperature: float
    needs_entropy: bool

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and statistics of the local tokens.

        Args:
            outputs: ``logprobs`` (and ``entropy``) of a policy or ``values`` of a critic, float32 [local tokens].
            batch: the named tensors and ``mask`` (bool), output-aligned, [local tokens]; ``cu_seqlens``, int64 bounds of this rank's part
                of each sequence, padding included, which are as many on all context-parallel ranks.

        Returns:
            The scalar loss to sum over everything, and detached scalar statistics: sums, or maxima where the name ends in
            ``_max``. The same names on every call.
        """


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: statistics summed (``_max``: maximised) over the mini-batch, the same on all ranks.

    ``grad_norm`` is the norm before clipping. ``skipped``: why no rank changed anything, None after an update.
    """

    metrics: dict[str, float]
    grad_norm: float
    learning_rate: float
    skipped: Skipped | None


@dataclass
class _Feed:
    """What a forward step needs besides the model: prepared inputs, one list for all chunks of this rank."""

    microbatches: Sequence[MicroBatch]
    tensors: tuple[str, ...] = ()
    prepared: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def iterators(self, count: int) -> Any:
        """One iterator a model chunk, a plain one for a single chunk, as the schedules want it."""
        chunks: list[Iterator[int]] = [iter(range(len(self.microbatches))) for _ in range(count)]
        return chunks if count > 1 else chunks[0]


class MegatronModel:
    """A policy or critic of this rank, with its optimizer if it is trained.

    Args:
        role: what the model is; a critic has a scalar head and gives ``values``.
        architecture: of the HF folder that its weights come from.
        model, parallel: dtype, attention and recompute choices, and the layout.
        load_weights: fills the built chunks, before gradient buffers and optimizer exist.
        optimizer: its settings; None for a model that is never trained.
        warmup_updates: optimizer steps over which the learning rate rises linearly to its peak.
        head_only: train the value head alone, the trunk stays as loaded.
        head_dropout: of a critic's head of two layers, in training steps.
        unknown_token_ids: ids of the model that its tokenizer lacks: outside a policy's softmax, so no probability and no gradient.
    """

    def __init__(
        self,
        role: Role,
        architecture: ModelArchitecture,
        model: ModelConfig,
        parallel: ParallelContext,
        *,
        load_weights: WeightLoader,
        optimizer: OptimizerConfig | None = None,
        warmup_updates: int = 0,
        head_only: bool = False,
        head_dropout: float = 0.0,
        unknown_token_ids: Sequence[int] = (),
    ) -> None:
        self.role = role
        self.architecture = architecture
        self.parallel = parallel
        self.softmax_size, self.excluded_columns = _softmax_columns(architecture.vocab_size, unknown_token_ids, parallel)
        self.chunks = build_chunks(role, architecture, model, parallel, head_dropout=head_dropout)
        load_weights(self.chunks)
        self.optimizer: Optimizer | None = None
        self.wrapped: list[Any] = self.chunks
        self.config = self.chunks[0].config
        if optimizer is not None:
            if head_only:
                for parameter in trunk_parameters(self.chunks):
                    parameter.requires_grad_(False)
            self._make_trainable(optimizer, warmup_updates)

    def _make_trainable(self, settings: OptimizerConfig, warmup_updates: int) -> None:
        self.wrapped = wrap_chunks(self.chunks)
        self.optimizer = Optimizer(self.wrapped, settings, self.config, warmup_updates)
        self.config.finalize_model_grads_func = _ready_sum
        no_sync = [chunk.no_sync for chunk in self.wrapped]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if HAS_CUDA and len(self.wrapped) > 1:
            self.config.grad_sync_func = [chunk.start_grad_sync for chunk in self.wrapped]

    # ------------------------------------------------------------------ forward

    @torch.no_grad()
    def forward(
        self, microbatches: Sequence[MicroBatch], *, temperature: float = 1.0, outputs: tuple[str, ...] | None = None
    ) -> dict[str, list[Tensor]]:
        """Outputs without gradients, token-aligned, on every rank that holds these sequences.

        Args:
            microbatches: each with ``tokens``; the same count on all data-parallel ranks.
            temperature: of the softmax; values are never divided by it.
            outputs: for a policy a subset of ("logprobs", "entropy"); for a critic "values" and "bootstrap_values".

        Returns:
            name -> one float32 tensor a micro-batch. ``logprobs`` and ``entropy`` [tokens]: of token t and of the distribution
            it was drawn from. ``values`` [tokens]: V(s_t), the raw output at t - 1. 0 at each first token.
            ``bootstrap_values`` [rows]: the raw output at each sequence's last token.
        """
        names = outputs or (("values",) if self.role == "critic" else ("logprobs",))
        raw_names = ("values",) if self.role == "critic" else names
        feed = _Feed(self._equal_shapes(microbatches))

        def collect(output: Tensor, number: int) -> dict[str, Tensor]:
            return self._head_outputs(output, self._prepare(feed, number), temperature, "entropy" in raw_names)

        stored = self._run(feed, collect, forward_only=True)
        result: dict[str, list[Tensor]] = {name: [] for name in names}
        for name in raw_names:
            gathered = self._gather_outputs(feed.microbatches, [entry[name] for entry in stored] if stored else None)
            for microbatch, packed in zip(microbatches, gathered, strict=True):
                if name in result:
                    result[name].append(microbatch.layout.shift_right(packed, 0.0))
                if "bootstrap_values" in result:
                    result["bootstrap_values"].append(packed[microbatch.layout.last_token_index])
        return result

    def _gather_outputs(self, microbatches: Sequence[MicroBatch], local: list[Tensor] | None) -> list[Tensor]:
        """Last stage's local outputs -> packed tensors on all ranks of the pipeline: one broadcast for all micro-batches."""
        sizes = [microbatch.layout.num_tokens for microbatch in microbatches]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.parallel.device)
        if local is not None:
            group = self.parallel.context_parallel_group
            pieces = [microbatch.layout.gather(part, group) for microbatch, part in zip(microbatches, local, strict=True)]
            flat = torch.cat(pieces)
        if self.parallel.pipeline_model_parallel_size > 1:
            dist.broadcast(flat, self.parallel.last_stage_rank, group=self.parallel.pipeline_model_parallel_group)
        return list(flat.split(sizes))

    # ----------------------------------------------------------------- training

    def train_step(
        self,
        microbatches: Sequence[MicroBatch],
        loss: LossFunction,
        *,
        is_spike: Callable[[float], bool] = lambda _: False,
        aside_lr: float | None = None,
    ) -> StepResult:
        """Forward and backward over a mini-batch's share of this rank, then one optimizer step, or on no rank any.

        All data-parallel ranks call it with the same number of micro-batches (dummies included). The update is skipped where the loss or
        a gradient is not finite on any rank, or ``is_spike`` (of the mini-batch's loss) says so on any. ``aside_lr``: the rate of a step
        that the learning-rate schedule does not count (None: one of the schedule). Raises AssertionError on a model built without an
        optimizer.
        """
        assert self.optimizer is not None, f"the {self.role} was built without an optimizer"
        metrics = self.accumulate(microbatches, loss)
        fault = None
        if not math.isfinite(metrics["loss"]):
            fault = Skipped.LOSS
        elif is_spike(metrics["loss"]):
            fault = Skipped.SPIKE
        grad_norm, skipped = self.optimizer.step(fault, aside_lr=aside_lr)
        return StepResult(metrics, grad_norm, self.optimizer.learning_rate if aside_lr is None else aside_lr, skipped)

    def accumulate(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Forward and backward alone: gradients of the mini-batch in the buffers, and its reduced statistics."""
        assert self.optimizer is not None, f"the {self.role} was built without an optimizer"
        feed = _Feed(self._equal_shapes(microbatches), tuple(loss.tensors))
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            if isinstance(head := getattr(chunk, "output_layer", None), MlpValueHead):
                head.begin(self.optimizer.updates)

        def compute(output: Tensor, number: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            batch = self._prepare(feed, number)
            outputs = self._head_outputs(output, batch, loss.temperature, loss.needs_entropy)
            total, stats = loss(outputs, batch)
            # Megatron's third form: with calculate_per_token_loss it scales nothing; the token count is not used
            return total, torch.zeros((), dtype=torch.int, device=total.device), {"loss": total.detach(), **stats}

        stored = self._run(feed, compute, forward_only=False)
        return self._reduce_stats(stored)

    def _reduce_stats(self, stored: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sums and maxima over micro-batches, data and context parallel ranks; then told to the other pipeline stages."""
        result: dict[str, float] = {}
        if stored:
            group = self.parallel.data_context_parallel_group
            names = sorted(stored[0])
            sums = [name for name in names if not name.endswith("_max")]
            maxima = [name for name in names if name.endswith("_max")]
            for chosen, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
                if not chosen:
                    continue
                table = torch.stack([torch.stack([entry[name].double() for name in chosen]) for entry in stored])
                total = table.sum(0) if operation == dist.ReduceOp.SUM else table.amax(0)
                dist.all_reduce(total, op=operation, group=group)
                result.update(zip(chosen, total.tolist(), strict=True))
        if self.parallel.pipeline_model_parallel_size > 1:
            box = [result]
            dist.broadcast_object_list(box, self.parallel.last_stage_rank, group=self.parallel.pipeline_model_parallel_group)
            result = box[0]
        return result

    @torch.no_grad()
    def set_value_bias(self, value: float) -> None:
        """Set the bias of a critic's head of zeros to predict ``value``, before its first update, in the optimizer's copy too."""
        assert self.role == "critic" and (self.optimizer is None or self.optimizer.all_updates == 0), "a critic without an update"
        bins = self.architecture.value_bins
        for chunk in self.chunks:
            if isinstance(head := getattr(chunk, "output_layer", None), ValueHead):
                head.bias.copy_(torch.full_like(head.bias, value) if bins is None else bias_of_mean(value, bins))
        if self.optimizer is not None:
            self.optimizer.megatron.reload_model_params()

    # ------------------------------------------------------------------ shared

    def _equal_shapes(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The same micro-batches, padded to one size where pipeline stages exchange no shapes (``ParallelContext.variable_lengths``)."""
        if self.parallel.variable_lengths:
            return microbatches
        size = max(microbatch.layout.num_padded_tokens for microbatch in microbatches)
        return [replace(microbatch, layout=microbatch.layout.with_padding(size)) for microbatch in microbatches]

    def _run(self, feed: _Feed, finish: Callable[[Tensor, int], Any], *, forward_only: bool) -> list[Any]:
        """Drive Megatron's schedule; ``finish`` turns an output of the last stage into what is stored."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            heartbeat.alive()
            number = next(iterator)
            output = self._call_chunk(chunk, feed, number)
            return output, lambda tensor, non_loss_data=False: finish(tensor, number)

        with megatron_scope():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=feed.iterators(len(self.wrapped)),
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(feed.microbatches),
                # with variable_seq_lengths shapes travel with the tensors and this is ignored
                seq_length=feed.microbatches[0].layout.num_padded_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _call_chunk(self, chunk: Any, feed: _Feed, number: int) -> Tensor:
        microbatch = feed.microbatches[number]
        params = microbatch.layout.packed_seq_params()
        params.padded_lengths = microbatch.layout.padded_lengths_list  # type: ignore[attr-defined]  # for SegmentAttention, no device sync
        tokens = microbatch.layout.shard(microbatch.tensors["tokens"], 0)[None]
        return chunk(tokens, None, None, packed_seq_params=params)

    def _prepare(self, feed: _Feed, number: int) -> dict[str, Tensor]:
        """Output-aligned, local tensors of one micro-batch: labels, mask and what the loss reads."""
        if number not in feed.prepared:
            microbatch = feed.microbatches[number]
            layout = microbatch.layout
            names = {"tokens": "labels"}
            if feed.tensors or "response_mask" in microbatch.tensors:
                names["response_mask"] = "mask"
            names |= {name: name for name in feed.tensors}
            batch = {}
            for source, target in names.items():
                tensor = microbatch.tensors[source]
                fill: float | bool = False if tensor.dtype == torch.bool else 0
                batch[target] = layout.shard(layout.shift_left(tensor, fill), fill)
            batch["cu_seqlens"] = layout.local_cu_seqlens
            feed.prepared[number] = batch
        return feed.prepared[number]

    def _head_outputs(self, output: Tensor, batch: dict[str, Tensor], temperature: float, entropy: bool) -> dict[str, Tensor]:
        """[1, local tokens, shard] of the output layer -> float32 [local tokens] of each quantity."""
        if self.role == "critic":
            return critic_outputs(output[0], self.architecture)
        logprobs, entropies = vocab_parallel_logprobs(
            output[0],
            batch["labels"],
            vocab_size=self.softmax_size,
            group=self.parallel.tensor_model_parallel_group,
            temperature=temperature,
            entropy=entropy,
            excluded=self.excluded_columns,
        )
        return {"logprobs": logprobs} if entropies is None else {"logprobs": logprobs, "entropy": entropies}


def critic_outputs(output: Tensor, architecture: ModelArchitecture) -> dict[str, Tensor]:
    """[local tokens, outputs] of a value head -> ``values`` float32 [local tokens] and, of a categorical one, ``value_logits``."""
    if architecture.value_bins is None:
        return {"values": output[:, 0]}
    return {"values": expected_values(output, architecture.value_bins), "value_logits": output}


def _softmax_columns(vocab_size: int, unknown: Sequence[int], parallel: ParallelContext) -> tuple[int, Tensor | None]:
    """Columns of the output layer that count: all below the first number but those of the tensor, int64, columns of this rank's shard.

    Unknown ids at the end of the vocabulary, the usual ones, shorten it; those in between are listed (None: there are none here).
    """
    outside = set(unknown)
    size = vocab_size
    while size - 1 in outside:
        size -= 1
    if size == 0:
        raise ValueError("a softmax needs at least one known token id")
    tp, rank = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_rank
    width = padded_vocab_size(vocab_size, tp) // tp
    here = sorted(token - rank * width for token in outside if token < size and token // width == rank)
    return size, torch.tensor(here, dtype=torch.int64, device=parallel.device) if here else None


@torch.no_grad()
def output_row_norms(model: MegatronModel) -> Tensor:
    """Norm of each row of a policy's output layer, float32 ``[vocab_size]`` on the host, the same on all ranks. A collective."""
    norms: Tensor | None = None
    parallel = model.parallel
    if parallel.pipeline_model_parallel_rank == parallel.pipeline_model_parallel_size - 1:
        chunk = model.chunks[-1]
        weight = chunk.shared_embedding_or_output_weight() if chunk.share_embeddings_and_output_weights else chunk.output_layer.weight
        mine = torch.linalg.vector_norm(weight, dim=-1, dtype=torch.float32).contiguous()
        norms = mine.new_empty(parallel.tensor_model_parallel_size * mine.numel())
        dist.all_gather_into_tensor(norms, mine, group=parallel.tensor_model_parallel_group)
        norms = norms[: model.architecture.vocab_size].cpu()
    box = [norms]
    dist.broadcast_object_list(box, parallel.last_stage_rank, group=parallel.pipeline_model_parallel_group)
    assert box[0] is not None
    return box[0]


def wrap_chunks(chunks: list[Any], *, overlap: bool = HAS_CUDA, device: torch.device | None = None) -> list[Any]:
    """Megatron's DDP around each chunk: parameters move into flat buffers, with float32 gradient buffers beside them.

    ``overlap``: the reduction of gradients overlaps the backward pass, bucket by bucket. ``device``: as of ``build_chunks``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap)
    with megatron_scope(device):
        return [DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]


def _ready_sum(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's reduction of gradients over DP, CP, sequence parallelism and tied embeddings, without its division.

    The only place that decides about loss scaling: the losses are ready sums, so the token count is dropped.
    """
    from megatron.core.distributed import finalize_model_grads

    del num_tokens
    finalize_model_grads(chunks, None, **kwargs)
