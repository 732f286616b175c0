"""Hundreds of verifiers that hang, crash and fork: the pool recovers each time and nothing piles up."""

import os
import resource

import pytest

from vapo_mcore.rewards import GradeItem, VerifierPool

ACTIONS = ("loop", "exit 3", "kill", "fork and return", "fork and stay", "sleep", "segfault", "raise", "exit 0", "nan")
PIPES_OF_A_WORKER = 6  # descriptors
VERIFIER = "tests.unit.rewards.misbehaving:by_response"


def _kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def _processes_of_this_session() -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            count += int(fields[1]) == os.getpid() and fields[0] != "Z"
    return count


@pytest.mark.slow
def test_500_misbehaving_verifiers_leave_memory_descriptors_and_processes_flat():
    def round_of(count: int) -> list[GradeItem]:
        return [GradeItem(VERIFIER, action, "right") for n in range(count) for action in (ACTIONS[n % len(ACTIONS)], "right")]

    with VerifierPool(2, 0.3) as pool:
        pool.grade(round_of(50))
        before = _kilobytes(), len(os.listdir("/proc/self/fd")), _processes_of_this_session()
        for _ in range(9):
            verdicts = pool.grade(round_of(50))
            assert all(verdict.correct for verdict in verdicts[1::2])
            for verdict, action in zip(verdicts[::2], ACTIONS * 5, strict=True):
                assert (verdict.error is None) == action.startswith("fork"), (action, verdict)
        after = _kilobytes(), len(os.listdir("/proc/self/fd")), _processes_of_this_session()
        stats = pool.stats
    print(f"kB, descriptors, processes: {before} after 50, {after} after 500; {stats}")
    assert after[0] - before[0] < 8 * 1024
    assert after[2] <= before[2] + 1  # the one that replaces the last that was ended may be missing at either moment
    assert after[1] <= before[1] + PIPES_OF_A_WORKER * max(0, after[2] - before[2])
    assert (stats.graded, stats.errors) == (600, 400)
    assert (stats.timeouts, stats.crashes, stats.restarts) == (100, 200, 300)
