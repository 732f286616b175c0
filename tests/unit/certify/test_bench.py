"""Ranks that meet before they build a part of the bench together: a rank that comes alone gets an error, no collective without end."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from vapo_mcore.certify import bench


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """This process is rank 0 of two; the store is a real one, behind a prefix as in a run."""
    found = dist.PrefixStore("x", dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)))
    monkeypatch.setattr(bench, "world", lambda: (0, 2))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: found)
    return found


def test_a_rank_that_comes_alone_is_an_error_with_the_ranks_that_did_not(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MEETING_SECONDS", 0.3)
    with pytest.raises(
        RuntimeError, match=r"rank 0 asks for bench\.models, which all ranks build together, but ranks \[1\] have not for 0\.3 s"
    ):
        bench.meet("certify/0/0", "models")
    assert not store.check(["certify/0/0/0"])  # it is not there for one that comes later
    store.set("certify/0/0/1", "models")
    bench.meet("certify/0/0", "models")


def test_ranks_that_ask_for_different_parts_are_an_error(store: dist.Store) -> None:
    store.set("certify/0/3/1", "engine")
    with pytest.raises(RuntimeError, match=r"different parts of the bench at the same time: models, engine"):
        bench.meet("certify/0/3", "models")


def test_a_single_rank_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "world", lambda: (0, 1))
    bench.meet("certify/0/0", "models")
