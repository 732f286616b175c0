"""From a YAML file and overrides to a checked ``Config``, or one ``ConfigError`` with every fault."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from vapo_mcore.config.applicability import inapplicable_keys, resolve_inapplicable
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.layers import Fault, Key, Setting, Tree, apply_overrides, dotted, nested, put, read_layers
from vapo_mcore.config.rules import Subject, broken_rules, missing_paths, read_model
from vapo_mcore.config.schema import Config, CustomSource, FileSource, LossTermConfig, ReasoningGymSource
from vapo_mcore.config.yaml_text import format_yaml, parse_yaml, shown
from vapo_mcore.errors import ConfigError

# Stand-ins for required keys that are missing or faulty, so that the other rules can still be checked; never used in a run.
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
_ENTRIES = (*_SOURCES.values(), LossTermConfig)  # models of the entries of lists


def load_config(path: str | Path, overrides: Iterable[str] = (), *, check_paths: bool = True) -> Config:
    """Read ``path`` and what it extends, apply ``key.path=value`` overrides, check everything.

    ``check_paths=False`` leaves out what depends on the file system (the model folder and the rules about its
    architecture, data files). Raises ConfigError listing all faults, each with the dotted path of its key.
    """
    faults: list[Fault] = []
    tree, layers, complete = read_layers(Path(path), faults)
    apply_overrides(tree, overrides, layers, faults)
    return _build(tree, faults, f"configuration {path}", check_paths, complete)


def config_from_dict(settings: dict[str, Any], *, check_paths: bool = True) -> Config:
    """A checked Config from nested settings, as if they stood in a file."""
    tree: Tree = {}
    put(tree, (), settings, 0)
    return _build(tree, [], "configuration", check_paths)


def _build(tree: Tree, faults: list[Fault], what: str, check_paths: bool, complete: bool = True) -> Config:
    """The Config of a tree. ``complete``: no file is missing; else absent keys are not faults, nor is what depends on them."""
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
    model, critic = _read_models(config, faulty, faults) if check_paths else (None, None)
    subject = Subject(config, model, critic, lambda name: any(dotted(key).startswith(name) for key in tree))
    faults += broken_rules(subject, faulty)
    if check_paths:
        faults += [fault for fault in missing_paths(config) if not any(fault.where.startswith(bad) for bad in faulty)]
    if faults:
        raise _error(what, faults)
    return config


def _read_models(config: Config, faulty: set[str], faults: list[Fault]) -> tuple[ModelArchitecture | None, ModelArchitecture | None]:
    """Architectures of the model and of a critic that is loaded from a folder of its own."""
    model = critic = None
    if not faulty & {"model", "model.path"}:
        model = read_model("model.path", config.model.path, faults)
    if config.uses_critic and config.critic.path is not None and not faulty & {"critic", "critic.init", "critic.path"}:
        critic = read_model("critic.path", config.critic.path, faults)
    if config.policy.path is not None and not faulty & {"policy", "policy.path"}:
        policy = read_model("policy.path", config.policy.path, faults)
        if model is not None and policy is not None and policy != model:
            faults.append(Fault("policy.path", f"{config.policy.path!r} holds another model than model.path = {config.model.path!r}"))
    return model, critic


def _error(what: str, faults: list[Fault]) -> ConfigError:
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    return ConfigError(f"{what}: {count}\n" + "\n".join(f"  {line}" for line in lines))


# --- field validation -------------------------------------------------------------------------------------------------


def _validate(tree: Tree) -> tuple[Config | None, list[Fault]]:
    """The Config and the faults of single keys; faulty keys are then replaced by defaults or stand-ins (None if that fails)."""
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
    """Pydantic's errors about a ``root`` in our words, and the keys of the tree to leave out in a second try."""
    faults: list[Fault] = []
    keys: list[Key] = []
    for item in error.errors(include_url=False):
        if item["type"] == "default_factory_not_called":
            continue  # a derived default whose inputs are faulty: reported there
        if item["type"] == "too_short" and item["input"]:
            continue  # the list is not empty: its items are faulty and reported themselves
        location = _without_union_tags(item["loc"])
        where = dotted(location)
        reason = f" ({_REASONS[where]})" if where in _REASONS else ""
        faults.append(Fault(where, _message(item, root) + reason))
        in_list = next((index for index, part in enumerate(location) if isinstance(part, int)), len(location))
        keys.append(tuple(str(part) for part in location[:in_list]))
    return faults, keys


def _without_union_tags(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic puts the tag of a source's kind after its index; the file has no such key."""
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
    "algorithm.kl.place": "one place, since a penalty in the reward and in the loss would count twice",
    "algorithm.policy_loss.clip_low": "ratios are clipped at 1 - clip_low, which must be a ratio (above 0) that is below 1",
    "algorithm.policy_loss.clip_high": "ratios are clipped at 1 + clip_high, which must be above 1",
    "algorithm.policy_loss.dual_clip": "it bounds ratios above 1 where the advantage is negative",
}
"""Why a value of these settings is impossible, where the bound alone does not say it."""


def _message(item: Any, root: type[BaseModel]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    if kind == "missing":
        # The entries of a list of fixed length are required too; what is missing there has a number for a name.
        return _REQUIRED if isinstance(item["loc"][-1], str) else "is missing in the list"
    if kind == "extra_forbidden":
        return _unknown_key(item["loc"], root)
    if kind == "literal_error":
        return f"{shown(value)} must be {context['expected']}" + _did_you_mean(
            str(value), context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = f"kind {shown(value.get('kind'))}" if "tag" in context else "a source without kind"
        return f"{given}; kind must be {' or '.join(map(repr, _SOURCES))}"
    if kind in _EXPECTED:
        return f"{shown(value)} must be {_EXPECTED[kind]}{_meant_number(kind, value)}"
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        bound = context[name]
        return f"{shown(value)} must be {sign} {bound if isinstance(bound, int) else f'{bound:.12g}'}"
    if kind in ("too_short", "too_long"):
        limit = context.get("min_length", context.get("max_length"))
        number = f"at least {limit}" if kind == "too_short" else f"at most {limit}"
        return f"{shown(value)} must be a list with {number} {'entry' if limit == 1 else 'entries'}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} must be a name: letters, digits, '_', '-' and '.', with a letter or digit first"
    if kind == "value_error":  # of our own validators, whose messages name the value
        return str(context["error"])
    return f"{shown(value)}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _meant_number(kind: str, value: Any) -> str:
    """A hint where the text would be a number without its underscores or quotes."""
    if kind not in ("int_type", "int_from_float", "float_type") or not isinstance(value, str):
        return ""
    number, faults = parse_yaml(value.replace("_", ""))
    if faults or isinstance(number, bool) or not isinstance(number, int | float):
        return ""
    why = "YAML 1.2 has no '_' in numbers" if "_" in value else "text in quotes is no number"
    return f"; {why}: write {value.replace('_', '')}"


_SHARED_BACKBONE = (
    "policy and critic are two models here that take turns on the device: with a backbone of both, value pretraining could not leave the "
    "policy as it is, the value loss would change it in every update, and neither could have rates or updates of its own; remove the key"
)
_REFUSED = dict.fromkeys(("shared_backbone", "share_backbone", "shared_trunk", "share_trunk"), _SHARED_BACKBONE)
"""Names of settings that other systems have and that are left out here for a reason."""


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
    """The model classes inside ``X``, ``X | None``, ``tuple[X | Y, ...]``, ``Annotated[X | Y, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def _fields_at(parents: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Names of the fields of the model at a location of pydantic's, union tags included."""
    models: list[type[BaseModel]] = [root]
    for previous, part in zip((None, *parents), parents, strict=False):
        if isinstance(previous, int) and part in _SOURCES:
            models = [_SOURCES[str(part)]]
        elif isinstance(part, str):
            models = [inner for model in models if part in model.model_fields for inner in models_in(model.model_fields[part].annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Dotted names of all sections and settings, those of data sources left out."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for inner in models_in(field.annotation):
            if inner not in _ENTRIES:
                keys += all_keys(inner, f"{prefix}{name}.")
    return keys


def _drop_resetting_nulls(tree: Tree) -> Tree:
    """``null`` for a key that cannot be null means "not given". Returns what was dropped."""
    dropped: Tree = {}
    for key in [key for key, setting in tree.items() if setting.value is None]:
        model: type[BaseModel] | None = Config
        nullable = False
        for name in key:
            field = model.model_fields.get(name) if model is not None else None
            if field is None:
                nullable = True  # unknown: left for the validation to report
                break
            nullable = NoneType in get_args(field.annotation)
            model = next(iter(models_in(field.annotation)), None)
        if not nullable:
            dropped[key] = tree.pop(key)
    return dropped


# --- output -----------------------------------------------------------------------------------------------------------


def dump_yaml(config: Config) -> str:
    """The resolved configuration: every key that has an effect, defaults included; loads back to the same Config."""
    document = config.model_dump(mode="json")
    for name in inapplicable_keys(config):
        *parents, last = name.split(".")
        node: Any = document
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return format_yaml(document)
