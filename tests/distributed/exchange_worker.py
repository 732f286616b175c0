"""Worker of test_exchange.py: every case runs on all ranks of one gloo launch; rank 0 prints ``case <name> ok``.

The expected tokens do not come from the code under test: row ``i`` consists of the values ``1000 * i + position``, so each rank
can state what it must receive from the row numbers and lengths alone.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from vapo_mcore.data.rollout_batch import RolloutBatch, Rows, exchange, gather_rows
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.errors import EngineStuck
from vapo_mcore.rollout import agreement
from vapo_mcore.rollout.agreement import ReplicaAgreement
from vapo_mcore.rollout.base import Replica

LENGTHS = [5, 1, 9, 2, 2, 31, 7, 1, 4, 12]


def table(numbers: list[int]) -> Rows:
    n = len(numbers)
    index = torch.tensor(numbers, dtype=torch.int64)
    return Rows(
        prompt_id=[f"set/{i}" for i in numbers],
        group=index // 2,
        sample_index=index % 2,
        verdict=index % 3 == 0,
        graded=torch.ones(n, dtype=torch.bool),
        ungraded=[""] * n,
        score=index.float(),
        reward=index.float() - 1,
        finish_reason=["length" if i % 2 else "stop" for i in numbers],
        prompt_length=torch.ones(n, dtype=torch.int64),
        response_length=torch.tensor([LENGTHS[i] - 1 for i in numbers], dtype=torch.int64),
        tool_length=torch.zeros(n, dtype=torch.int64),
        turns=torch.ones(n, dtype=torch.int64),
        observations_cut=torch.zeros(n, dtype=torch.int64),
        missed_end=torch.zeros(n, dtype=torch.bool),
        source=["set"] * n,
        step_rewards=[((i % LENGTHS[i], float(i)),) for i in numbers],
        segments=[((LENGTHS[i] - 1, i % 3),) for i in numbers],
        observations=[()] * n,
    )


def batch_of(numbers: list[int]) -> RolloutBatch:
    tokens = torch.tensor([1000 * i + t for i in numbers for t in range(LENGTHS[i])], dtype=torch.int64)
    offsets = torch.tensor([0, *[LENGTHS[i] for i in numbers]]).cumsum(0)
    tensors = {
        "tokens": tokens,
        "response_mask": tokens % 1000 > 0,
        "rollout_logprobs": -tokens.float() / 7,
        "half": (tokens % 7).to(torch.bfloat16),
        "wide": torch.stack([tokens, tokens + 1], dim=1).double(),
    }
    return RolloutBatch(table(numbers), offsets, tensors, torch.tensor(numbers, dtype=torch.int64))


def check(held: list[list[int]], owner: list[int], dp_rank_of_rank: list[int]) -> None:
    rank = dist.get_rank()
    batch = batch_of(held[rank])
    rows, holder = gather_rows(batch)
    assert rows.prompt_id == [f"set/{i}" for i in range(len(rows))]
    assert holder.tolist() == [next(r for r, part in enumerate(held) if i in part) for i in range(len(rows))]
    got = exchange(batch, rows, holder=holder, owner=torch.tensor(owner), dp_rank_of_rank=dp_rank_of_rank)
    mine = [i for i, dp in enumerate(owner) if dp == dp_rank_of_rank[rank]]
    expected = batch_of(mine)
    assert got.row_ids.tolist() == mine
    assert got.rows.prompt_id == expected.rows.prompt_id
    assert torch.equal(got.rows.score, expected.rows.score)
    assert torch.equal(got.cu_seqlens, expected.cu_seqlens)
    for name, tensor in expected.tensors.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def every_rank_generates_dp4() -> None:
    check([[3, 0], [1, 9, 4], [2], [8, 5, 7, 6]], [0, 1, 2, 3, 3, 2, 1, 0, 0, 2], [0, 1, 2, 3])


def replicas_of_two_leaders_only() -> None:
    check([[0, 2, 4, 6, 8], [], [1, 3, 5, 7, 9], []], [0, 0, 1, 1, 1, 0, 0, 1, 0, 1], [0, 0, 1, 1])


def one_replica_one_owner() -> None:
    check([[], [], list(range(10)), []], [0] * 10, [0, 0, 0, 0])


def a_rank_that_owns_nothing_and_rows_left_behind() -> None:
    check([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], [0, 0, -1, 2, -1, 2, 0, 2, 2, -1], [0, 1, 2, 2])


def nothing_to_move() -> None:
    check([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], [-1] * 10, [0, 1, 2, 3])


def row_held_twice_is_refused() -> None:
    held = [[0, 1], [1, 2], [3], []]
    try:
        gather_rows(batch_of(held[dist.get_rank()]))
    except ValueError as error:
        assert "not a permutation of" in str(error)
    else:
        raise AssertionError("a row held by two ranks was accepted")


def thd_gather_over_the_group() -> None:
    rank = dist.get_rank()
    for lengths in ([1, 2, 3, 5, 17], [1], [], [40, 1]):
        layout = ThdLayout(lengths, context_parallel_size=4, context_parallel_rank=rank, tensor_parallel_size=2)
        x = torch.arange(1, sum(lengths) + 1)
        for y in (x, x % 2 == 0, x.float() / 3, x.to(torch.bfloat16), torch.stack([x, -x], 1).double()):
            assert torch.equal(layout.gather(layout.shard(y, 0), dist.group.WORLD), y)


def ranks_of_a_replica_meet_after_a_call() -> None:
    """Two replicas of two ranks. The last rank that fails is not met: its error is raised there, within the time to wait."""
    rank = dist.get_rank()
    meeting = ReplicaAgreement(Replica.of_rank(rank, 4, 2))
    assert meeting.meet(None, rank // 2) is None  # replicas differ, their ranks do not
    assert meeting.meet("lost" if rank == 1 else None, int(rank != 1)) is None
    differ = "the ranks of rollout replica 1 sampled different responses to the same requests"
    assert meeting.meet(None, int(rank == 3)) == (differ if rank >= 2 else None)
    if rank != 1:
        return
    start = time.monotonic()
    try:
        with mock.patch.object(agreement, "WAIT_SECONDS", 2.0):
            meeting.meet("lost", 0)
    except EngineStuck as error:
        assert 1.0 < time.monotonic() - start < 30.0
        assert str(error).endswith("on this rank of replica 0, and the replica's other ranks wait for it inside the engine: lost")
    else:
        raise AssertionError("rank 0 has not come")


CASES: list[Callable[[], None]] = [
    every_rank_generates_dp4,
    replicas_of_two_leaders_only,
    one_replica_one_owner,
    a_rank_that_owns_nothing_and_rows_left_behind,
    nothing_to_move,
    row_held_twice_is_refused,
    thd_gather_over_the_group,
    ranks_of_a_replica_meet_after_a_call,
]

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in CASES:
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()
