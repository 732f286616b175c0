"""torchrun's store outlives the ranks: what an earlier start has left in it must not be taken for the present one's."""

import pytest
import torch.distributed as dist

from vapo_mcore.megatron.parallel import _of_this_start


def test_a_start_sees_nothing_of_the_ones_before(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    _of_this_start(store).set("address of rank 0", "dead")
    assert _of_this_start(store).check(["address of rank 0"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _of_this_start(store).check(["address of rank 0"])


def test_nodes_that_count_for_themselves_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    for count in ("1", "0"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        _of_this_start(store).set(f"node with {count}", "")
    assert _of_this_start(store).check(["node with 1", "node with 0"])
