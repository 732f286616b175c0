"""One engine for policy and critic: forward passes and training steps over packed micro-batches.

All passes run through Megatron-Core's pipeline schedules. The engine alone converts between two conventions:

- *Alignment.* Callers hold token-aligned tensors (entry t belongs to token t). Output i of a model predicts token i + 1, so loss
  inputs are shifted left within each sequence, padded and split over context parallelism; outputs are converted back.
- *Scaling.* Losses are sums of terms already divided by the mini-batch's denominators. Gradients are summed over data and context
  parallelism and over micro-batches, without any division (see ``_finalize_gradients``). Policy and critic use the same path, so
  packing, the number of micro-batches and the layout do not change a step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from vapo_mcore.megatron.model import (
    MlpValueHead,
    Role,
    ValueHead,
    WeightLoader,
    build_chunks,
    choose_attention,
    layer_kind,
    trunk_parameters,
)
from vapo_mcore.megatron.optimizer import Optimizer, Skipped
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.routing import RouterCoefs, Routing

if TYPE_CHECKING:
    from vapo_mcore.config.schema import ModelConfig, OptimizerConfig


class LossFunction(Protocol):
    """A loss over one micro-batch: a sum of weighted per-token terms.

    Attributes:
        tensors: names of the MicroBatch tensors it reads, besides ``response_mask``.
        temperature: softmax temperature of the log-probs (ignored for a critic).
        needs_entropy: whether ``outputs["entropy"]`` is computed, with its gradient.
    """

    tensors: tuple[str, ...]
    temperature: float
    needs_entropy: bool

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and statistics of the local tokens.

        Args:
            outputs: ``logprobs`` (and ``entropy``) of a policy or ``values`` of a critic, float32 [local tokens].
            batch: the named tensors and ``mask`` (bool), output-aligned, [local tokens]; ``cu_seqlens``, int64 bounds of this rank's part
                of each sequence, padding included; all context-parallel ranks have the same number of sequences.

        Returns:
            The scalar loss, to be summed over micro-batches and ranks, and detached scalar statistics: sums, or maxima if the name
            ends in ``_max``. The names are the same in every call.
        """


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, equal on all ranks.

    ``metrics``: statistics summed (``_max``: maximised) over the mini-batch; ``grad_norm``: norm before clipping; ``skipped``: why all
    ranks skipped the update, None after an update.
    """

    metrics: dict[str, float]
    grad_norm: float
    learning_rate: float
    skipped: Skipped | None


@dataclass
class _Feed:
    """Inputs of a forward step: the micro-batches, and a cache of prepared tensors shared by this rank's chunks.

    ``record``: keep the routers' choices; ``router_coefs``: auxiliary losses of the routers.
    """

    microbatches: Sequence[MicroBatch]
    tensors: tuple[str, ...] = ()
    record: bool = False
    router_coefs: RouterCoefs | None = None
    prepared: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def iterators(self, count: int) -> Any:
        """Return one iterator per model chunk, or a single iterator for a single chunk, as the schedules require."""
        chunks: list[Iterator[int]] = [iter(range(len(self.microbatches))) for _ in range(count)]
        return chunks if count > 1 else chunks[0]


def choices_name(role: Role) -> str:
    """Return the name of the tensor with the experts of each token: a micro-batch that has it is routed by it."""
    return f"{role}_expert_choices"


def _forget_hooks(nodes_of_chunks: list[list[Any]]) -> None:
    """Remove the hooks of autograd nodes, and the nodes from these lists."""
    for nodes in nodes_of_chunks:
        for node in nodes:
            hooks = node.register_hook(lambda *_: None).hooks_dict_ref()  # torch gives access to a node's hooks only by a new one
            if hooks is not None:
                hooks.clear()
        nodes.clear()


class MegatronModel:
    """This rank's shard of a policy or critic, with its optimizer if it is trained.

    Args:
        role: policy or critic; a critic has a scalar head and returns ``values``.
        architecture: architecture of the Hugging Face folder with its weights.
        model, parallel: dtype, attention and recompute settings, and the layout.
        load_weights: fills the built chunks, before gradient buffers and optimizer are created.
        optimizer: optimizer settings; None for a model that is not trained.
        warmup_updates: optimizer steps over which the learning rate rises linearly to its peak.
        head_only: train only the value head and freeze the trunk.
        head_dropout: dropout of a two-layer value head, in training steps.
        unknown_token_ids: vocabulary ids that the tokenizer does not define; excluded from a policy's softmax, so they get neither
            probability nor gradient.
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
        attention = choose_attention(model.attention, parallel.context_parallel_size, model.dtype)
        self.layers = layer_kind(attention, experts=architecture.is_moe)
        self.softmax_size, self.excluded_columns = _softmax_columns(architecture.vocab_size, unknown_token_ids, parallel)
        self.chunks = build_chunks(role, architecture, model, parallel, head_dropout=head_dropout)
        with parallel.groups.put_in_place():
            load_weights(self.chunks)
        self.optimizer: Optimizer | None = None
        self.wrapped: list[Any] = self.chunks
        self.config = self.chunks[0].config
        self.routing = Routing(self.chunks, architecture, parallel, choices_name(role)) if architecture.is_moe else None
        if optimizer is not None:
            if head_only:
                for parameter in trunk_parameters(self.chunks):
                    parameter.requires_grad_(False)
            self._make_trainable(optimizer, warmup_updates)

    def _make_trainable(self, settings: OptimizerConfig, warmup_updates: int) -> None:
        with self.parallel.groups.put_in_place():
            self.wrapped = wrap_chunks(self.chunks)
            # Megatron's wrapper and its hooks on gradients refer to each other through autograd nodes, unseen by Python's collector.
            weakref.finalize(self, _forget_hooks, [chunk.grad_accs for chunk in self.wrapped]).atexit = False
            self.optimizer = Optimizer(self.wrapped, settings, self.config, warmup_updates)
        self.config.finalize_model_grads_func = _finalize_gradients
        no_sync = [chunk.no_sync for chunk in self.wrapped]
        self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if HAS_CUDA and len(self.wrapped) > 1:
            self.config.grad_sync_func = [chunk.start_grad_sync for chunk in self.wrapped]

    # ------------------------------------------------------------------ forward

    @torch.no_grad()
    def forward(
        self,
        microbatches: Sequence[MicroBatch],
        *,
        temperature: float = 1.0,
        outputs: tuple[str, ...] | None = None,
        record_choices: bool = False,
    ) -> dict[str, list[Tensor]]:
        """Compute outputs without gradients, token-aligned, on every rank that holds these sequences.

        Args:
            microbatches: each with ``tokens``; all data-parallel ranks must pass the same number.
            temperature: softmax temperature of a policy; does not affect values.
            outputs: for a policy a subset of ("logprobs", "entropy"); for a critic "values" and "bootstrap_values".
            record_choices: also return the experts of each token, under ``choices_name``, on the host; for a mixture only.

        Returns:
            name -> one float32 tensor per micro-batch. ``logprobs`` and ``entropy`` [tokens]: of token t, and of the distribution
            it was sampled from. ``values`` [tokens]: V(s_t), the raw output at t - 1; 0 at the first token of each sequence.
            ``bootstrap_values`` [rows]: the raw output at each sequence's last token.
        """
        names = outputs or (("values",) if self.role == "critic" else ("logprobs",))
        raw_names = ("values",) if self.role == "critic" else names
        feed = _Feed(self._equal_shapes(microbatches), record=record_choices)

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
        if record_choices:
            assert self.routing is not None, "a dense model makes no choices"
            result[choices_name(self.role)] = self.routing.recorded(feed.microbatches)
        return result

    @torch.no_grad()
    def distributions(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the policy's log-probs of the whole vocabulary at temperature 1, on every rank that holds these sequences; for few tokens.

        Returns:
            float32 [tokens, vocab_size] a micro-batch, output-aligned: row t is the distribution of token t + 1; -inf outside the softmax.
        """
        assert self.role == "policy", "a critic has no distribution"
        feed = _Feed(self._equal_shapes(microbatches))
        stored = self._run(feed, lambda output, _: self._whole_logits(output[0]), forward_only=True)
        gathered = self._gather_outputs(feed.microbatches, stored or None, width=self.architecture.vocab_size)
        return [logits.log_softmax(-1) for logits in gathered]

    def _whole_logits(self, shard: Tensor) -> Tensor:
        """Gather [local tokens, local vocabulary] to float32 [local tokens, vocab_size], -inf outside the softmax. A collective over TP."""
        logits = shard.float()
        if self.excluded_columns is not None:
            logits = logits.index_fill(1, self.excluded_columns, -math.inf)
        parts = [logits]
        if (degree := self.parallel.tensor_model_parallel_size) > 1:
            parts = [torch.empty_like(logits) for _ in range(degree)]
            dist.all_gather(parts, logits.contiguous(), group=self.parallel.tensor_model_parallel_group)
        whole = torch.cat(parts, dim=1)[:, : self.architecture.vocab_size].clone()
        whole[:, self.softmax_size :] = -math.inf
        return whole

    def _gather_outputs(self, microbatches: Sequence[MicroBatch], local: list[Tensor] | None, width: int | None = None) -> list[Tensor]:
        """Gather the last stage's local outputs, [tokens] or [tokens, width], as packed tensors on all pipeline ranks, in one broadcast."""
        sizes = [microbatch.layout.num_tokens for microbatch in microbatches]
        shape = (sum(sizes),) if width is None else (sum(sizes), width)
        flat = torch.empty(shape, dtype=torch.float32, device=self.parallel.device)
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
        unscheduled_lr: float | None = None,
        router_coefs: RouterCoefs | None = None,
    ) -> StepResult:
        """Run forward and backward over this rank's share of a mini-batch, then one optimizer step on all ranks or on none.

        All data-parallel ranks must pass the same number of micro-batches (dummies included). All ranks skip the update if on any rank
        the loss or a gradient is not finite or ``is_spike`` returns True for the mini-batch's loss. ``unscheduled_lr``: learning rate of a
        step outside the learning-rate schedule (None: a step of the schedule). ``router_coefs``: auxiliary losses of a mixture.
        Raises AssertionError if the model has no optimizer.
        """
        assert self.optimizer is not None, f"the {self.role} was built without an optimizer"
        metrics = self.accumulate(microbatches, loss, router_coefs)
        fault = None
        if not math.isfinite(metrics["loss"]):
            fault = Skipped.LOSS
        elif is_spike(metrics["loss"]):
            fault = Skipped.SPIKE
        with self.parallel.groups.put_in_place():
            grad_norm, skipped = self.optimizer.step(fault, unscheduled_lr=unscheduled_lr)
        return StepResult(metrics, grad_norm, self.optimizer.learning_rate if unscheduled_lr is None else unscheduled_lr, skipped)

    def accumulate(
        self, microbatches: Sequence[MicroBatch], loss: LossFunction, router_coefs: RouterCoefs | None = None
    ) -> dict[str, float]:
        """Run forward and backward; leaves the mini-batch's gradients in the buffers and returns its reduced statistics."""
        assert self.optimizer is not None, f"the {self.role} was built without an optimizer"
        feed = _Feed(self._equal_shapes(microbatches), tuple(loss.tensors), router_coefs=router_coefs)
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
            # Megatron's three-value form: with calculate_per_token_loss it does not scale the loss; the token count is unused
            return total, torch.zeros((), dtype=torch.int, device=total.device), {"loss": total.detach(), **stats}

        stored = self._run(feed, compute, forward_only=False)
        return self._reduce_stats(stored)

    def _reduce_stats(self, stored: list[dict[str, Tensor]]) -> dict[str, float]:
        """Reduce statistics over micro-batches, data- and context-parallel ranks, and broadcasts them to the other pipeline stages."""
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
        """Set the bias of a critic's zero-initialised head to predict ``value``, in the weights and in the optimizer's main parameters."""
        assert self.role == "critic" and (self.optimizer is None or self.optimizer.all_updates == 0), "critic before its first update"
        bins = self.architecture.value_bins
        for chunk in self.chunks:
            if isinstance(head := getattr(chunk, "output_layer", None), ValueHead):
                head.bias.copy_(torch.full_like(head.bias, value) if bins is None else bias_of_mean(value, bins))
        if self.optimizer is not None:
            with self.parallel.groups.put_in_place():
                self.optimizer.megatron.reload_model_params()

    # ------------------------------------------------------------------ shared

    def _equal_shapes(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Pad micro-batches to one size if pipeline stages do not exchange shapes (``ParallelContext.variable_lengths``)."""
        if self.parallel.variable_lengths:
            return microbatches
        size = max(microbatch.layout.num_padded_tokens for microbatch in microbatches)
        return [replace(microbatch, layout=microbatch.layout.with_padding(size)) for microbatch in microbatches]

    def _run(self, feed: _Feed, finish: Callable[[Tensor, int], Any], *, forward_only: bool) -> list[Any]:
        """Run Megatron's pipeline schedule; ``finish`` converts each output of the last stage into the stored result."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[int], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            heartbeat.alive()
            number = next(iterator)
            with self._chunk_pass(chunk, feed, number):
                output = self._call_chunk(chunk, feed, number)
            return output, lambda tensor, non_loss_data=False: finish(tensor, number)

        with self.parallel.scope(), self._model_pass(feed, training=not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=feed.iterators(len(self.wrapped)),
                model=self.wrapped if len(self.wrapped) > 1 else self.wrapped[0],
                num_microbatches=len(feed.microbatches),
                # ignored with variable_seq_lengths, where the stages exchange shapes
                seq_length=feed.microbatches[0].layout.num_padded_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _model_pass(self, feed: _Feed, *, training: bool) -> AbstractContextManager[None]:
        if self.routing is None:
            return nullcontext()
        return self.routing.model_pass(feed.microbatches, training=training, record=feed.record, coefs=feed.router_coefs)

    def _chunk_pass(self, chunk: Any, feed: _Feed, number: int) -> AbstractContextManager[None]:
        if self.routing is None:
            return nullcontext()
        return self.routing.chunk_pass(self.wrapped.index(chunk), feed.microbatches[number], number)

    def _call_chunk(self, chunk: Any, feed: _Feed, number: int) -> Tensor:
        microbatch = feed.microbatches[number]
        params = microbatch.layout.packed_seq_params(fused_rope=self.config.apply_rope_fusion)
        tokens = microbatch.layout.shard(microbatch.tensors["tokens"], 0)[None]
        return chunk(tokens, None, None, packed_seq_params=params)

    def _prepare(self, feed: _Feed, number: int) -> dict[str, Tensor]:
        """Return the output-aligned local tensors of one micro-batch: labels, mask and the inputs of the loss."""
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
        """Convert the output layer's [1, local tokens, shard] to float32 [local tokens] per quantity."""
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
    """Convert the value head's [local tokens, outputs] to float32 ``values`` [local tokens]; if categorical, also ``value_logits``."""
    if architecture.value_bins is None:
        return {"values": output[:, 0]}
    return {"values": expected_values(output, architecture.value_bins), "value_logits": output}


def _softmax_columns(vocab_size: int, unknown: Sequence[int], parallel: ParallelContext) -> tuple[int, Tensor | None]:
    """Return the softmax's vocabulary size, and the columns of this rank's shard below it to exclude (int64, None: no columns).

    Unknown ids at the end of the vocabulary, the usual case, reduce the size; those in between are excluded.
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
    """Compute the norm of each row of a policy's output layer, float32 ``[vocab_size]`` on the host of every rank. A collective."""
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
    """Wrap each chunk in Megatron's DDP, which moves parameters into flat buffers and allocates float32 gradient buffers.

    ``overlap``: overlap gradient reduction with the backward pass, bucket by bucket. ``device``: as in ``build_chunks``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap)
    with megatron_scope(device):
        return [DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0) for number, chunk in enumerate(chunks)]


def _finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients over DP, CP, sequence parallelism and tied embeddings with Megatron's function, without its division by tokens.

    This is the only place that affects loss scaling: losses are already normalised sums, so the token count is dropped.
    """
    from megatron.core.distributed import finalize_model_grads

    del num_tokens
    finalize_model_grads(chunks, None, **kwargs)
