"""torchrun's store outlives the ranks: what an earlier start has left in it must not be taken for the present one's."""

import pytest
import torch.distributed as dist

from vapo_mcore.errors import ConfigError
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
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("TORCHELASTIC_MAX_RESTARTS", "3"), ("TORCHELASTIC_USE_AGENT_STORE", "False")):
        monkeypatch.setenv(name, value)
    for count in ("1", "0"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        _of_this_start(store).set(f"node with {count}", "")
    assert _of_this_start(store).check(["node with 1", "node with 0"])


def test_nodes_that_would_share_the_store_of_the_start_before_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GROUP_WORLD_SIZE", "2"), ("TORCHELASTIC_MAX_RESTARTS", "3"), ("TORCHELASTIC_USE_AGENT_STORE", "True")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--max-restarts=3 on 2 nodes: .* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        _of_this_start(dist.HashStore())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    _of_this_start(dist.HashStore()).set("key", "value")
