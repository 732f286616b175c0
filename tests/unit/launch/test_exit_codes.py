"""Which of the ranks' exit codes is the run's, and which ranks are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from vapo_mcore.errors import EXIT_HANG, EXIT_REQUEUE
from vapo_mcore.launch.local import _report

TERM, KILL = -15, -9


@pytest.mark.parametrize(
    ("exits", "code", "told"),
    [
        ({0: (2, 0), 1: (TERM, 0)}, 2, ["process of rank 0 ended with exit code 2"]),
        ({0: (2, 0), 1: (1, 1)}, 2, ["process of rank 0 ended with exit code 2", "process of rank 1 ended with exit code 1"]),
        ({0: (KILL, 30), 1: (KILL, 0)}, 137, ["process of rank 1 was ended by signal SIGKILL"]),  # the agent ended rank 0
        ({0: (KILL, 1), 1: (KILL, 0)}, 137, ["processes of ranks 0, 1 were ended by signal SIGKILL"]),  # too early for the agent
        # told to stop because another rank died: nothing to requeue for
        (
            {0: (EXIT_REQUEUE, 0), 1: (KILL, 0)},
            137,
            ["process of rank 0 ended with exit code 75", "process of rank 1 was ended by signal SIGKILL"],
        ),
        (
            {0: (1, 0), 1: (1, 0), 2: (3, 0)},
            3,
            ["processes of ranks 0, 1 ended with exit code 1", "process of rank 2 ended with exit code 3"],
        ),
        ({0: (TERM, 0), 1: (TERM, 0)}, 143, ["processes of ranks 0, 1 were ended by signal SIGTERM"]),
    ],
)
def test_the_gravest_code_of_a_rank_is_the_run_s_and_silent_ranks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exits: dict[int, tuple[int, int]], code: int, told: list[str]
) -> None:
    assert _report(tmp_path, exits, len(exits)) == code
    assert capsys.readouterr().err.splitlines() == [f"error: the {line}" for line in told]


def test_a_rank_that_has_spoken_is_not_named_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0").write_text("2\nthe model is not there")
    (tmp_path / "1").write_text("75\nstopped after step 3")
    assert _report(tmp_path, {0: (2, 0), 1: (EXIT_REQUEUE, 0), 2: (EXIT_HANG, 0)}, 3) == EXIT_HANG
    assert capsys.readouterr().err.splitlines() == [
        "error (rank 0): the model is not there",
        "stopped (rank 1): stopped after step 3",
        "error: the process of rank 2 ended with exit code 76",
    ]
