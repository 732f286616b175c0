"""A world of one behaves like a world: the same errors, the same values."""

import pytest
import torch.distributed as dist

from vapo_mcore.collectives import all_gather_objects, broadcast_object, fail_together, lost_a_peer, world
from vapo_mcore.errors import DataError, VapoError


def test_a_world_without_process_group():
    assert world() == (0, 1)
    assert all_gather_objects({"a": 1}) == [{"a": 1}]
    assert broadcast_object("x") == "x"


def test_an_error_keeps_its_kind_and_message():
    with pytest.raises(DataError, match="row 3"), fail_together():
        raise DataError("row 3 is empty")


def test_bugs_are_not_dressed_up():
    with pytest.raises(KeyError), fail_together():
        raise KeyError("a bug")


def test_what_counts_as_a_lost_peer():
    assert lost_a_peer(RuntimeError("[...pair.cc:553] Connection closed by peer [127.0.0.1]:15789. This is typically ..."))
    assert lost_a_peer(dist.DistBackendError("NCCL error: remote process exited"))
    assert not lost_a_peer(RuntimeError("shape mismatch"))
    assert not lost_a_peer(VapoError("no space left"))
