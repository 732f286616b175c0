"""What a run has taken, over the processes that it was resumed from."""

from types import SimpleNamespace

import pytest

from tests.unit.trainer.rollouts import make_config
from vapo_mcore.checkpoint.state import StateRegistry, decode, encode
from vapo_mcore.records import timing
from vapo_mcore.records.console import Console
from vapo_mcore.records.timing import RunClock
from vapo_mcore.trainer.loop import TrainingLoop


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


def test_a_run_goes_on_with_its_clock_and_without_that_of_an_older_checkpoint() -> None:
    def new_run() -> TrainingLoop:
        trainer = SimpleNamespace(models=SimpleNamespace(critic=None), state=StateRegistry())
        return TrainingLoop(make_config(), trainer, None, Console(enabled=False), SimpleNamespace())  # type: ignore[arg-type]

    first = new_run()
    first.clock.load_state_dict({"seconds": 3600.0, "gpu_seconds": 28800.0})
    state = decode(*encode(first.trainer.state.state_dict()))
    resumed = new_run()
    resumed.trainer.state.load_state_dict(state)
    row = {"step": 7}
    resumed._write(row)
    assert row["time/run"] == pytest.approx(3600.0, abs=5) and row["time/gpu_hours"] == pytest.approx(8.0, abs=0.01)
    older = new_run()
    older.load_state_dict({name: value for name, value in state["run"].items() if name != "clock"})
    assert older.clock.metrics()["time/run"] < 5
