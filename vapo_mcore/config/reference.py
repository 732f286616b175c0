"""Generate ``docs/configuration.md``, the table of all settings:

python -m vapo_mcore.config.reference > docs/configuration.md

Types, bounds and defaults come from the models in ``schema/``, meanings from the comments at their fields, and modes in which a key has no
effect from ``applicability.py``.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from vapo_mcore.config import schema
from vapo_mcore.config.applicability import INAPPLICABLE
from vapo_mcore.config.loading import models_in

_UNBOUNDED = 2**31  # larger bounds only keep numbers inside machine types and are not shown
_HTML = re.compile(r"<\w[\w.]*>[\w/]*")  # a placeholder such as <run.dir>/export, which Markdown would parse as a tag
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

_INTRODUCTION = """# Settings

Every key of a configuration file. This page is written by `python -m vapo_mcore.config.reference`.

`vapo-mcore config FILE [key.path=value ...]` checks a file and prints it with all defaults. A file may extend others
(`extends: presets/vapo.yaml`, or a list; paths are relative to the file that names them): mappings are merged key by key, lists are
replaced, the last one wins, and settings of the command line win over all files. Other relative paths start at the current
directory. `null` for a key that has no `null` among its values means "not given". A name has letters, digits, `_`, `-` and `.`.

The last column names the other key that can leave a setting without effect, with the reason. Such a setting is refused, unless it comes
from an extended file and the other key was set later; then it is dropped. Rules over several keys are in
`vapo_mcore/config/rules/`. All faults are reported at once, before a model loads."""


def render_markdown() -> str:
    """Return the text of ``docs/configuration.md``."""
    return "\n".join([_INTRODUCTION, *_section(schema.Config, "", "The top level", None)]) + "\n"


def _section(model: type[BaseModel], prefix: str, title: str, default: str | None) -> Iterator[str]:
    """Yield heading, remarks and table of a model, then the sections inside it. ``default``: default of the whole section."""
    schema_of_model = model.model_json_schema()
    properties, required = schema_of_model["properties"], schema_of_model.get("required", [])
    inner = {name: models_in(field.annotation) for name, field in model.model_fields.items()}
    leaves = [name for name in model.model_fields if not inner[name] or _is_list(properties[name])]
    remarks = [_summary(model), default, *(f"No effect, by {text}" for text in _no_effect(prefix.rstrip(".")))]
    yield from ("", f"{'#' * min(max(2, 1 + prefix.replace('.N.', '').count('.')), 4)} {title}")
    if any(remarks):
        yield from ("", ". ".join(remark.rstrip(".") for remark in remarks if remark) + ".")
    if leaves:
        yield from ("", "| key | type | default | meaning | no effect, by |", "|---|---|---|---|---|")
    for name in leaves:
        key = prefix + name
        shown = "required" if name in required else _default(properties[name])
        cells = (f"`{key}`", _type(properties[name]), shown, _meaning(model, name), "; ".join(_no_effect(key)))
        plain = [cell if cell.startswith("`") else _HTML.sub(r"`\g<0>`", cell) for cell in cells]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in plain) + " |"
    for name, models in inner.items():
        if name in leaves:
            if prefix + name == "data.train":  # data.eval has the same kinds of sources
                for source in models:
                    (kind,) = get_args(source.model_fields["kind"].annotation)
                    yield from _section(source, "data.train.N.", f"Entries of data.train and data.eval, kind: {kind}", None)
            elif models and prefix + name != "data.eval":
                yield from _section(models[0], f"{prefix}{name}.N.", f"Entries of {prefix}{name}", None)
            continue
        nullable = "`null` by default" if properties[name].get("default", ...) is None else None
        yield from _section(models[0], f"{prefix}{name}.", f"{prefix}{name}", nullable)


def _is_list(node: dict[str, Any]) -> bool:
    return node.get("type") == "array"


def _no_effect(key: str) -> list[str]:
    """Return "`switch`: reason" for each entry of ``applicability.py`` that names ``key``."""
    return [f"{' and '.join(f'`{switch}`' for switch in e.switches)}: {e.reason}" for e in INAPPLICABLE if key in e.keys]


def _type(node: dict[str, Any]) -> str:
    """Describe the type in a JSON schema."""
    if "anyOf" in node:
        return " or ".join(_type(option) for option in node["anyOf"])
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    kind = node.get("type")
    if kind == "array":
        if node.get("maxItems") == 2:
            return "two texts" if node["prefixItems"][0]["type"] == "string" else "two numbers"
        return "list" + (", not empty" if node.get("minItems") else "")
    if kind in ("integer", "number"):
        bounds = [f"{sign} {node[name]}" for name, sign in _BOUNDS.items() if name in node and abs(node[name]) < _UNBOUNDED]
        return " ".join(["whole number" if kind == "integer" else "number", ", ".join(bounds)]).strip()
    return {"string": "name" if "pattern" in node else "text", "boolean": "true or false", "null": "`null`", "object": "mapping"}[str(kind)]


def _default(node: dict[str, Any]) -> str:
    """Return the default of a key, or "derived" if it depends on other keys."""
    if "default" not in node:
        return "derived"
    value = node["default"]
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _meaning(model: type[BaseModel], name: str) -> str:
    """Return the comment of a field, also if a base class declares it."""
    for parent in model.__mro__:
        if text := _comments().get((parent.__name__, name)):
            return text
    return ""


def _summary(model: type[BaseModel]) -> str | None:
    """Return the docstring of a section, own or inherited, as one line; None if only the base class Section has one."""
    for parent in model.__mro__[: model.__mro__.index(schema.Section)]:
        if text := vars(parent).get("__doc__"):
            return " ".join(str(text).replace("``", "`").split())
    return None


@cache
def _comments() -> dict[tuple[str, str], str]:
    """Map (class, field) to the comment on the field's lines and directly above it, for all schema files."""
    modules = {model.__module__ for model in vars(schema).values() if isinstance(model, type) and issubclass(model, schema.Section)}
    return {key: text for name in sorted(modules) for key, text in _comments_in(inspect.getsource(sys.modules[name])).items()}


def _comments_in(source: str) -> dict[tuple[str, str], str]:
    trailing: dict[int, str] = {}
    above: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
            kept = trailing if token.line[: token.start[1]].strip() else above
            text = token.string.lstrip("# ").strip()
            sentence = kept is above and text[1:2].islower()
            kept[token.start[0]] = text[0].lower() + text[1:].rstrip(".") if sentence else text
    found: dict[tuple[str, str], str] = {}
    for parent in ast.walk(ast.parse(source)):
        if not isinstance(parent, ast.ClassDef):
            continue
        for node in parent.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            first = node.lineno
            while first - 1 in above:
                first -= 1
            last = node.end_lineno or node.lineno
            found[parent.name, node.target.id] = " ".join(
                comment for line in range(first, last + 1) if (comment := above.get(line) or trailing.get(line))
            )
    return found


if __name__ == "__main__":
    print(render_markdown(), end="")
