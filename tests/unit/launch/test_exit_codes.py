"""Which of the ranks' exit codes is the run's, and which ranks are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from vapo_mcore.errors import EXIT_HANG, EXIT_REQUEUE
from vapo_mcore.launch.local import _report

TERM, KILL = -15, -9


@pytest.mark.parametrize(
    ("exits", "code", "named"),
    [
        ({0: (2, 0), 1: (TERM, 0)}, 2, ""),
        ({0: (2, 0), 1: (1, 1)}, 2, ""),  # explained, and a crash that came of it
        ({0: (KILL, 30), 1: (KILL, 0)}, 137, "rank 1"),  # the agent ended rank 0, which did not listen
        ({0: (KILL, 1), 1: (KILL, 0)}, 137, "rank 0 rank 1"),  # too early for the agent
        ({0: (EXIT_REQUEUE, 0), 1: (KILL, 0)}, 137, "rank 1"),  # told to stop because another rank died: nothing to requeue for
        ({0: (EXIT_REQUEUE, 0), 1: (EXIT_REQUEUE, 0)}, EXIT_REQUEUE, ""),
        ({0: (1, 0), 1: (EXIT_HANG, 0), 2: (KILL, 0)}, EXIT_HANG, "rank 2"),
        ({0: (TERM, 0), 1: (TERM, 0)}, 143, "rank 0 rank 1"),
    ],
)
def test_the_gravest_code_of_a_rank_is_the_run_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], exits: dict[int, tuple[int, int]], code: int, named: str
) -> None:
    assert _report(tmp_path, exits, len(exits)) == code
    told = capsys.readouterr().err
    assert [line.split("process of ")[1].split(" was")[0] for line in told.splitlines()] == [f"rank {n}" for n in named.split()[1::2]]
