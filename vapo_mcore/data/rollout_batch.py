"""One rollout as ragged data: a table with one row per response, and flat token-aligned tensors over full sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.config.verifiers import UNGRADED
from vapo_mcore.data.ragged import cumulative, segment_positions, token_index

FINISH_REASONS = ("stop", "length", "turns", "cut")
ENGINE_CHOICES = "engine_expert_choices"
"""Name of the tensor of the rollout engine's experts: uint8 or int16 [tokens, layers, topk], 0 at each sequence's last token."""
_LIST_COLUMNS = ("prompt_id", "ungraded", "finish_reason", "source", "step_rewards", "segments", "observations")
_DTYPES = {
    "group": torch.int64,
    "sample_index": torch.int64,
    "verdict": torch.bool,
    "graded": torch.bool,
    "score": torch.float32,
    "reward": torch.float32,
    "prompt_length": torch.int64,
    "response_length": torch.int64,
    "tool_length": torch.int64,
    "turns": torch.int64,
    "observations_cut": torch.int64,
    "missed_end": torch.bool,
}

StepRewards = tuple[tuple[int, float], ...]
"""Rewards inside a response: (position of the token in the whole sequence, reward), in order."""

Segments = tuple[tuple[int, int], ...]
"""Parts of a response sampled in different steps: (sampled tokens, age), in order; age: RL steps since then, 0 in this step."""

Observations = tuple[tuple[int, int], ...]
"""What an environment wrote in a response: (tokens that the model had sampled before, tokens of the environment), in order."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Table with one row per response; every column has ``n`` entries, tensors on the host. Small enough to be replicated on all ranks.

    Attributes:
        prompt_id: the occurrence of a prompt that this response answers (unique per group).
        group: int64, index of the group (all responses to one occurrence of a prompt).
        sample_index: int64, 0 .. responses_per_prompt - 1 within the group.
        verdict: bool, whether the verifier graded the response correct; unaffected by scaling and shaping.
        graded: bool, False if grading failed; such rows are excluded from training and group statistics.
        ungraded: the cause, a key of ``config.verifiers.UNGRADED``; empty in graded rows.
        score: float32, the verifier's raw score.
        reward: float32, the score after scaling and shaping, used for training.
        finish_reason: "stop", "length" (truncated at the length limit), "turns" (turn limit reached before the environment ended it) or
            "cut" (continues in the next step, with ``horizon.train: segments``; graded, score and reward are undefined).
        prompt_length, response_length: int64, tokens; a response may be empty, a prompt may not. The response length counts the tokens
            that the model sampled, over all turns.
        tool_length: int64, tokens that the environment wrote between the turns.
        turns: int64, turns of the model, 1 without an environment.
        observations_cut: int64, observations of the environment that were truncated to their limit.
        missed_end: bool, truncated although the response contains an end-of-turn text.
        source: name of the data source.
        step_rewards: rewards of steps and turns; ``reward``, which is placed on the last token, is not included.
        segments: with ``rollout.horizon`` the response's segments; empty without, where the present policy sampled all tokens.
        observations: where the environment's tokens are; empty without, and in dumps of earlier versions.
    """

    prompt_id: list[str]
    group: Tensor
    sample_index: Tensor
    verdict: Tensor
    graded: Tensor
    ungraded: list[str]
    score: Tensor
    reward: Tensor
    finish_reason: list[str]
    prompt_length: Tensor
    response_length: Tensor
    tool_length: Tensor
    turns: Tensor
    observations_cut: Tensor
    missed_end: Tensor
    source: list[str]
    step_rewards: list[StepRewards]
    segments: list[Segments]
    observations: list[Observations]

    def __post_init__(self) -> None:
        n = len(self.prompt_id)
        for name in _LIST_COLUMNS:
            if len(getattr(self, name)) != n:
                raise ValueError(f"rows: column {name} has {len(getattr(self, name))} entries, prompt_id has {n}")
        for name, dtype in _DTYPES.items():
            column = getattr(self, name)
            if column.shape != (n,) or column.dtype != dtype:
                raise ValueError(f"rows: column {name} is {column.dtype} {list(column.shape)}, expected {dtype} [{n}]")
        causes = [UNGRADED if not graded else ("",) for graded in self.graded.tolist()]
        for row, (cause, known) in enumerate(zip(self.ungraded, causes, strict=True)):
            if cause not in known:
                raise ValueError(f"rows: row {row} has the cause {cause!r} for a missing verdict, expected one of {tuple(known)}")
        unknown = set(self.finish_reason) - set(FINISH_REASONS)
        if unknown:
            raise ValueError(f"rows: finish reason {min(unknown)!r} is not one of {FINISH_REASONS}")
        for row, (segments, length) in enumerate(zip(self.segments, self.response_length.tolist(), strict=True)):
            if segments and sum(tokens for tokens, _ in segments) != length:
                raise ValueError(f"rows: row {row} has {length} response tokens, but its segments are {segments}")
        for row, (observations, length) in enumerate(zip(self.observations, self.tool_length.tolist(), strict=True)):
            if observations and sum(tokens for _, tokens in observations) != length:
                raise ValueError(f"rows: row {row} has {length} tokens of its environment, but its observations are {observations}")
        if n and (int(self.prompt_length.min()) < 1 or int(self.response_length.min()) < 0 or int(self.tool_length.min()) < 0):
            raise ValueError("rows: a prompt has at least 1 token, and a response at least 0")

    def __len__(self) -> int:
        return len(self.prompt_id)

    @property
    def length(self) -> Tensor:
        """int64 ``[n]``: tokens of prompt and response, including those of the environment."""
        return self.prompt_length + self.response_length + self.tool_length

    @property
    def step_reward(self) -> Tensor:
        """float32 ``[n]``: sum of the rewards of a response's steps and turns."""
        return torch.tensor([sum(reward for _, reward in steps) for steps in self.step_rewards], dtype=torch.float32)

    @property
    def total_reward(self) -> Tensor:
        """float32 ``[n]``: total reward of each response, including its steps and turns."""
        return self.reward + self.step_reward

    @property
    def truncated(self) -> Tensor:
        """bool ``[n]``: whether the response was truncated at the length limit."""
        return torch.tensor([reason == "length" for reason in self.finish_reason], dtype=torch.bool)

    @property
    def cut(self) -> Tensor:
        """bool ``[n]``: whether the response continues in the next step."""
        return torch.tensor([reason == "cut" for reason in self.finish_reason], dtype=torch.bool)

    def stale_tokens(self, limit: int) -> Tensor:
        """Count the leading response tokens that were sampled more than ``limit`` steps ago; int64 ``[n]``."""
        counts = [sum(tokens for tokens, age in segments if age > limit) for segments in self.segments]
        return torch.tensor(counts, dtype=torch.int64)

    def place(self, row: int, count: int) -> int:
        """Return the position in the whole sequence of the sampled token that ``count`` others of the response precede."""
        before = sum(tokens for sampled, tokens in self.observations[row] if sampled <= count)
        return int(self.prompt_length[row]) + count + before

    def sampled_before(self, row: int, position: int) -> int:
        """Return the number of sampled tokens of the response before ``position`` of the whole sequence."""
        inside, written = position - int(self.prompt_length[row]), 0
        for sampled, tokens in self.observations[row]:
            if sampled + written < inside:
                written += min(tokens, inside - sampled - written)
        return inside - written

    def select(self, index: Tensor | Sequence[int]) -> Rows:
        """Return the rows at ``index``, in that order."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        numbers = chosen.tolist()
        columns: dict[str, Any] = {}
        for field in fields(self):
            column = getattr(self, field.name)
            columns[field.name] = [column[i] for i in numbers] if isinstance(column, list) else column[chosen]
        return Rows(**columns)

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Concatenate tables."""
        parts = [Rows.empty(), *parts]
        columns: dict[str, Any] = {}
        for field in fields(Rows):
            values = [getattr(part, field.name) for part in parts]
            columns[field.name] = list(chain.from_iterable(values)) if field.name in _LIST_COLUMNS else torch.cat(values)
        return Rows(**columns)

    @staticmethod
    def empty() -> Rows:
        """Return a table without rows."""
        columns: dict[str, Any] = {name: [] for name in _LIST_COLUMNS}
        columns |= {name: torch.empty(0, dtype=dtype) for name, dtype in _DTYPES.items()}
        return Rows(**columns)


class RolloutBatch:
    """The responses held by this rank: their rows, and flat tensors over their full sequences (prompt + response).

    Args:
        rows: ``n`` rows (this rank's, not the replicated table).
        cu_seqlens: int64 ``[n + 1]``, offsets of the sequences; must match the lengths of the rows. Kept on the host.
        tensors: name to ``[total, ...]`` token-aligned tensor (entry t belongs to token t).
        row_ids: int64 ``[n]``, indices of the rows in the replicated table; None: 0 .. n - 1 (one process holds all).

    Raises:
        ValueError: offsets, lengths and tensors do not match.
    """

    def __init__(self, rows: Rows, cu_seqlens: Tensor, tensors: dict[str, Tensor], row_ids: Tensor | None = None) -> None:
        self.rows = rows
        self.cu_seqlens = cu_seqlens
        self.tensors = dict(tensors)
        self.row_ids = torch.arange(len(rows)) if row_ids is None else row_ids
        self._validate()

    def _validate(self) -> None:
        n = len(self.rows)
        if self.cu_seqlens.shape != (n + 1,) or self.cu_seqlens.dtype != torch.int64 or self.cu_seqlens.is_cuda:
            raise ValueError(f"cu_seqlens is {self.cu_seqlens.dtype} {list(self.cu_seqlens.shape)}, expected int64 [{n + 1}] on the host")
        if int(self.cu_seqlens[0]) != 0 or not torch.equal(self.cu_seqlens.diff(), self.rows.length):
            raise ValueError("cu_seqlens does not agree with the prompt and response lengths of the rows")
        if self.row_ids.shape != (n,) or self.row_ids.unique().numel() != n:
            raise ValueError(f"row_ids must be {n} different numbers, got {list(self.row_ids.shape)}")
        for name, tensor in self.tensors.items():
            self._check_tensor(name, tensor)

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != self.num_tokens:
            raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, expected {self.num_tokens} tokens")

    @classmethod
    def from_responses(
        cls,
        rows: Rows,
        prompt_token_ids: Sequence[Sequence[int]],
        response_token_ids: Sequence[Sequence[int]],
        response_logprobs: Sequence[Sequence[float]],
        row_ids: Tensor | None = None,
        *,
        sampled: Sequence[Sequence[bool]] | None = None,
        experts: Sequence[Tensor] | None = None,
        choices: ExpertChoices | None = None,
    ) -> RolloutBatch:
        """Flatten an engine's output into ``tokens``, ``response_mask`` and ``rollout_logprobs`` (0 at tokens that were not sampled).

        Uses the sampled ids directly, without decoding and re-encoding. ``sampled``: False at response tokens that the environment
        wrote (their log-probs are ignored); None: the model sampled all of them. ``experts``: with ``choices``, the engine's choices of
        each response [its tokens - 1, layers, topk], stored as ``ENGINE_CHOICES``: no engine feeds the last token to its model.
        """
        lengths = rows.length
        cu_seqlens = cumulative(lengths)
        pairs = zip(prompt_token_ids, response_token_ids, strict=True)
        tokens = torch.tensor(list(chain.from_iterable(chain(p, r) for p, r in pairs)), dtype=torch.int64)
        response_mask = segment_positions(lengths) >= torch.repeat_interleave(rows.prompt_length, lengths)
        logprobs = torch.tensor(list(chain.from_iterable(response_logprobs)), dtype=torch.float32)
        if tokens.numel() != response_mask.numel() or logprobs.numel() != int(response_mask.sum()):
            raise ValueError("token ids or log-probs do not agree with the prompt and response lengths of the rows")
        rollout_logprobs = torch.zeros(tokens.numel()).masked_scatter_(response_mask, logprobs)
        if sampled is not None:
            flags = torch.tensor(list(chain.from_iterable(sampled)), dtype=torch.bool)
            if flags.numel() != logprobs.numel() or int(flags.sum()) != int(rows.response_length.sum()):
                raise ValueError("the sampled tokens do not agree with the response lengths of the rows")
            response_mask = response_mask.masked_scatter(response_mask, flags)
            rollout_logprobs = torch.where(response_mask, rollout_logprobs, 0.0)
        elif int(rows.tool_length.sum()):
            raise ValueError("rows have tokens of an environment: pass sampled, which marks the tokens that the model sampled")
        tensors = {"tokens": tokens, "response_mask": response_mask, "rollout_logprobs": rollout_logprobs}
        if choices is not None:
            assert experts is not None
            tensors[ENGINE_CHOICES] = _flat_choices(experts, cu_seqlens, choices)
        return cls(rows, cu_seqlens, tensors, row_ids)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens held by this rank."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """int64 ``[n]``: tokens of each full sequence."""
        return self.cu_seqlens.diff()

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._check_tensor(name, tensor)
        self.tensors[name] = tensor

    def drop(self, name: str) -> None:
        """Free a tensor, if it is there."""
        self.tensors.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def only(self, names: Sequence[str]) -> RolloutBatch:
        """Return the batch with these tensors alone."""
        return RolloutBatch(self.rows, self.cu_seqlens, {name: self.tensors[name] for name in names}, self.row_ids)

    def select(self, index: Tensor | Sequence[int]) -> RolloutBatch:
        """Return the local rows at ``index`` (0 .. n - 1, distinct), in that order, with their tokens."""
        chosen = torch.as_tensor(index, dtype=torch.int64)
        tokens = token_index(self.cu_seqlens, chosen)
        tensors = {name: x.index_select(0, tokens.to(x.device)) for name, x in self.tensors.items()}
        return RolloutBatch(self.rows.select(chosen), cumulative(self.lengths[chosen]), tensors, self.row_ids[chosen])

    def local_rows(self, row_ids: Tensor | Sequence[int]) -> Tensor:
        """Return the local indices (0 .. n - 1) of rows given by their ids in the replicated table, in the given order.

        Raises:
            ValueError: this rank does not hold one of the rows.
        """
        wanted = torch.as_tensor(row_ids, dtype=torch.int64)
        order = torch.argsort(self.row_ids)
        place = torch.searchsorted(self.row_ids[order], wanted)
        if wanted.numel() and (int(place.max()) >= len(self) or not torch.equal(self.row_ids[order[place]], wanted)):
            raise ValueError("this rank does not hold all of the requested rows")
        return order[place]

    def scatter_tokens(self, name: str, parts: Sequence[Tensor], indices: Sequence[Tensor]) -> None:
        """Store per-micro-batch results as a tensor of this batch.

        ``parts[k]`` is ``[tokens, ...]`` in packed order, as the engine returns it for a micro-batch whose tokens are at ``indices[k]``
        (``MicroBatch.index``). Tokens in no part get 0.
        """
        like = parts[0] if parts else torch.empty(0)
        out = like.new_zeros((self.num_tokens, *like.shape[1:]))
        for part, index in zip(parts, indices, strict=True):  # one by one: choices of experts are large
            out.index_copy_(0, index.to(out.device), part)
        self[name] = out

    def to(self, device: torch.device | str) -> RolloutBatch:
        """Return the batch with its token tensors on ``device`` (rows and offsets stay on the host)."""
        tensors = {name: x.to(device) for name, x in self.tensors.items()}
        return RolloutBatch(self.rows, self.cu_seqlens, tensors, self.row_ids)

    @staticmethod
    def concat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Concatenate batches; they must have the same tensor names and distinct row ids."""
        if not parts:
            raise ValueError("nothing to concatenate")
        names = set(parts[0].tensors)
        if any(set(part.tensors) != names for part in parts):
            raise ValueError(
                f"parts have different tensors: {sorted(names)} and {sorted(set().union(*(p.tensors for p in parts)) ^ names)}"
            )
        return RolloutBatch(
            Rows.concat([part.rows for part in parts]),
            cumulative(torch.cat([part.lengths for part in parts])),
            {name: torch.cat([part[name] for part in parts]) for name in parts[0].tensors},
            torch.cat([part.row_ids for part in parts]),
        )


def _flat_choices(experts: Sequence[Tensor], cu_seqlens: Tensor, shape: ExpertChoices) -> Tensor:
    """Lay out the engine's choices of each sequence one after the other, with a row of zeros for each last token.

    Raises ValueError if a sequence has choices of another number of tokens, layers or experts.
    """
    flat = torch.zeros((int(cu_seqlens[-1]), shape.layers, shape.topk), dtype=torch.uint8 if shape.itemsize == 1 else torch.int16)
    for row, (found, start, end) in enumerate(zip(experts, cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        part = flat[start : end - 1]
        if found.shape != part.shape:
            raise ValueError(f"row {row} has choices of experts {list(found.shape)}, expected {list(part.shape)}: all tokens but the last")
        part.copy_(found)
    return flat


def gather_rows(batch: RolloutBatch) -> tuple[Rows, Tensor]:
    """Replicate the rows of all ranks; returns the table sorted by row id, and the rank that holds each row.

    Exactly one rank must hold each row (the other ranks of a generation replica pass a batch without rows), and the row ids of all ranks
    together must be 0 .. N - 1. A collective. Only the small tables are sent, not the tokens.

    Raises:
        ValueError: a row id is missing or held by two ranks.
    """
    parts: list[tuple[Rows, Tensor]] = [(batch.rows, batch.row_ids)] * dist.get_world_size()
    dist.all_gather_object(parts, (batch.rows, batch.row_ids))
    row_ids = torch.cat([ids for _, ids in parts])
    holder = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([ids.numel() for _, ids in parts]))
    order = torch.argsort(row_ids)
    if not torch.equal(row_ids[order], torch.arange(row_ids.numel())):
        raise ValueError(f"the ranks hold {row_ids.numel()} rows, but their ids are not a permutation of 0 .. {row_ids.numel() - 1}")
    return Rows.concat([rows for rows, _ in parts]).select(order), holder[order]


def exchange(
    batch: RolloutBatch,
    rows: Rows,
    *,
    holder: Tensor,
    owner: Tensor,
    dp_rank_of_rank: Sequence[int],
) -> RolloutBatch:
    """Send token tensors from the ranks that generated them to all ranks that own them, in one all-to-all.

    Args:
        batch: the rows this rank holds; ranks without rows pass an empty batch with the same tensors (names, dtypes, trailing
            shapes).
        rows: the replicated table of N rows.
        holder: int64 ``[N]``, rank that sends each row.
        owner: int64 ``[N]``, data-parallel rank that will own each row; -1: the row is not sent (not trained on).
        dp_rank_of_rank: data-parallel rank of each rank. A row goes to every rank with its owner's data-parallel rank, so
            tensor-, context- and pipeline-parallel ranks have the same tokens.

    Returns:
        The owned rows, by ascending row id; ``row_ids`` are their indices in ``rows``. Tensors stay on their device.

    Raises:
        ValueError: ``batch`` lacks a row that this rank sends, or no rank has the data-parallel rank of an owner.
    """
    rank = dist.get_rank()
    dp_ranks = torch.tensor(dp_rank_of_rank)
    if not torch.isin(owner[owner >= 0], dp_ranks).all():
        raise ValueError(f"rows are owned by data-parallel rank {int(owner.max())}, but the group has {sorted(set(dp_rank_of_rank))}")
    mine = (holder == rank).nonzero().squeeze(1)
    local_row = batch.local_rows(mine)
    # Every rank computes the send and receive sizes from the replicated table, without communication.
    to_rank = owner[mine][None, :] == dp_ranks[:, None]
    sent_rows = local_row.expand(len(dp_ranks), -1)[to_rank]
    lengths = rows.length
    sent_sizes = (to_rank * lengths[mine]).sum(1).tolist()
    owned = (owner == dp_rank_of_rank[rank]).nonzero().squeeze(1)
    received_order = torch.argsort(holder[owned], stable=True)
    received_sizes = torch.zeros(len(dp_ranks), dtype=torch.int64).index_add_(0, holder[owned], lengths[owned]).tolist()

    names = sorted(batch.tensors)
    payload = _to_bytes([batch[name] for name in names], batch.num_tokens)
    payload = payload.index_select(0, token_index(batch.cu_seqlens, sent_rows).to(payload.device))
    received = payload.new_empty((sum(received_sizes), payload.shape[1]))
    dist.all_to_all_single(received, payload, received_sizes, sent_sizes)
    tensors = dict(zip(names, _from_bytes(received, [batch[name] for name in names]), strict=True))
    arrived = owned[received_order]
    arrived_batch = RolloutBatch(rows.select(arrived), cumulative(lengths[arrived]), tensors, arrived)
    return arrived_batch.select(torch.argsort(received_order))


def _to_bytes(tensors: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Concatenate token-aligned tensors as bytes: uint8 ``[num_tokens, bytes per token]``."""
    columns = [x.reshape(num_tokens, prod(x.shape[1:])).contiguous().view(torch.uint8) for x in tensors]
    return torch.cat(columns, dim=1)


def _from_bytes(payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Invert ``_to_bytes``; returns tensors with the dtypes and trailing shapes of ``like``."""
    widths = [prod(x.shape[1:]) * x.element_size() for x in like]
    columns = payload.split(widths, dim=1)
    # Clone: for a single token ``contiguous`` is a no-op and leaves an offset and strides that ``view`` rejects.
    own = [column.clone(memory_format=torch.contiguous_format) for column in columns]
    return [c.view(x.dtype).reshape(payload.shape[0], *x.shape[1:]) for c, x in zip(own, like, strict=True)]
