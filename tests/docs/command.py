"""A command of the pages, and how it is run here.

A command is run as written, or with words of it replaced (``swap``) and others added at its end (``add``), which needs a reason
(``why``). What is run stays the same program and subcommand with the same options: anything else is refused when it is constructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import identity, options, spelt_out, words_of


@dataclass(frozen=True)
class Command:
    """One command.

    ``needs``: folder without which it is skipped, visibly (a model that could not be fetched); ``given``: files that the page takes for
    granted; ``codes``: exit codes that the page allows; ``says``: patterns of its output; ``leaves``: patterns of paths that it
    writes; ``look``: looks closer at tree and output; ``times``: so many at once, as on so many nodes; ``slurm``: on the fake cluster,
    where its jobs must come to a good end, or, with ``held``, be accepted; ``offline``: what it says where there is no package index,
    which is a visible skip; ``by_ci``: ``.ci/run`` runs it; ``cannot``: why it is not run at all.

    ``slow``: only ``make test-docs-slow`` runs it. ``small``: words that ``make test-docs`` adds; ``make test-docs-slow`` runs the command
    a second time without them, and only then calls ``look``.
    """

    written: str
    swap: Mapping[str, str] = field(default_factory=dict)
    add: str = ""
    why: str = ""
    needs: str = ""
    given: Mapping[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (0,)
    says: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    look: Callable[[Path, str], None] | None = None
    times: int = 1
    slurm: bool = False
    held: bool = False
    by_ci: bool = False
    offline: str = ""
    cannot: str = ""
    slow: bool = False
    small: str = ""
    seconds: float = 600

    def __post_init__(self) -> None:
        words = re.split(r"\s+", self.written)
        assert set(self.swap) <= set(words), f"{self.written}: {set(self.swap) - set(words)} is not in it"
        assert bool(self.why) == bool(self.swap or self.add), f"{self.written}: a change and its reason go together"
        replacements = self.add + self.small + "".join(self.swap.values())
        assert not re.search(r"[;&|<>`\n]", replacements), f"{self.written}: one command, not several"
        before, after = spelt_out(self.written)[0], words_of(self.script)
        assert identity(before) == identity(after), f"{self.written}: {self.script} is another command"
        assert options(before) <= options(after), f"{self.written}: {options(before) - options(after)} is left out"

    @property
    def script(self) -> str:
        """What is run here."""
        changed = re.sub(r"\S+", lambda word: self.swap.get(word[0], word[0]), self.written)
        return f"{changed} {self.add}".rstrip()

    @property
    def runs(self) -> bool:
        return not self.by_ci and not self.cannot
