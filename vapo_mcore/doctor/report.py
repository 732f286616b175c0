"""Findings, and functions that merge them, format them as a table and compute the exit code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "warn", "FAIL"]
_DETAIL_WIDTH = 92


@dataclass(frozen=True)
class Finding:
    """Result of one check: its name, status, and what was found (for a fault also the remedy)."""

    check: str
    status: Status
    detail: str


def merge(by_node: Mapping[str, Iterable[Finding]]) -> list[tuple[Finding, str]]:
    """Return findings with the nodes that have them: one if all nodes agree ("" or "all N nodes"), else one per distinct result."""
    order: dict[str, dict[Finding, list[str]]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            order.setdefault(finding.check, {}).setdefault(finding, []).append(node)
    everywhere = "" if len(by_node) == 1 else f"all {len(by_node)} nodes"
    rows = []
    for answers in order.values():
        for finding, nodes in answers.items():
            where = (
                everywhere
                if len(nodes) == len(by_node)
                else ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
            )
            rows.append((finding, where))
    return rows


def require_same_versions(by_node: Mapping[str, Iterable[Finding]]) -> dict[str, list[Finding]]:
    """Return the findings of each node; those on versions fail if the nodes differ."""
    details = {finding.detail for findings in by_node.values() for finding in findings if finding.check == "versions"}

    def marked(finding: Finding) -> Finding:
        if finding.check != "versions" or len(details) < 2:
            return finding
        return replace(finding, status="FAIL", detail=f"{finding.detail}: not the same on all nodes")

    return {node: [marked(finding) for finding in findings] for node, findings in by_node.items()}


def table(rows: Iterable[tuple[Finding, str]]) -> str:
    """Format check, status, node and detail as aligned text; long details are wrapped."""
    rows = list(rows)
    check_width = max(len(finding.check) for finding, _ in rows)
    where_width = max(len(where) for _, where in rows)
    lines = []
    for finding, where in rows:
        head = f"{finding.check:<{check_width}}  {finding.status:<4}  " + (f"{where:<{where_width}}  " if where_width else "")
        details = textwrap.wrap(finding.detail, _DETAIL_WIDTH, break_on_hyphens=False) or [""]
        lines += [f"{head}{details[0]}".rstrip(), *(" " * len(head) + detail for detail in details[1:])]
    return "\n".join(lines)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all checks passed, 1 for warnings, 2 for failures."""
    statuses = {finding.status for finding in findings}
    return 2 if "FAIL" in statuses else 1 if "warn" in statuses else 0
