"""Rotary frequencies and attention scale beside transformers' own functions, for every supported scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vapo_mcore.config.architecture import architecture_from_config
from vapo_mcore.megatron.rope import inverse_frequencies, softmax_scale

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,  # as in Qwen's model cards
    "yarn, other corrections": YARN | {"beta_fast": 16, "beta_slow": 2.5, "original_max_position_embeddings": 512},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 0.75},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, factor 1": YARN | {"factor": 1.0},
    "yarn, one wavelength": YARN | {"original_max_position_embeddings": 4},  # correction range of a single dimension
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_scale_are_those_of_transformers(name: str) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    length = int(scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 32768))
    config = Qwen3Config(
        head_dim=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=256,
        max_position_embeddings=length,
        rope_parameters=dict(scaling),
    )
    architecture = architecture_from_config(config.to_dict())
    plain = 1.0 / (architecture.rope_theta ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128))
    expected, factor = (plain, 1.0) if name == "plain" else ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(architecture, plain), expected, rtol=1e-6, atol=0)
    scale = softmax_scale(architecture)
    assert (scale is not None) == name.startswith("yarn")
    assert (scale or 128**-0.5) == pytest.approx(factor**2 / 128**0.5, rel=1e-12)


def test_old_spelling_of_the_scaling() -> None:
    """transformers 4 wrote ``rope_theta`` and ``rope_scaling`` with ``type``."""
    raw = {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 70,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    new = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")} | {"rope_parameters": YARN}
    old_style, new_style = architecture_from_config(raw), architecture_from_config(new)
    assert old_style == new_style
    assert replace(old_style, rope_scaling=None) == architecture_from_config(raw | {"rope_scaling": None})
