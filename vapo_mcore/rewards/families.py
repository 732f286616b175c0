"""Compare values with a condition, such as ``k\\pi, k \\in \\mathbb{Z}``: families of values, whatever the name of their integer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vapo_mcore.rewards.forms import Equal, matched, values_of

_BEFORE = r"(?P<value>.{1,200}?)\s*,?\s*(?:\\q?quad(?![a-z])\s*)?"
_MEMBER = re.compile(
    _BEFORE
    + r"(?:\\text\s*\{\s*(?:where|for|with)?\s*\}|where|for|with)?\s*\(?\s*(?P<name>[a-z])\s*\\in(?![a-z])\s*(?P<domain>[^,;()]{1,60}?)\)?"
)
_INTEGER = re.compile(
    _BEFORE + r"\(?\s*(?:\\text\s*\{)?\s*(?:(?:where|for|with|and)\s+)?(?:(?:all|any|some|every|each|an)\s+)?"
    r"(?:integers?\s*\}?\s*\$?(?P<after>[a-z])\$?|\}?\s*\$?(?P<before>[a-z])\$?\s*(?:\\text\s*\{)?\s*(?:is|are)?\s*(?:an|any)?\s*integers?\s*\}?)\s*\)?"
)
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_ASSIGNED = re.compile(r"[A-Za-z]\s*=\s*")


@dataclass(frozen=True)
class Condition:
    """A value that holds for all ``name`` of a ``domain``."""

    value: str
    name: str
    domain: str

    def with_name(self, name: str) -> str:
        """Return the value with its variable renamed."""
        return _SYMBOL.sub(lambda match: name if match[0] == self.name else match[0], self.value)


def condition_of(text: str) -> Condition | None:
    """Read ``k\\pi, k \\in \\mathbb{Z}``; None unless the value depends on the variable."""
    match = (_MEMBER.fullmatch(text) if r"\in" in text else None) or (_INTEGER.fullmatch(text) if "integer" in text else None)
    if match is None or re.fullmatch(r"[a-z]", match["value"].strip()):
        return None
    found = match.groupdict()
    name = found.get("name") or found.get("before") or found["after"]
    domain = "".join(found["domain"].split()) if "domain" in found else r"\mathbb{Z}"
    return Condition(found["value"], name, domain) if name in _SYMBOL.findall(found["value"]) else None


def conditions_equal(candidate: str, truth: str, equal: Equal) -> bool | None:
    """Compare values with conditions by value, and by domain if both state one; families of an integer by the values they take."""
    theirs = condition_of(truth)
    if theirs is None:
        return None
    ours = condition_of(candidate)
    if ours is None:
        return equal(candidate, theirs.value)
    if ours.domain != theirs.domain or (ours.name != theirs.name and theirs.name in _SYMBOL.findall(ours.value)):
        return False
    renamed = ours.with_name(theirs.name)
    if equal(renamed, theirs.value):
        return True
    if theirs.domain != r"\mathbb{Z}":
        return False
    values = values_of(renamed) or [renamed], values_of(theirs.value) or [theirs.value]
    return len(values[0]) == len(values[1]) and matched(
        *values, lambda one, other: equal(one, other) or _same_family(one, other, theirs.name)
    )


def _same_family(one: str, other: str, name: str) -> bool:
    from vapo_mcore.rewards.reading import read_expression
    from vapo_mcore.rewards.scalars import same_progression

    ours, theirs = (read_expression(_ASSIGNED.sub("", text, count=1)) for text in (one, other))
    return same_progression(ours, theirs, name)


def readable_parts(truth: str) -> list[str]:
    """Return the values of a ground truth with a condition, which must be readable as mathematics; empty for other texts."""
    found = condition_of(truth)
    return [] if found is None else values_of(found.value) or [found.value]
