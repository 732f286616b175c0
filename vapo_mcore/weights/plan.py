"""Apply the mapping rules to one model: list every Megatron parameter with its HF tensors, and check both sides against the list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.errors import CheckpointError
from vapo_mcore.weights.families import HEAD_PREFIX, LM_HEAD, VALUE_HEAD, trunk_rules
from vapo_mcore.weights.rules import DIMENSIONS, KINDS, Copy, Rule

Role = Literal["policy", "critic"]

_DERIVED_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEADS_OF_CAUSAL_LM = ("lm_head.weight",)
_MAX_NAMED = 12


@dataclass(frozen=True)
class MappedTensor:
    """One Megatron parameter (with global layer and expert indices) and the HF tensors it consists of.

    ``mcore_names``: canonical name first, then the names in other layer specs. ``hf_shapes`` are unsharded shapes. ``expert``: global
    index of the expert it belongs to, None outside the experts.
    """

    mcore_names: tuple[str, ...]
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    kind: str
    tied_copy: bool = False
    expert: int | None = None

    @property
    def is_expert(self) -> bool:
        return self.expert is not None

    @property
    def mcore_name(self) -> str:
        return self.mcore_names[0]

    @property
    def functions(self) -> Copy:
        return KINDS[self.kind]

    def shard_shape(self, tp: int, arch: ModelArchitecture) -> tuple[int, ...]:
        """Return the shape of the parameter on one TP rank, by applying the rule to meta tensors."""
        tensors = [torch.empty(shape, device="meta") for shape in self.hf_shapes]
        return tuple(self.functions.shard(self.functions.merge(tensors, arch), tp, 0, arch).shape)


def plan_mapping(arch: ModelArchitecture, role: Role) -> tuple[MappedTensor, ...]:
    """Return all parameters of the model in network order: embedding, layers, final norm, head."""
    rules = [rule for rule in trunk_rules(arch.family) + (VALUE_HEAD if role == "critic" else LM_HEAD) if rule.applies(arch)]
    first_layer = next(index for index, rule in enumerate(rules) if rule.per_layer)
    before, layered = rules[:first_layer], [rule for rule in rules if rule.per_layer]
    after = [rule for rule in rules[first_layer:] if not rule.per_layer]
    plan = [_concrete(rule, arch) for rule in before]
    for layer in range(arch.num_layers):
        plan += [entry for rule in layered if not rule.per_expert for entry in [_concrete(rule, arch, layer)]]
        for expert in range(arch.num_experts or 0):
            plan += [_concrete(rule, arch, layer, expert) for rule in layered if rule.per_expert]
    return tuple(plan + [_concrete(rule, arch) for rule in after])


def _concrete(rule: Rule, arch: ModelArchitecture, layer: int = 0, expert: int = 0) -> MappedTensor:
    return MappedTensor(
        mcore_names=tuple(name.format(layer=layer, expert=expert) for name in rule.mcore),
        hf_names=tuple(name.format(layer=layer, expert=expert) for name, _ in rule.hf),
        hf_shapes=tuple(tuple(DIMENSIONS[dim](arch) for dim in dims) for _, dims in rule.hf),
        kind=rule.kind,
        tied_copy=rule.tied_copy,
        expert=expert if rule.per_expert else None,
    )


def hf_manifest(plan: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the HF names and shapes that the plan covers, in plan order."""
    return {name: shape for entry in plan if not entry.tied_copy for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)}


@dataclass(frozen=True)
class Bijection:
    """Result of :func:`check_bijection`. ``dropped``: tensors of the folder that the role does not use, with the reason."""

    dropped: dict[str, str]
    tied_duplicate: bool
    missing_head: tuple[str, ...]


def check_bijection(
    plan: Sequence[MappedTensor],
    found: Mapping[str, Sequence[int]],
    *,
    arch: ModelArchitecture,
    role: Role,
    where: str,
    new_head: bool = False,
) -> Bijection:
    """Compare the plan with the names and shapes found in a folder. Raises one CheckpointError that names every fault.

    Accepts only these tensors outside the plan: rotary buffers of old checkpoints (computed from the config), the language-model head if
    the model is a critic, a value head that the caller replaces (``new_head``), and ``lm_head.weight`` in a checkpoint with tied
    embeddings, whose equality with the embedding the loader must verify (``tied_duplicate``). ``score.bias`` may be missing
    (sequence-classification heads have none), with ``new_head`` also ``score.weight``.
    """
    expected = hf_manifest(plan)
    dropped: dict[str, str] = {}
    tied_duplicate = False
    surplus = []
    for name in found:
        if name in expected:
            if new_head and name.startswith(HEAD_PREFIX):
                dropped[name] = "the value head is newly initialised"
        elif _DERIVED_BUFFER.fullmatch(name):
            dropped[name] = "rotary frequencies are computed from the config"
        elif role == "critic" and name in _HEADS_OF_CAUSAL_LM:
            dropped[name] = "a critic has no language-model head"
        elif role == "critic" and new_head and name.startswith(HEAD_PREFIX):
            dropped[name] = "the value head is newly initialised"
        elif name in _HEADS_OF_CAUSAL_LM and arch.tie_word_embeddings:
            tied_duplicate = True
            dropped[name] = "tied to the embedding"
        else:
            surplus.append(name)
    missing = [name for name in expected if name not in found]
    missing_head = tuple(name for name in missing if name.startswith(HEAD_PREFIX) and (new_head or name == "score.bias"))
    missing = [name for name in missing if name not in missing_head]
    wrong = [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and name not in dropped and tuple(found[name]) != shape
    ]
    faults = [*_listed("missing tensors", missing), *_listed("tensors without a mapping rule", surplus), *_listed("wrong shapes", wrong)]
    if faults:
        hint = _hint(missing, surplus, wrong, arch, role)
        raise CheckpointError(f"{where} does not match its config.json ({arch.family}, role {role}):\n" + "\n".join(faults) + hint)
    return Bijection(dropped, tied_duplicate, missing_head)


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    shown = "".join(f"\n    {item}" for item in items[:_MAX_NAMED])
    more = f"\n    ... and {len(items) - _MAX_NAMED} more" if len(items) > _MAX_NAMED else ""
    return [f"  {title} ({len(items)}):{shown}{more}"]


def _hint(missing: Sequence[str], surplus: Sequence[str], wrong: Sequence[str], arch: ModelArchitecture, role: Role) -> str:
    if role == "critic" and any(name.startswith(HEAD_PREFIX) for name in missing):
        return "\n  to initialise a critic from this folder, initialise its head (head_init zero or small)"
    if role != "critic" and any(name.startswith(HEAD_PREFIX) for name in surplus):
        return "\n  this is a reward or value model; it can initialise a critic, but not a policy"
    if any(".k_proj." in item or ".v_proj." in item for item in wrong):
        return f"\n  check num_key_value_heads = {arch.num_key_value_heads} and head_dim = {arch.head_dim} in config.json"
    return ""


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(\.)|(\.mlp\.experts\.linear_fc[12]\.weight)(\d+)()$")


def global_parameters(chunks: Sequence[nn.Module], *, expert_offset: int = 0) -> dict[str, Tensor]:
    """Return the parameters of this rank's model chunks by global name.

    The global layer index comes from ``TransformerLayer.layer_number`` (from 1), which Megatron sets for every pipeline layout;
    ``expert_offset`` is the global index of the first local expert.
    """
    parameters: dict[str, Tensor] = {}
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = _EXPERT.sub(lambda match: _shifted_expert(match, expert_offset), _global_layer_name(chunk, local_name))
            assert name not in parameters, f"{name} appears twice in the model chunks of one rank"
            parameters[name] = parameter
    return parameters


def _global_layer_name(chunk: nn.Module, local_name: str) -> str:
    match = _LAYER.match(local_name)
    if match is None:
        return local_name
    layer: Any = chunk.get_submodule(f"decoder.layers.{match[1]}")
    return f"decoder.layers.{layer.layer_number - 1}.{local_name[match.end() :]}"


def _shifted_expert(match: re.Match[str], offset: int) -> str:
    before, index, after = match.group(1, 2, 3) if match[2] else match.group(4, 5, 6)
    return f"{before}{int(index) + offset}{after}"


def match_parameters(plan: Sequence[MappedTensor], parameters: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Map indices of plan entries to this rank's parameters. Raises CheckpointError naming parameters without a rule."""
    index_by_name = {name: index for index, entry in enumerate(plan) for name in entry.mcore_names}
    unknown = [name for name in parameters if name not in index_by_name]
    if unknown:
        raise CheckpointError("\n".join(_listed("Megatron parameters without a mapping rule", unknown)).strip())
    matched: dict[int, Tensor] = {}
    for name, parameter in parameters.items():
        index = index_by_name[name]
        assert index not in matched, f"{name}: two parameters of this rank map to the same tensor {plan[index].hf_names}"
        matched[index] = parameter
    return matched


def require_complete(plan: Sequence[MappedTensor], present: Iterable[int]) -> None:
    """Raise CheckpointError naming the plan entries that no rank holds (copies of tied tensors may be absent)."""
    held = set(present)
    absent = [entry.mcore_name for index, entry in enumerate(plan) if index not in held and not entry.tied_copy]
    if absent:
        raise CheckpointError("\n".join(_listed("parameters that the Megatron model lacks", absent)).strip())
