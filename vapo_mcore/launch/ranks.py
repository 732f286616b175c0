"""End a rank when its launcher dies or another rank of its node exits early.

The launcher is torchrun's elastic agent, in torchrun or in ``vapo-mcore train``. It kills all ranks when one fails, but not when it is
itself killed (SIGKILL), and not when a rank exits with code 0 before the others, which would then wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from pathlib import Path

from vapo_mcore.launch.local import LAUNCHER_VARIABLE, SECONDS_BEFORE_KILL, report_error

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 2.0
_GRACE_SECONDS = SECONDS_BEFORE_KILL + 10.0
"""How long a rank may be missing. The launcher takes up to ``SECONDS_BEFORE_KILL`` to kill this rank after another has failed."""


def agent() -> int | None:
    """Return the launcher's process id if this process is a rank started by it; None otherwise, also in child processes of a rank."""
    if not {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        return None
    parent = os.getppid()
    if os.environ.get(LAUNCHER_VARIABLE) == str(parent):
        return parent
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        if any(word == b"torch.distributed.run" or word.endswith((b"/torchrun", b"/torch/distributed/run.py")) for word in words):
            return parent
    return None


def end_with_launcher() -> None:
    """Make the kernel kill this rank (SIGKILL) when its launcher ends for any reason.

    The kernel sends the signal when the *thread* that started this process ends; the agent starts ranks from its main thread.
    """
    launcher, parent = os.environ.get(LAUNCHER_VARIABLE), agent()
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        orphaned = os.getppid() != parent
    else:
        orphaned = launcher is not None and not Path(f"/proc/{launcher}").exists()
    if orphaned:  # the launcher ended before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


class SiblingWatch:
    """Ends this rank if another rank of this node has exited during the run.

    The launcher ends the run when a rank fails, so a rank that stays missing for longer has exited with code 0.
    """

    def __init__(self, *, look_seconds: float = _LOOK_SECONDS, grace_seconds: float = _GRACE_SECONDS) -> None:
        self.look_seconds, self.grace_seconds = look_seconds, grace_seconds
        self._over = threading.Event()

    def start(self) -> None:
        """Start the watching thread, if a launcher started this process together with others."""
        launcher = agent()
        if launcher is not None and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
            threading.Thread(target=self._watch, args=(launcher,), name="sibling ranks", daemon=True).start()

    def stop(self) -> None:
        """Stop watching: all ranks have reached the end of the run and may exit."""
        self._over.set()

    def _watch(self, launcher: int) -> None:
        local_size, rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["RANK"])
        first = rank - int(os.environ["LOCAL_RANK"])
        expected = set(range(first, first + local_size))
        known: dict[int, int] = {}  # process id -> rank
        missing_for = 0.0
        while not self._over.wait(self.look_seconds):
            if len(known) < local_size:
                known |= ranks_below(launcher)
            living = {number for process, number in known.items() if _is_child(process, launcher)}
            missing = expected - living
            missing_for = missing_for + self.look_seconds if missing else 0.0
            if missing_for > self.grace_seconds:
                names = ", ".join(map(str, sorted(missing)))
                report_error(
                    f"rank {names} exited with code 0 before the end of the run, {missing_for:.0f} s ago, and the other ranks would wait "
                    "for it; check its output for the cause (for example an extension that calls sys.exit)"
                )
                os._exit(2)


SIBLINGS = SiblingWatch()
"""The watch of this process; the command line starts it, ``ending_together`` stops it."""


def ranks_below(launcher: int) -> dict[int, int]:
    """Return process id -> rank of the live ranks started by torchrun (process ``launcher``)."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not _is_child(int(entry.name), launcher):
            continue
        with contextlib.suppress(OSError, KeyError):  # it has ended, belongs to another user, or has not yet exec'd the rank
            variables = dict(item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item)
            if b"LOCAL_RANK" in variables:
                ranks[int(entry.name)] = int(variables[b"RANK"])
    return ranks


def _is_child(process: int, parent: int) -> bool:
    """Return whether ``process`` is alive (not a zombie) and a child of ``parent``."""
    try:
        state, parent_of_it = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state not in ("Z", "X") and int(parent_of_it) == parent
