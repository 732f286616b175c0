"""Meeting of a replica's ranks after each call of an engine that runs them in lockstep."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from vapo_mcore.collectives import lost_a_peer
from vapo_mcore.errors import EngineStuck
from vapo_mcore.rollout.base import Replica

WAIT_SECONDS = 30.0
"""How long a rank whose engine failed waits for the others, which may be finishing the same step or converting its results."""


class ReplicaAgreement:
    """Exchanges the outcome of a call between the ranks of a replica. All ranks of the run must construct it together.

    It has its own process group, because the other ranks may be waiting in one of the engine's. It sends point to point: of gloo's
    operations only receiving takes a time limit on every rank and leaves nothing behind that would delay the end of the process.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._group: dist.ProcessGroup | None = None
        self._others: list[int] = []
        if replica.size > 1:
            firsts = range(0, replica.count * replica.size, replica.size)
            groups = [dist.new_group(list(range(first, first + replica.size)), backend="gloo") for first in firsts]
            self._group = groups[replica.index]
            self._others = [rank for rank in range(replica.size) if rank != replica.rank_in_replica]

    def meet(self, failure: str | None, digest: int) -> str | None:
        """Wait for the replica's other ranks. Returns a message on all ranks if the call failed on none and the digests differ.

        Raises EngineStuck on a rank with a ``failure`` if the others do not leave the engine: they wait there for this rank, and nothing
        but the end of this process interrupts them.
        """
        mine = torch.tensor([failure is not None, digest])
        theirs = [torch.empty_like(mine) for _ in self._others]
        sent = [dist.isend(mine, group=self._group, group_dst=rank) for rank in self._others]
        received = [dist.irecv(outcome, group=self._group, group_src=rank) for outcome, rank in zip(theirs, self._others, strict=True)]
        try:
            for work in (*received, *sent):
                assert work is not None
                work.wait() if failure is None else work.wait(timedelta(seconds=WAIT_SECONDS))
        except RuntimeError as error:
            if failure is None or lost_a_peer(error):
                raise
            where = f"on this rank of replica {self.replica.index}, and the replica's other ranks wait for it inside the engine"
            raise EngineStuck(f"the rollout engine failed {where}: {failure}") from error
        if any(bool(outcome[0]) for outcome in (mine, *theirs)) or all(torch.equal(outcome, mine) for outcome in theirs):
            return None
        return f"the ranks of rollout replica {self.replica.index} sampled different responses to the same requests"
