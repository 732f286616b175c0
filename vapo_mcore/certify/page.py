"""The certificate as one HTML page, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template

from vapo_mcore import __version__
from vapo_mcore.certify.certificate import Certificate
from vapo_mcore.certify.names import BUILT_IN
from vapo_mcore.certify.record import CheckRecord, Verdict, worst
from vapo_mcore.report.page import asset

FILE_NAME, PREVIOUS_NAME = "certificate.html", "certificate.previous.html"
_CLASSES: dict[Verdict, str] = {"holds": "good", "information": "soft", "not applicable": "soft", "warning": "warn", "fails": "bad"}


def build_page(certificate: Certificate, records: Sequence[CheckRecord], found: Sequence[str] | None) -> str:
    """Return the HTML text. ``found``: differences from an older certificate, most fundamental first; None: none given."""
    template = Template(files("vapo_mcore.certify").joinpath("assets", "certificate.html").read_text(encoding="utf-8"))
    verdict = worst(record.verdict for record in records)
    facts = {"made": certificate.made, **certificate.versions, **{name: str(value) for name, value in certificate.machine.items()}}
    return template.substitute(
        version=escape(__version__),
        style=asset("page.css"),
        verdict=_verdict(verdict),
        facts="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()),
        checks="\n".join(_check(record) for record in records),
        differences="" if found is None else _differences(found),
        config=escape(certificate.config),
    )


def _verdict(verdict: Verdict) -> str:
    return f'<span class="{_CLASSES[verdict]}">{escape(verdict)}</span>'


def _check(record: CheckRecord) -> str:
    rows = []
    for entry in record.measurements:
        remedy = entry.remedy if entry.verdict in ("fails", "warning") else ""
        cells = (escape(entry.what), escape(entry.measured), escape(entry.tolerance), _verdict(entry.verdict), escape(remedy))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("measurement", "measured", "tolerance", "verdict", "remedy"))
    about = escape(BUILT_IN.get(record.check, "your own check"))
    return (
        f'<h2 id="{escape(record.check)}">{escape(record.check)}: {_verdict(record.verdict)}</h2>'
        f'<p class="about">{about}; {record.seconds:.1f} s</p>'
        f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _differences(found: Sequence[str]) -> str:
    if not found:
        return "<h2>Against the older certificate</h2><p>Nothing differs.</p>"
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in found)
    return f"<h2>Against the older certificate</h2><p>The first thing that differs comes first.</p><ol>{items}</ol>"
