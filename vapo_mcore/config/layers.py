"""Merge settings in layers: the files of an ``extends:`` chain, then the overrides. Later layers win for each leaf.

A tree is flat: ``{("algorithm", "kl", "coef"): Setting(value, layer)}``. Mappings merge; every other value, including a list, is a leaf
that is replaced. Each leaf keeps its layer, so that ``applicability`` can drop an inherited setting when a later layer switches to a mode
without it, but report the same contradiction within one layer.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vapo_mcore.config.yaml_text import parse_yaml, shown

Key = tuple[str, ...]
_BRACKETED_INDEX = re.compile(r"(?<=[^.\[])\[([0-9]+)\](?=[.\[]|$)")


@dataclass(frozen=True)
class Setting:
    value: Any
    layer: int


Tree = dict[Key, Setting]


@dataclass(frozen=True)
class Fault:
    """One error in the configuration: dotted key or file name, and message."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def dotted(key: Iterable[object]) -> str:
    return ".".join(str(part) for part in key)


def overlap(one: str, other: str) -> bool:
    """Return whether two dotted keys are equal or one is a section that contains the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def put(tree: Tree, key: Key, value: Any, layer: int) -> None:
    """Set a leaf or merge a mapping below ``key``."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            put(tree, (*key, name), item, layer)
        return
    if value == {} and any(len(other) > len(key) and other[: len(key)] == key for other in tree):
        return  # merging an empty mapping changes nothing
    for other in [other for other in tree if other[: len(key)] == key or key[: len(other)] == other]:
        del tree[other]
    tree[key] = Setting(value, layer)


def nested(tree: Tree) -> dict[str, Any]:
    """Convert a tree to nested dictionaries; keeps ``null`` leaves."""
    result: dict[str, Any] = {}
    for key, setting in tree.items():
        node = result
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = setting.value
    return result


def read_layers(path: Path, faults: list[Fault]) -> tuple[Tree, int, bool]:
    """Read a file and all files it extends. Returns the tree, the number of layers, and whether all files could be read."""
    files: list[dict[str, Any]] = []
    complete = _collect(path, (), files, faults)
    tree: Tree = {}
    for layer, document in enumerate(files):
        put(tree, (), document, layer)
    tree.pop((), None)  # left by an empty file
    return tree, len(files), complete


def _collect(path: Path, chain: tuple[str, ...], files: list[dict[str, Any]], faults: list[Fault]) -> bool:
    """Append the documents of ``path`` in merge order: extended files first. Returns whether all could be read."""
    resolved = os.path.realpath(path)
    if resolved in chain:
        loop = " -> ".join(os.path.basename(p) for p in (*chain[chain.index(resolved) :], resolved))
        faults.append(Fault(str(path), f"extends itself in a cycle: {loop}"))
        return False
    document = _read_document(path, faults)
    if document is None:
        return False
    complete = True
    parents = document.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) and parent and "\0" not in parent for parent in parents):
        faults.append(Fault(str(path), f"extends: {shown(parents)} must be the path of a YAML file, or a list of them"))
        parents, complete = [], False
    for parent in parents:
        complete &= _collect(path.parent / parent, (*chain, resolved), files, faults)
    files.append(document)
    return complete


def _read_document(path: Path, faults: list[Fault]) -> dict[str, Any] | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        faults.append(Fault(str(path), "no such configuration file"))
        return None
    except OSError as error:
        faults.append(Fault(str(path), f"cannot be read: {error.strerror or error}"))
        return None
    except UnicodeDecodeError as error:
        faults.append(Fault(str(path), f"cannot be read: not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start})"))
        return None
    document, messages = parse_yaml(text)
    faults.extend(Fault(str(path), message) for message in messages)
    if document is None:
        return None if messages else {}
    if not isinstance(document, dict):
        kind = "a list" if isinstance(document, list) else f"the single value {shown(document)}"
        faults.append(Fault(str(path), f"contains {kind}, expected a mapping of keys to values"))
        return None
    return document


def apply_overrides(tree: Tree, overrides: Iterable[str], layer: int, faults: list[Fault]) -> None:
    """Apply ``key.path=value`` settings with YAML values.

    A number in the path, ``train.0`` or ``train[0]``, indexes into a list; an index equal to the list's length appends.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        key = tuple(_BRACKETED_INDEX.sub(r".\1", name.strip()).split("."))
        if any(character in part for part in key for character in "[]"):
            faults.append(Fault(repr(override), "an index in brackets must be a whole number after a key, as in data.train[0].path"))
            continue
        if not equals or not all(key):
            faults.append(Fault(repr(override), "an override must have the form key.path=value, for example batch.mini_batch_size=64"))
            continue
        if key == ("extends",):
            faults.append(Fault("extends", "cannot be overridden; write a file that extends both files"))
            continue
        value, messages = parse_yaml(text)
        if messages:
            faults.extend(Fault(name, f"value {text!r}: {message}") for message in messages)
            continue
        problem = _override(tree, key, value, layer)
        if problem:
            faults.append(Fault(name, problem))


def _override(tree: Tree, key: Key, value: Any, layer: int) -> str | None:
    for depth in range(1, len(key)):
        holder = tree.get(key[:depth])
        if holder is not None and isinstance(holder.value, list):
            items = copy.deepcopy(holder.value)
            problem = _put_inside(items, key[depth:], value)
            if problem is None:
                tree[key[:depth]] = Setting(items, layer)
            return problem
    put(tree, key, value, layer)
    return None


def _put_inside(node: Any, key: Key, value: Any) -> str | None:
    """Set ``value`` below a list or a mapping inside a list. Returns an error message or None."""
    name = key[0]
    slot: Any = name
    if isinstance(node, list):
        if not name.isdigit() or int(name) > len(node):
            return f"{name!r} is not an index of a list of {len(node)} (an index equal to the length appends)"
        slot = int(name)
        if slot == len(node):
            node.append({})
    elif not isinstance(node, dict):
        return f"{name!r} cannot be set inside the value {shown(node)}"
    if len(key) == 1:
        node[slot] = value
        return None
    if isinstance(node, dict) and node.get(slot) is None:
        node[slot] = {}
    return _put_inside(node[slot], key[1:], value)
