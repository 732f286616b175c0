"""``--against``: what differs from an older certificate, the first thing first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vapo_mcore.certify.certificate import Certificate, config_changes, version_changes
from vapo_mcore.certify.record import CheckRecord
from vapo_mcore.certify.tolerances import BY_NAME
from vapo_mcore.config.schema import Config

GROWTH = BY_NAME["against/growth"].float32
"""Factor by which a layer's difference to transformers may grow without being named: rounding differs between kernels."""


def differences(old: Certificate, config: Config, records: Sequence[CheckRecord]) -> list[str]:
    """Sentences from cause to effect: versions, settings, tensors, layers, positions, verdicts. Empty where nothing differs."""
    new = {record.check: record for record in records}
    found = [f"version: {change}" for change in version_changes(old)]
    found += [f"setting: {change}" for change in config_changes(old, config)]
    found += _tensors(_details(old, "engine", "checksums"), _new(new, "engine", "checksums"))
    dtype = config.model.dtype
    for kind in dict.fromkeys(("float32", dtype)):
        found += _layers(kind, _details(old, "trainer", f"layers_{kind}"), _new(new, "trainer", f"layers_{kind}"))
    for check, limit in (("trainer", "trainer/max"), ("engine", "engine/max")):
        found += _positions(check, _details(old, check, "logprobs"), _new(new, check, "logprobs"), BY_NAME[limit].limit(dtype))
    return found + list(_verdicts(old, new))


def _details(old: Certificate, check: str, name: str) -> Any:
    return old.checks.get(check, {}).get("details", {}).get(name)


def _new(new: dict[str, CheckRecord], check: str, name: str) -> Any:
    return new[check].details.get(name) if check in new else None


def _tensors(before: Any, now: Any) -> list[str]:
    if not before or not now:
        return []
    changed = [name for name in now if name in before and before[name] != now[name]]
    odd = sorted(before.keys() ^ now.keys())
    found = [f"tensors: {len(odd)} are in one certificate only, the first is {odd[0]}"] if odd else []
    if changed:
        found.append(f"tensors: {len(changed)} of {len(now)} have other values in the trainer, the first is {changed[0]}")
    return found


def _layers(dtype: str, before: Any, now: Any) -> list[str]:
    if not before or not now:
        return []
    if len(before) != len(now):
        return [f"layers: {len(before)} before, {len(now)} now"]
    floor = 0.1 * BY_NAME["trainer/layer"].limit(dtype)
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        if new > GROWTH * old + floor:
            return [
                f"layers ({dtype}): layer {number} is the first whose hidden states are further from transformers: {old:.3g} -> {new:.3g}"
            ]
    return []


def _positions(check: str, before: Any, now: Any, limit: float) -> list[str]:
    """Find the first text and position at which log-probs differ by more than ``limit``."""
    if not before or not now:
        return []
    if [len(text) for text in before] != [len(text) for text in now]:
        return [f"positions: the texts of the check {check!r} are not those of the certificate (data or tokenizer changed)"]
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        for position, (one, other) in enumerate(zip(old, new, strict=True), 1):
            if not abs(one - other) <= limit:
                return [f"positions: log-prob of the {check} at text {number}, token {position}: {one:.4f} -> {other:.4f}"]
    return []


def _verdicts(old: Certificate, new: dict[str, CheckRecord]) -> Iterator[str]:
    for name, record in new.items():
        before = old.checks.get(name)
        if before is None:
            yield f"verdict: {name} was not in the certificate, now {record.verdict}"
        elif before["verdict"] != record.verdict:
            yield f"verdict: {name}: {before['verdict']} -> {record.verdict}"
