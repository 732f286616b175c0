"""Requests to stop: one decision of all ranks' wishes."""

from unittest import mock

from vapo_mcore.errors import EXIT_REQUEUE, RunStopped, TrainingError
from vapo_mcore.trainer import stopping
from vapo_mcore.trainer.stopping import StopRequest, StopRequests


def test_nobody_asked() -> None:
    assert StopRequests().agreed() is None


def test_the_first_reason_of_a_rank_stays() -> None:
    requests = StopRequests()
    requests.request("the graders are gone", exit_code=TrainingError.exit_code)
    requests.request("SIGTERM", exit_code=EXIT_REQUEUE)
    assert requests.agreed() == StopRequest("the graders are gone", 2)
    assert requests.agreed() == StopRequest("the graders are gone", 2)  # asking does not take it back


def test_one_rank_asks_for_all() -> None:
    wishes = [None, StopRequest("SIGUSR1", EXIT_REQUEUE), StopRequest("SIGTERM", EXIT_REQUEUE)]
    with mock.patch.object(stopping, "all_gather_objects", return_value=wishes):
        assert StopRequests().agreed() == StopRequest("SIGUSR1", EXIT_REQUEUE)


def test_the_exit_code_of_a_stopped_run_is_the_request_s() -> None:
    assert RunStopped("SIGTERM", EXIT_REQUEUE).exit_code == 75
    assert RunStopped("no reason given").exit_code == 2
