"""Pack a rollout into mini-batches and distribute it: rows are replicated on all ranks, tokens live on their owning rank.

Every rank computes the same plan from the replicated rows: draw mini-batches, balance each over data parallelism, pack, then exchange
the tokens once. Log-probs, values and both updates use the same packs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vapo_mcore.algorithm.segments import broadcast_to_tokens, keep_responses
from vapo_mcore.algorithm.weights import Denominators
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.microbatch import MicroBatch, make_microbatch
from vapo_mcore.data.packing import Schedule, ScheduledMiniBatch, attention_cost_ratio, schedule
from vapo_mcore.data.ragged import token_index
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows, exchange
from vapo_mcore.data.thd import pad_multiples
from vapo_mcore.experience.sampling import Round
from vapo_mcore.megatron.parallel import ParallelContext


@dataclass(frozen=True)
class StepTable:
    """Step rewards, replicated: ``row`` int64 [k], ``position`` int64 [k] in the row's sequence, ``rewards`` float64 [k]."""

    row: Tensor
    position: Tensor
    rewards: Tensor

    def __len__(self) -> int:
        return self.row.numel()

    @classmethod
    def of_rows(cls, rows: Rows, keep: Tensor) -> StepTable:
        """Collect the step rewards of the rows selected by ``keep`` (bool [n])."""
        kept = keep.tolist()
        entries = [(row, *step) for row, steps in enumerate(rows.step_rewards) if kept[row] for step in steps]
        columns = list(zip(*entries, strict=True)) if entries else [(), (), ()]
        row, position = (torch.tensor(column, dtype=torch.int64) for column in columns[:2])
        return cls(row, position, torch.tensor(columns[2], dtype=torch.float64))

    def with_outcomes(self, rows: Rows, keep: Tensor) -> StepTable:
        """Return a table that also has the reward of each row selected by ``keep``, placed at the row's last token."""
        chosen = keep.nonzero().flatten()
        return StepTable(
            torch.cat([self.row, chosen]),
            torch.cat([self.position, rows.length[chosen] - 1]),
            torch.cat([self.rewards, rows.reward[chosen].double()]),
        )


@dataclass(frozen=True)
class MiniBatch:
    """The data of one optimizer step: loss denominators over all ranks, and this rank's micro-batches (tokens and mask only)."""

    denominators: Denominators
    microbatches: list[MicroBatch]

    @property
    def is_masked(self) -> bool:
        """Return whether no token on any rank carries a loss, so that the step is skipped."""
        return self.denominators.tokens == 0


@dataclass(frozen=True)
class RowOwners:
    """The ranks that own each row in a layout, replicated.

    ``data_parallel_rank``: int64 [n], -1 for rows that are not trained on; ``dp_rank_of_rank``: data-parallel rank of each rank.
    """

    data_parallel_rank: Tensor
    dp_rank_of_rank: Sequence[int]

    @property
    def first_ranks(self) -> Tensor:
        """int64 [n]: the first rank that owns each row; -1: none."""
        first = torch.tensor([self.dp_rank_of_rank.index(number) for number in range(max(self.dp_rank_of_rank) + 1)])
        return torch.where(self.data_parallel_rank >= 0, first[self.data_parallel_rank.clamp(min=0)], -1)


@dataclass
class Experience:
    """A graded, packed and distributed rollout.

    Attributes:
        rows: all responses, replicated; ``reward`` is shaped.
        trainable: bool [n], replicated: graded and, with ``truncation: mask``, not truncated.
        batch: rows owned by this data-parallel rank, with tensors on the compute device, choices of experts on the host.
            ``response_mask`` is True at tokens that carry a loss, ``positive_mask`` at tokens of the positive-example loss.
        cu_seqlens: cumulative sequence lengths of ``batch``, on the compute device.
        minibatches: in training order.
        bootstrap_values: float32 [rows of batch], the critic's output at each last token; only with ``truncation: bootstrap``.
        skipped: int64 [n], replicated: leading sampled tokens of each row that carry no loss: too old (``horizon.max_staleness``), or
            of earlier steps (``horizon.train: segments``; there ``positive_mask`` covers them nevertheless).
        owners: the ranks that own each row; None if it was not distributed.
        elsewhere: the same rows as the critic's layout owns them; None if it is the policy's.
    """

    rows: Rows
    trainable: Tensor
    batch: RolloutBatch
    cu_seqlens: Tensor
    minibatches: list[MiniBatch]
    bootstrap_values: Tensor | None = None
    skipped: Tensor | None = None  # None: 0
    owners: RowOwners | None = None
    elsewhere: Experience | None = None

    @property
    def in_critic_layout(self) -> Experience:
        """The rows as the critic's layout owns them."""
        return self if self.elsewhere is None else self.elsewhere

    @property
    def mask(self) -> Tensor:
        return self.batch["response_mask"]

    @property
    def trained_lengths(self) -> Tensor:
        """int64 [n], replicated: number of tokens of each response that carry a loss."""
        skipped = 0 if self.skipped is None else self.skipped
        return (self.rows.response_length - skipped) * self.trainable

    def sampled_now(self) -> Tensor:
        """Return ``mask`` without the tokens that an older policy sampled (``rollout.horizon``); bool [total]."""
        rows = self.batch.rows
        if not any(rows.segments):
            return self.mask
        older = rows.stale_tokens(0)
        if self.skipped is not None:
            older = older - self.skipped[self.batch.row_ids]  # these are not in the mask
        return self.mask & ~leading_tokens(self.mask, older, self.cu_seqlens)

    def microbatches(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of all mini-batches, in order."""
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch.microbatches]

    def store(self, name: str, parts: Sequence[Tensor]) -> None:
        """Store a per-token model output in ``batch``. ``parts`` has one tensor per micro-batch, in the order of ``microbatches()``."""
        self.batch.scatter_tokens(
            name, parts, [self._index(each, part.device) for each, part in zip(self.microbatches(), parts, strict=True)]
        )

    def store_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """Return a per-row model output in the row order of ``batch``. ``parts`` has one tensor per micro-batch."""
        rows = torch.cat([torch.empty(0, dtype=torch.int64), *(microbatch.rows for microbatch in self.microbatches())])
        values = torch.cat([torch.empty(0, device=self.cu_seqlens.device), *parts])
        return torch.zeros(len(self.batch), device=values.device).index_copy_(0, rows.to(values.device), values)

    def on_rows(self, column: Tensor) -> Tensor:
        """Select the entries of a replicated column [n] for the rows of ``batch`` and move them to its device."""
        return column[self.batch.row_ids].to(self.cu_seqlens.device)

    def rows_column(self, name: str) -> Tensor:
        """Return a replicated column [n] that a custom loss may read: a name of ``extensions.points.TERM_INPUTS`` without ``row_``."""
        rows = self.rows
        columns = {"length": rows.response_length, "correct": rows.verdict, "reward": rows.total_reward, "group": rows.group}
        columns |= {"score": rows.score, "truncated": rows.truncated, "id": torch.arange(len(rows))}
        return columns[name]

    def steps(self, keep: Tensor) -> StepTable:
        """Return the step rewards of the rows selected by ``keep`` (bool [n]); the same on all ranks."""
        return StepTable.of_rows(self.rows, keep)

    def trained_steps(self) -> StepTable:
        """Return the step rewards of trainable rows, except those that end in the ``skipped`` tokens, before which nothing is trained."""
        table = self.steps(self.trainable)
        if self.skipped is None:
            return table
        counts = self.skipped.tolist()
        first = torch.tensor([self.rows.place(row, count) for row, count in enumerate(counts)], dtype=torch.int64)
        kept = table.position >= first[table.row]
        return StepTable(table.row[kept], table.position[kept], table.rewards[kept])

    def positions(self, steps: StepTable) -> tuple[Tensor, Tensor]:
        """Return (int64 token positions in ``batch`` where steps of owned rows end, indices of these steps in the table)."""
        local = torch.full((len(self.rows),), -1, dtype=torch.int64)
        local[self.batch.row_ids] = torch.arange(len(self.batch))
        owner = local[steps.row]
        mine = (owner >= 0).nonzero().flatten()
        return (self.batch.cu_seqlens[owner[mine]] + steps.position[mine]).to(self.cu_seqlens.device), mine

    def with_tensors(self, microbatch: MicroBatch, names: Sequence[str]) -> MicroBatch:
        """Return the micro-batch with the named token tensors of ``batch`` added, on the compute device."""
        device = self.cu_seqlens.device
        chosen = {}
        for name in names:
            source = self.batch[name]
            chosen[name] = source.index_select(0, self._index(microbatch, source.device)).to(device, non_blocking=True)
        return microbatch.with_tensors(**chosen)

    def _index(self, microbatch: MicroBatch, device: torch.device) -> Tensor:
        """Return the positions of the micro-batch's tokens in ``batch``, on the compute device or on the host (choices of experts)."""
        assert microbatch.index is not None, "micro-batches of an experience are made from its batch"
        return microbatch.index if microbatch.index.device == device else token_index(self.batch.cu_seqlens, microbatch.rows)

    def response_ids(self) -> list[str]:
        """Return names of the owned responses for error messages."""
        rows = self.batch.rows
        return [f"{prompt} sample {sample}" for prompt, sample in zip(rows.prompt_id, rows.sample_index.tolist(), strict=True)]


def shuffle_seed(run_seed: int, rollout: int) -> int:
    """Return the seed of a rollout's mini-batch shuffle: a hash, so that neighbouring seeds and rollouts are independent."""
    return int.from_bytes(hashlib.sha256(f"mini-batches/{run_seed}/{rollout}".encode()).digest()[:8], "little")


def plan_minibatches(config: Config, architecture: ModelArchitecture, parallel: ParallelContext, rows: Rows, rollout: int) -> Schedule:
    """Schedule all graded rows: mini-batch, owning rank and micro-batch of each. Ungraded rows are not scheduled."""
    return plan_rows(
        config,
        architecture,
        parallel,
        rows.length,
        rows.graded.nonzero().flatten(),
        config.batch.mini_batch_size,
        shuffle_seed(config.seed, rollout),
    )


def plan_rows(
    config: Config,
    architecture: ModelArchitecture,
    parallel: ParallelContext,
    lengths: Tensor,
    rows: Tensor,
    minibatch_size: int,
    seed: int,
) -> Schedule:
    """Schedule ``rows`` (indices into ``lengths``) for this run's parallel layout and micro-batch token limit."""
    sequence, total = pad_multiples(parallel.context_parallel_size, parallel.tensor_model_parallel_size)
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return schedule(
        lengths,
        minibatch_size,
        parallel.data_parallel_size,
        config.batch.max_tokens_per_microbatch,
        seed=seed,
        microbatch_multiple=parallel.microbatch_group,
        min_microbatches=parallel.pipeline_model_parallel_size if interleaved else 1,
        pad_multiple=sequence,
        total_multiple=total,
        attention_cost_ratio=attention_cost_ratio(architecture),
        rows=rows,
    )


def distribute(
    sampled: Round,
    rows: Rows,
    trainable: Tensor,
    positive: Tensor,
    plan: Schedule,
    parallel: ParallelContext,
    dp_rank_of_rank: Sequence[int],
    skipped: Tensor | None = None,
    *,
    whole_positive: bool = False,
) -> Experience:
    """Send the tokens to their owners and build the mini-batches. Collective over all ranks.

    ``trainable``, ``positive``: bool [n], replicated; rows whose tokens carry a loss, and rows of the positive-example loss.
    ``skipped``: int64 [n], replicated; leading sampled tokens that carry none (None: 0).
    ``whole_positive``: the positive-example loss covers these too.
    """
    device = parallel.device
    owned = exchange(sampled.local.to(device), rows, holder=sampled.holder, owner=plan.owner, dp_rank_of_rank=dp_rank_of_rank)
    cu_seqlens = owned.cu_seqlens.to(device)
    owned["response_mask"] = keep_responses(owned["response_mask"], cu_seqlens, trainable[owned.row_ids].to(device))
    whole = owned["response_mask"]
    if skipped is not None:
        owned["response_mask"] = whole & ~leading_tokens(whole, skipped[owned.row_ids], cu_seqlens)
    imitated = whole if whole_positive else owned["response_mask"]
    owned["positive_mask"] = broadcast_to_tokens(positive[owned.row_ids].to(device), imitated, cu_seqlens)
    local_row = torch.full((len(rows),), -1, dtype=torch.int64)
    local_row[owned.row_ids] = torch.arange(len(owned))
    all_lengths = rows.response_length * trainable
    lengths = all_lengths if skipped is None else all_lengths - skipped * trainable
    imitated_lengths = (all_lengths if whole_positive else lengths) * positive
    minibatches = [
        MiniBatch(
            replace(Denominators.from_lengths(lengths[scheduled.rows]), positive_tokens=int(imitated_lengths[scheduled.rows].sum())),
            pack_microbatches(scheduled, owned, local_row, parallel, ("tokens", "response_mask")),
        )
        for scheduled in plan.minibatches
    ]
    owners = RowOwners(plan.owner, dp_rank_of_rank)
    return Experience(rows, trainable, owned, cu_seqlens, minibatches, skipped=skipped, owners=owners)


def leading_tokens(mask: Tensor, counts: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return bool [total], True at the first ``counts`` (int64 [n]) unmasked tokens of each row, and at masked ones up to the next."""
    lengths = cu_seqlens.diff()
    total = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(mask, 0, out=total[1:])
    limits = total[cu_seqlens[:-1]] + counts.to(mask.device)
    return total[1:] <= torch.repeat_interleave(limits, lengths)


def pack_microbatches(
    scheduled: ScheduledMiniBatch, owned: RolloutBatch, local_row: Tensor, parallel: ParallelContext, names: tuple[str, ...]
) -> list[MicroBatch]:
    """Build this rank's micro-batches of a scheduled mini-batch. ``local_row`` maps row numbers of the schedule to rows of ``owned``."""
    return [
        make_microbatch(
            owned,
            local_row[torch.tensor(pack, dtype=torch.int64)],
            context_parallel_size=parallel.context_parallel_size,
            context_parallel_rank=parallel.context_parallel_rank,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
            device=parallel.device,
            names=names,
        )
        for pack in scheduled.microbatches[parallel.data_parallel_rank]
    ]
