"""What a check returns: measurements with their tolerances, verdicts and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "information", "not applicable", "warning", "fails"]
VERDICTS: tuple[Verdict, ...] = ("not applicable", "information", "holds", "warning", "fails")
"""From the mildest to the gravest. A check of which some measurement holds and another does not apply, holds. ``information`` is a number
without a tolerance: it neither holds nor fails."""


class NotApplicable(Exception):
    """Raised by a check, on all ranks, if the recipe or machine has nothing for it to measure. The message gives the reason."""


@dataclass(frozen=True)
class Measurement:
    """One thing that a check looked at.

    Attributes:
        what: its name.
        verdict: of this measurement.
        measured: the value in words; with ``not applicable`` the reason.
        tolerance: what would hold, and why.
        remedy: what to do where it does not hold.
        value: the number behind ``measured``, for the certificate; None where there is none.
    """

    what: str
    verdict: Verdict
    measured: str
    tolerance: str = ""
    remedy: str = ""
    value: float | None = None


@dataclass
class CheckRecord:
    """A check's measurements, what ``--against`` compares of it (``details``: plain JSON values), and its duration in seconds."""

    check: str
    measurements: list[Measurement] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """Return the most severe verdict of the measurements."""
        return worst(measurement.verdict for measurement in self.measurements)

    def to_json(self) -> dict[str, Any]:
        return {"verdict": self.verdict, **asdict(self)}


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe of some verdicts; ``not applicable`` for none."""
    return max(verdicts, key=VERDICTS.index, default="not applicable")


def exit_code(records: Sequence[CheckRecord]) -> int:
    """0: everything that was measured and has a tolerance holds; 1: there are warnings, or nothing could be measured; 2: a check fails."""
    verdict = worst(record.verdict for record in records)
    return {"holds": 0, "information": 0, "warning": 1, "not applicable": 1, "fails": 2}[verdict]


def holds(what: str, measured: str, tolerance: str = "", value: float | None = None) -> Measurement:
    return Measurement(what, "holds", measured, tolerance, value=value)


def fails(what: str, measured: str, tolerance: str = "", remedy: str = "", value: float | None = None) -> Measurement:
    return Measurement(what, "fails", measured, tolerance, remedy, value)


def warns(what: str, measured: str, tolerance: str = "", remedy: str = "", value: float | None = None) -> Measurement:
    return Measurement(what, "warning", measured, tolerance, remedy, value)


def informs(what: str, measured: str, value: float | None = None) -> Measurement:
    return Measurement(what, "information", measured, value=value)


def not_applicable(what: str, because: str) -> Measurement:
    return Measurement(what, "not applicable", f"because {because}")
