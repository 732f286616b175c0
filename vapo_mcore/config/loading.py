"""Load a YAML file and overrides into a checked ``Config``, or raise one ``ConfigError`` with all errors."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from vapo_mcore.config.applicability import inapplicable_keys, resolve_inapplicable
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.layers import Fault, Key, Setting, Tree, apply_overrides, dotted, nested, read_layers
from vapo_mcore.config.rules import Subject, broken_rules, missing_paths, read_model
from vapo_mcore.config.schema import Config, CustomSource, FileSource, LossTermConfig, ReasoningGymSource
from vapo_mcore.config.yaml_text import format_yaml, parse_yaml, shown
from vapo_mcore.errors import ConfigError

# Placeholders for missing or faulty required keys, so that the other rules can still be checked; never used in a run.
_STAND_INS: dict[Key, Any] = {
    ("run", "dir"): "run",
    ("run", "steps"): 1,
    ("model", "path"): "model",
    ("batch", "max_tokens_per_microbatch"): 1,
    ("data", "train"): [{"kind": "reasoning_gym", "task": "stand_in", "size": 1}],
    ("data", "max_prompt_length"): 1,
    ("rollout", "max_response_length"): 1,
}


_REQUIRED = "is required"
_SOURCES: dict[str, type[BaseModel]] = {"file": FileSource, "reasoning_gym": ReasoningGymSource, "custom": CustomSource}
_ENTRIES = (*_SOURCES.values(), LossTermConfig)  # models of list entries


def load_config(path: str | Path, overrides: Iterable[str] = (), *, check_paths: bool = True, builds_critic: bool = True) -> Config:
    """Read ``path`` and the files it extends, apply ``key.path=value`` overrides, and check everything.

    ``check_paths=False`` skips the checks that need the file system: model folder, rules about the architecture, data files.
    ``builds_critic=False`` skips those of the critic's layout and model. Raises one ConfigError with all errors, each with its dotted key.
    """
    faults: list[Fault] = []
    tree, layers, complete = read_layers(Path(path), faults)
    apply_overrides(tree, overrides, layers, faults)
    return _build(tree, faults, f"configuration {path}", check_paths, complete, builds_critic)


def _build(tree: Tree, faults: list[Fault], what: str, check_paths: bool, complete: bool = True, builds_critic: bool = True) -> Config:
    """Build the Config of a tree. With ``complete=False`` a file is missing, so absent keys, and rules that need them, are not errors."""
    resets = _drop_resetting_nulls(tree)
    config, field_faults = _validate(tree)
    faults += field_faults if complete else [fault for fault in field_faults if fault.message != _REQUIRED]
    if config is None or not complete:
        raise _error(what, faults)
    dropped, contradictions = resolve_inapplicable(config, tree, resets, {fault.where for fault in faults})
    if dropped:
        for key in dropped:
            del tree[key]
        config, more = _validate(tree)
        kept = {fault.where for fault in more}
        faults = [fault for fault in faults if fault.where not in {f.where for f in field_faults} or fault.where in kept]
        assert config is not None
    faults += contradictions
    faulty = {fault.where for fault in faults}
    model, critic = _read_models(config, faulty, faults, builds_critic) if check_paths else (None, None)
    checked = config if builds_critic else config.model_copy(update={"critic": config.critic.model_copy(update={"parallel": None})})
    subject = Subject(checked, model, critic, lambda name: any(dotted(key).startswith(name) for key in tree))
    faults += broken_rules(subject, faulty)
    if check_paths:
        faults += [fault for fault in missing_paths(config) if not any(fault.where.startswith(bad) for bad in faulty)]
    if faults:
        raise _error(what, faults)
    return config


def _read_models(
    config: Config, faulty: set[str], faults: list[Fault], builds_critic: bool
) -> tuple[ModelArchitecture | None, ModelArchitecture | None]:
    """Read the architectures of the model and of a critic loaded from ``critic.path``."""
    model = critic = None
    if not faulty & {"model", "model.path"}:
        model = read_model("model.path", config.model.path, faults)
    if builds_critic and config.uses_critic and config.critic.path is not None and not faulty & {"critic", "critic.init", "critic.path"}:
        critic = read_model("critic.path", config.critic.path, faults)
    if config.policy.path is not None and not faulty & {"policy", "policy.path"}:
        policy = read_model("policy.path", config.policy.path, faults)
        if model is not None and policy is not None and policy != model:
            message = f"the model in {config.policy.path!r} differs from that of model.path = {config.model.path!r}"
            faults.append(Fault("policy.path", message))
    return model, critic


def _error(what: str, faults: list[Fault]) -> ConfigError:
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    return ConfigError(f"{what}: {count}\n" + "\n".join(f"  {line}" for line in lines))


# --- field validation -------------------------------------------------------------------------------------------------


def _validate(tree: Tree) -> tuple[Config | None, list[Fault]]:
    """Validate single keys. Returns the faults and a Config in which faulty keys have defaults or placeholders (None if that fails)."""
    try:
        return Config.model_validate(nested(tree)), []
    except ValidationError as error:
        faults, keys = translate(error)
    repaired = dict(tree)
    for key in keys:
        for other in [other for other in repaired if other[: len(key)] == key or key[: len(other)] == other]:
            del repaired[other]
    for key, value in _STAND_INS.items():
        if not any(other[: len(key)] == key for other in repaired):
            repaired[key] = Setting(value, 0)
    try:
        return Config.model_validate(nested(repaired)), faults
    except ValidationError:
        return None, faults


def translate(error: ValidationError, root: type[BaseModel] = Config) -> tuple[list[Fault], list[Key]]:
    """Convert pydantic's errors about a ``root`` model to faults. Also returns the keys to drop in a second attempt."""
    faults: list[Fault] = []
    keys: list[Key] = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # a derived default with faulty inputs, which are reported
        if item["type"] == "too_short" and item["input"]:
            continue  # the list is not empty; its faulty items are reported
        location = _without_union_tags(item["loc"])
        where = dotted(location)
        reason = f" ({_REASONS[where]})" if where in _REASONS else ""
        faults.append(Fault(where, _message(item, root) + reason))
        in_list = next((index for index, part in enumerate(location) if isinstance(part, int)), len(location))
        keys.append(tuple(str(part) for part in location[:in_list]))
    return faults, keys


def _without_union_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Remove the tag of a source's kind, which pydantic inserts after its index."""
    return tuple(part for i, part in enumerate(location) if not (i and isinstance(location[i - 1], int) and part in _SOURCES))


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_BOUNDS = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", ">="), "less_than": ("lt", "<"), "less_than_equal": ("le", "<=")}


_REASONS = {
    "algorithm.advantage.lambda_policy.alpha": "lambda is 1 - 1/(alpha l): the advantage reaches over alpha l tokens",
    "algorithm.kl.place": "only one place: a penalty in both reward and loss would count twice",
    "algorithm.policy_loss.clip_low": "ratios are clipped at 1 - clip_low, which must be a ratio (above 0) that is below 1",
    "algorithm.policy_loss.clip_high": "ratios are clipped at 1 + clip_high, which must be above 1",
    "algorithm.policy_loss.dual_clip": "it bounds ratios above 1 where the advantage is negative",
}
"""Reasons for bounds that are not self-explanatory."""


def _message(item: Any, root: type[BaseModel]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    if kind == "missing":
        # A missing entry of a fixed-length list has its index as name.
        return _REQUIRED if isinstance(item["loc"][-1], str) else "is missing in the list"
    if kind == "extra_forbidden":
        return _unknown_key(item["loc"], root)
    if kind == "literal_error":
        return f"{shown(value)} must be {context['expected']}" + _did_you_mean(
            str(value), context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = f"unknown kind {shown(value.get('kind'))}" if "tag" in context else "the source has no kind"
        return f"{given}; kind must be {' or '.join(map(repr, _SOURCES))}"
    if kind in _EXPECTED:
        return f"{shown(value)} must be {_EXPECTED[kind]}{_meant_number(kind, value)}{_meant_text(kind, value)}"
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        bound = context[name]
        return f"{shown(value)} must be {sign} {bound if isinstance(bound, int) else f'{bound:.12g}'}"
    if kind in ("too_short", "too_long"):
        limit = context.get("min_length", context.get("max_length"))
        number = f"at least {limit}" if kind == "too_short" else f"at most {limit}"
        return f"{shown(value)} must be a list with {number} {'entry' if limit == 1 else 'entries'}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} must be a name: letters, digits, '_', '-' and '.', starting with a letter or digit"
    if kind == "value_error":  # from this package's validators, whose messages name the value
        return str(context["error"])
    return f"{shown(value)}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _meant_text(kind: str, value: Any) -> str:
    """Return a hint if a number was read where text belongs: ``run.dir=007`` is 7."""
    return "; quotes make it text, as in '\"007\"'" if kind == "string_type" and isinstance(value, int | float) else ""


def _meant_number(kind: str, value: Any) -> str:
    """Return a hint if the text would be a number without underscores or quotes."""
    if kind not in ("int_type", "int_from_float", "float_type") or not isinstance(value, str):
        return ""
    number, faults = parse_yaml(value.replace("_", ""))
    if faults or isinstance(number, bool) or not isinstance(number, int | float):
        return ""
    why = "YAML 1.2 numbers have no '_'" if "_" in value else "quotes make it text"
    return f"; {why}: write {value.replace('_', '')}"


_SHARED_BACKBONE = (
    "policy and critic are separate models that take turns on the device: with a shared backbone, value pretraining and every value loss "
    "would change the policy, and the two could not have separate learning rates and updates; remove the key"
)
_REFUSED = dict.fromkeys(("shared_backbone", "share_backbone", "shared_trunk", "share_trunk"), _SHARED_BACKBONE)
"""Settings of other systems that are deliberately not supported, with the reason."""


def _unknown_key(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    *parents, name = location
    if name in _REFUSED:
        return f"not available: {_REFUSED[str(name)]}"
    siblings = _fields_at(tuple(parents), root)
    hint = _did_you_mean(str(name), siblings)
    if not hint:
        elsewhere = [key for key in all_keys(root) if key.rsplit(".", 1)[-1] == name]
        hint = f"; did you mean {' or '.join(repr(key) for key in elsewhere)}?" if elsewhere else f"; known here: {', '.join(siblings)}"
    return f"unknown key{hint}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


# --- walking the schema -----------------------------------------------------------------------------------------------


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """List the model classes inside ``X``, ``X | None``, ``tuple[X | Y, ...]``, ``Annotated[X | Y, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _fields_at(parents: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """List the fields of the model at a pydantic location, which includes union tags."""
    models: list[type[BaseModel]] = [root]
    for previous, part in zip((None, *parents), parents, strict=False):
        if isinstance(previous, int) and part in _SOURCES:
            models = [_SOURCES[str(part)]]
        elif isinstance(part, str):
            models = [inner for model in models if part in model.model_fields for inner in models_in(model.model_fields[part].annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """List the dotted names of all sections and settings, except those of list entries such as data sources."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for inner in models_in(field.annotation):
            if inner not in _ENTRIES:
                keys += all_keys(inner, f"{prefix}{name}.")
    return keys


def _drop_resetting_nulls(tree: Tree) -> Tree:
    """Drop ``null`` for keys that cannot be null, where it means "not given". Returns the dropped part."""
    dropped: Tree = {}
    for key in [key for key, setting in tree.items() if setting.value is None]:
        model: type[BaseModel] | None = Config
        nullable = False
        for name in key:
            field = model.model_fields.get(name) if model is not None else None
            if field is None:
                nullable = True  # unknown key: the validation reports it
                break
            nullable = NoneType in get_args(field.annotation)
            model = next(iter(models_in(field.annotation)), None)
        if not nullable:
            dropped[key] = tree.pop(key)
    return dropped


# --- output -----------------------------------------------------------------------------------------------------------


def dump_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML: all keys that have an effect, including defaults. Loading it gives the same Config."""
    document = config.model_dump(mode="json")
    for name in inapplicable_keys(config):
        *parents, last = name.split(".")
        node: Any = document
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return format_yaml(document)
