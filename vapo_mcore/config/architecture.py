"""Read a model's architecture from the ``config.json`` of a Hugging Face folder, without importing torch.

The configuration checks, the Megatron model builder, the weight mapping, ``plan`` and the rollout engines all use this reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_mcore.config.families import FAMILIES, Family
from vapo_mcore.errors import CheckpointError

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_MAX_PARTS = 10_000  # layers or experts; bounds the memory for their tensor names if the file has a wrong number
_LENGTH = "original_max_position_embeddings"
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # keys that are required, and that are optional
    "default": ((), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _LENGTH), ()),
    "yarn": (("factor", _LENGTH), ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
}


@dataclass(frozen=True)
class ValueBins:
    """Bins of a categorical value head: ``bins`` of equal width on [low, high]; ``sigma``: of the targets' Gaussian, in widths."""

    low: float
    high: float
    bins: int
    sigma: float


@dataclass(frozen=True)
class ExpertChoices:
    """Shape of the experts that a mixture chooses for a token: ``topk`` of ``experts`` in each of ``layers`` layers."""

    layers: int
    topk: int
    experts: int

    @property
    def itemsize(self) -> int:
        """Number of bytes of an expert's index."""
        return choice_bytes(self.experts)

    @property
    def bytes_a_token(self) -> int:
        return self.layers * self.topk * self.itemsize


@dataclass(frozen=True)
class ModelArchitecture:
    """Architecture of a decoder-only model, named as in its HF config. All sizes are for the whole model, not per rank.

    ``head_dim`` comes from the config if given, else it is ``hidden_size // num_attention_heads``. ``rope_scaling`` is None or the llama3
    or yarn scaling with its HF keys and ``rope_type``.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    moe_ffn_hidden_size: int | None = None
    norm_topk_prob: bool = False
    rotary_percent: float = 1.0  # rotated part of each head
    rotary_interleaved: bool = False  # rotates pairs of neighbouring elements instead of pairs from the two halves
    mlp_value_head: bool = False  # critic: two layers with tanh instead of one linear layer
    value_bins: ValueBins | None = None  # of a critic: a categorical head, not a scalar

    @property
    def value_outputs(self) -> int:
        """Number of outputs of a critic's head."""
        return 1 if self.value_bins is None else self.value_bins.bins

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None

    @property
    def expert_choices(self) -> ExpertChoices | None:
        """Shape of a token's choices of experts; None for a dense model."""
        if self.num_experts is None or self.num_experts_per_token is None:
            return None
        return ExpertChoices(self.num_layers, self.num_experts_per_token, self.num_experts)


def new_critic(config: Config, policy: ModelArchitecture) -> ModelArchitecture:
    """Return the architecture of a critic initialised from the policy (``critic.init: policy``): the policy's trunk with a value head."""
    bins = config.critic.bins_of_new_head
    return replace(policy, mlp_value_head=config.critic.head == "mlp", value_bins=None if bins is None else ValueBins(*bins))


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """Return ``vocab_size`` rounded up to a multiple of 8 x TP, so that every rank has an aligned shard."""
    multiple = 8 * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


def choice_bytes(num_experts: int) -> int:
    """Return the number of bytes in which router replay stores an expert's index."""
    return 1 if num_experts <= 256 else 2


def read_architecture(folder: str | Path) -> ModelArchitecture:
    """Read ``config.json`` of an HF model folder. Raises CheckpointError with the folder, the keys and the supported values."""
    if not os.path.isdir(folder):
        state = "is not a folder" if os.path.exists(folder) else "does not exist"
        raise CheckpointError(f"model folder {str(folder)!r} {state}; give a Hugging Face model folder with a config.json")
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no config.json, so it is not a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of JSON, of UTF-8
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected a JSON object")
    return architecture_from_config(raw, str(path))


def architecture_from_config(raw: dict[str, Any], where: str = "config.json") -> ModelArchitecture:
    """Translate a parsed HF ``config.json``. ``where`` names the file in messages. Raises one CheckpointError with all errors."""
    name = _family(raw, where)
    family = FAMILIES[name]
    moe = family.moe
    experts_key = "num_local_experts" if "num_local_experts" in raw else "num_experts"  # transformers 5 and 4
    keys = _Keys(raw)
    sizes = {key: keys.size(key, below=_MAX_PARTS if key == "num_hidden_layers" else 2**31) for key in _SIZES}
    experts = {key: keys.size(key) for key in ("num_experts_per_tok", "moe_intermediate_size")} if moe else {}
    if moe:
        experts[experts_key] = keys.size(experts_key, below=_MAX_PARTS)
    head_dim, kv_heads = keys.size("head_dim", optional=True), keys.size("num_key_value_heads", optional=True)
    positions = keys.size("max_position_embeddings", optional=True) or 2048
    epsilon = keys.number("rms_norm_eps")
    theta, scaling, rotary_percent = _rope(keys, family)
    bins = _value_bins(keys)
    faults = [*keys.faults, *_unsupported(raw, family, positions)]
    heads = sizes["num_attention_heads"]
    if heads and kv_heads and heads % kv_heads:
        faults.append(f"num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}")
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelArchitecture(
        family=name,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        head_dim=head_dim or sizes["hidden_size"] // heads,
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=positions,
        rms_norm_eps=epsilon,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias == "always" or attention_bias,
        attention_output_bias=family.output_bias and attention_bias,
        qk_norm=family.qk_norm,
        num_experts=experts.get(experts_key),
        num_experts_per_token=experts.get("num_experts_per_tok"),
        moe_ffn_hidden_size=experts.get("moe_intermediate_size"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        rotary_percent=rotary_percent,
        rotary_interleaved=family.rotary_interleaved,
        mlp_value_head=raw.get("value_head") == "mlp",
        value_bins=bins,
    )


def _family(raw: dict[str, Any], where: str) -> str:
    model_type = raw.get("model_type")
    if str(model_type) not in FAMILIES:
        near = get_close_matches(str(model_type), FAMILIES, n=1, cutoff=0.3)
        hint = f"; nearest supported: {near[0]!r}" if near else ""
        supported = ", ".join(sorted(FAMILIES))
        given = f"model_type {model_type!r} is not supported" if "model_type" in raw else "has no model_type"
        raise CheckpointError(f"{where}: {given} (supported: {supported}){hint}")
    return str(model_type)


class _Keys:
    """Reads typed numbers from a mapping. Appends errors to ``faults`` and then returns 0."""

    def __init__(self, raw: dict[str, Any], prefix: str = "") -> None:
        self.raw, self.prefix = raw, prefix
        self.faults: list[str] = []

    def size(self, name: str, *, optional: bool = False, below: int = 2**31) -> int:
        value = self.raw.get(name)
        if optional and value is None:
            return 0
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < below:
            return value
        return int(self._fault(name, f"a positive whole number below {below}" if below < 2**31 else "a positive whole number"))

    def number(self, name: str) -> float:
        value = self.raw.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        return self._fault(name, "a positive number")

    def _fault(self, name: str, expected: str) -> float:
        given = f"is {self.raw[name]!r}, must be {expected}" if name in self.raw else "is missing"
        self.faults.append(f"{self.prefix}{name} {given}")
        return 0.0


def _unsupported(raw: dict[str, Any], family: Family, positions: int) -> Iterator[str]:
    """Yield errors for features that the models do not support or would silently compute differently."""
    if raw.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'"
    if raw.get("value_head") not in (None, "linear", "mlp"):
        yield f"value_head {raw['value_head']!r} is not supported, only 'linear' and 'mlp'"
    if raw.get("quantization_config"):
        yield "quantization_config: quantised weights are not supported; dequantise the model first"
    # Ignoring an active window would silently change results. Qwen configs name a window that is unused by default.
    active = raw.get("use_sliding_window", False) if family.unused_window else True
    window = raw.get("sliding_window")
    if active and window is not None and not (isinstance(window, int) and window >= positions):
        yield f"sliding_window = {window!r} smaller than max_position_embeddings = {positions} is not supported"
    if family.moe and (raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1):
        yield "mixtures of experts with some dense layers (mlp_only_layers, decoder_sparse_step) are not supported"


def _value_bins(keys: _Keys) -> ValueBins | None:
    """Return the bins of a critic that an earlier run saved with a categorical head, else None."""
    raw = keys.raw.get("value_bins")
    if raw is None:
        return None
    entries: dict[str, Any] = raw if isinstance(raw, dict) else {}
    low, high, sigma = (_finite(entries.get(name)) for name in ("low", "high", "sigma"))
    count = entries.get("bins")
    if not low < high or not sigma > 0 or not isinstance(count, int) or isinstance(count, bool) or count < 2:
        keys.faults.append(f"value_bins is {raw!r}, it must have numbers low < high, bins (whole, >= 2) and sigma > 0")
        return None
    return ValueBins(low, high, count, sigma)


def _finite(value: object) -> float:
    """Return a JSON number unchanged; anything else becomes NaN, for which every comparison is false."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else math.nan


def _rope(keys: _Keys, family: Family) -> tuple[float, dict[str, Any] | None, float]:
    """Read base, scaling and rotated part of a head from both formats.

    ``rope_parameters`` (transformers 5), or ``rope_theta``, ``partial_rotary_factor`` and ``rope_scaling`` (4).
    """
    raw = keys.raw
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    params = raw.get(name) or {}
    if not isinstance(params, dict):
        keys.faults.append(f"{name} is {params!r}, must be a mapping")
        return 0.0, None, 1.0
    inner = _Keys({**params, "rope_theta": params.get("rope_theta") or raw.get("rope_theta") or 10000.0}, f"{name}.")
    theta = inner.number("rope_theta")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _ROPE_TYPES:
        inner.faults.append(f"rope scaling type {kind!r} is not supported (supported: {', '.join(_ROPE_TYPES)})")
    share = params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or family.rotary_percent or 1.0
    if family.rotary_percent is None and share != 1.0:
        inner.faults.append(f"partial_rotary_factor {share!r} is not supported in this family")
    elif not isinstance(share, int | float) or not 0 < share <= 1:
        inner.faults.append(f"partial_rotary_factor is {share!r}, must be a number in (0, 1]")
    scaling = None
    if kind in ("llama3", "yarn"):
        scaling = {key: value for key, value in params.items() if key not in ("rope_theta", "type")} | {"rope_type": kind}
        inner.faults += _scaling_faults(inner, kind)
    keys.faults += inner.faults
    return theta, scaling, share


def _scaling_faults(inner: _Keys, kind: str) -> Iterator[str]:
    """Check the keys of a scaling. Yields errors besides those that ``inner`` collects."""
    required, optional = _ROPE_TYPES[kind]
    for key in required:
        inner.number(key)
    for key in optional:
        if key != "truncate" and inner.raw.get(key) is not None:
            inner.number(key)
    if not isinstance(inner.raw.get("truncate", True), bool):
        yield f"{inner.prefix}truncate is {inner.raw['truncate']!r}, must be true or false"
    if kind == "yarn":
        factor = inner.raw.get("factor")
        if isinstance(factor, int | float) and 0 < factor < 1:
            yield f"{inner.prefix}factor is {factor}, must be at least 1"
        unknown = sorted(set(inner.raw) - {"rope_theta", "rope_type", "type", "partial_rotary_factor", *required, *optional})
        if unknown:
            yield f"{inner.prefix}{unknown[0]} is not known for rope scaling type 'yarn' (known: {', '.join((*required, *optional))})"
