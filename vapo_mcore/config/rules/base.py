"""What a rule is, and the table of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.layers import Fault, overlap
from vapo_mcore.config.schema import Config


@dataclass(frozen=True)
class Subject:
    """What the rules look at: the config, and the architectures of the model and of a loaded critic if they could be read."""

    config: Config
    architecture: ModelArchitecture | None
    critic_architecture: ModelArchitecture | None
    given: Callable[[str], bool]  # whether a dotted key (or one below it) was set in a file or an override


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    check: Callable[[Subject], str | None]
    needs_architecture: bool


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Callable[[Subject], str | None]], Callable[[Subject], str | None]]:
    def register(check: Callable[[Subject], str | None]) -> Callable[[Subject], str | None]:
        RULES.append(Rule(keys, check, "model.path" in keys))
        return check

    return register


def broken_rules(subject: Subject, faulty: set[str]) -> Iterator[Fault]:
    """Faults of all rules none of whose keys is in ``faulty`` (dotted keys; a section covers what is below it)."""
    for entry in RULES:
        if entry.needs_architecture and subject.architecture is None:
            continue
        if any(overlap(key, bad) for key in entry.keys for bad in faulty):
            continue
        message = entry.check(subject)
        if message:
            yield Fault(entry.keys[0], message)
