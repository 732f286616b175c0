"""The table on the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vapo_mcore.certify.record import VERDICTS, CheckRecord, exit_code


def lines_of(record: CheckRecord) -> list[str]:
    """Return a heading with verdict and seconds, then a line per measurement, followed by the remedy if it does not hold."""
    lines = [f"{record.check}: {record.verdict} ({record.seconds:.1f} s)"]
    for entry in record.measurements:
        tolerance = f" [{entry.tolerance}]" if entry.tolerance else ""
        lines.append(f"  {entry.verdict:<14} {entry.what}: {entry.measured}{tolerance}")
        if entry.remedy and entry.verdict in ("fails", "warning"):
            lines.append(f"  {'':<14} remedy: {entry.remedy}")
    return lines


def summary(records: Sequence[CheckRecord]) -> str:
    """Checks by verdict, and the exit code."""
    counts = Counter(record.verdict for record in records)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(VERDICTS) if counts[verdict])
    code = exit_code(records)
    meaning = {0: "everything measured that has a tolerance holds", 1: "look at what does not hold or was not measured"}
    return f"{len(records)} check{'' if len(records) == 1 else 's'}: {shown}; exit code {code}: {meaning.get(code, 'do not train on this')}"
