"""Read and write YAML with the scalars of YAML 1.2's core schema.

``off``, ``no``, dates and ``1_000`` are text; ``1e-6``, ``012`` (twelve) and ``0x1f`` are numbers. Reading reports all duplicate keys and
keys that are not strings at once, each with its line. Explicit tags (``!!int``) are supported only for these scalars, lists and mappings.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("tag:yaml.org,2002:null", r"(?:~|null|Null|NULL|)", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("tag:yaml.org,2002:int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))", "-+."),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _SCALARS:
        for character in first_characters:
            key = "" if character == "\0" else character
            table.setdefault(key, []).append((tag, re.compile(rf"^{pattern}$")))
    return table


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """Parse an integer or float by its tag; PyYAML's constructors parse YAML 1.1. Raises ValueError for other text (after ``!!int``)."""
    text = str(loader.construct_scalar(node))
    is_float = node.tag.endswith(":float")
    if not any(re.fullmatch(pattern, text) for tag, pattern, _ in _SCALARS if tag.endswith((":int", ":float") if is_float else ":int")):
        raise ValueError(f"{text!r} is not a number of YAML 1.2")
    if is_float:
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()
    yaml_constructors = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rsplit(":", 1)[-1] in ("null", "bool", "str", "seq", "map")
    } | {"tag:yaml.org,2002:int": _construct_number, "tag:yaml.org,2002:float": _construct_number}

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.faults: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                self.faults.append(f"line {line}: key {_text(key_node)} is not a string; quote it if it is meant as a name")
            elif key_node.value in first_line:
                self.faults.append(f"line {line}: duplicate key {key_node.value!r}, already given in line {first_line[key_node.value]}")
            else:
                first_line[key_node.value] = line
        if self.faults:
            node.value = [(key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would not parse as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (an instance variable to the type stubs)
        key: _resolvers().get(key, []) + yaml.SafeDumper.yaml_implicit_resolvers.get(key, [])
        for key in {*_resolvers(), *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "that is a list or a mapping"


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """Parse a document. Returns it with all faults; it is None if it cannot be parsed at all."""
    try:
        loader = _Loader(text)
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        return None, [f"not valid YAML: {_one_line(error)}"]
    except RecursionError:
        return None, ["not valid YAML: nested too deeply"]
    except (ValueError, LookupError) as error:  # a value that contradicts its explicit tag, or a number with thousands of digits
        return None, [f"not valid YAML: a value does not match its tag: {error}"]
    if _contains_itself(document, set(), set()):
        return None, ["not valid YAML: an alias (*) refers to a value that contains it"]
    return document, loader.faults


def _contains_itself(node: Any, open_nodes: set[int], done: set[int]) -> bool:
    if not isinstance(node, dict | list) or id(node) in done:
        return False
    if id(node) in open_nodes:
        return True
    open_nodes.add(id(node))
    if any(_contains_itself(item, open_nodes, done) for item in (node.values() if isinstance(node, dict) else node)):
        return True
    open_nodes.remove(id(node))
    done.add(id(node))
    return False


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())


def format_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def shown(value: Any, limit: int = 200) -> str:
    """Format a value for a message: on one line, null and true as in YAML, text in quotes, truncated to ``limit`` characters."""
    text = _flow(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _flow(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return repr(value)
