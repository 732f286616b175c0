"""Register and evaluate rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.layers import Fault, overlap
from vapo_mcore.config.schema import Config


@dataclass(frozen=True)
class Subject:
    """Input of the rules: the config, and the architectures of the model and of a loaded critic if they could be read."""

    config: Config
    architecture: ModelArchitecture | None
    critic_architecture: ModelArchitecture | None
    given: Callable[[str], bool]  # whether a file or an override sets a dotted key (or one below it)

    @property
    def mixtures(self) -> list[ModelArchitecture]:
        """The models that are mixtures of experts."""
        return [model for model in (self.architecture, self.critic_architecture) if model is not None and model.is_moe]


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
    """Yield the faults of all rules, except rules with a key in ``faulty`` (dotted keys; a section includes all keys below it)."""
    for entry in RULES:
        if entry.needs_architecture and subject.architecture is None:
            continue
        if any(overlap(key, bad) for key in entry.keys for bad in faulty):
            continue
        message = entry.check(subject)
        if message:
            yield Fault(entry.keys[0], message)
