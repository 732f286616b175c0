"""What a run has taken, over the processes that it was resumed from."""

import pytest

from vapo_mcore.trainer import timing
from vapo_mcore.trainer.timing import RunClock


def test_a_resumed_run_counts_what_it_took_before_on_as_many_processes_as_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    first = RunClock(processes=8)
    assert first.metrics() == {"time/run": 0.0, "time/gpu_hours": 0.0}
    now[0] = 1900.0  # half an hour on 8 GPUs
    assert first.metrics() == {"time/run": 1800.0, "time/gpu_hours": 4.0}
    state = first.state_dict()
    now[0] = 7.0  # another process on another machine, which needs some seconds to load the state
    later = RunClock(processes=2)
    now[0] = 17.0
    later.load_state_dict(state)
    now[0] = 3617.0  # an hour on 2 GPUs
    assert later.metrics() == {"time/run": 5400.0, "time/gpu_hours": 6.0}
