"""``memory_use.py WORK``: converts a model of zeros both ways and prints peak memory against the bound as JSON.

Peak is resident memory of this process (``VmHWM``, reset before each conversion), everything imported included.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from tests.unit.weights.models import make_arch
from vapo_mcore.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_mcore.weights.plan import hf_manifest, plan_mapping
from vapo_mcore.weights.writer import SafetensorsWriter

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 56,
    "hidden_size": 512,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 60_001,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def write_zeros(folder: Path) -> tuple[int, int]:
    """A model whose files are holes; bytes of the whole and of the largest tensor group."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    arch = make_arch(
        num_layers=CONFIG["num_hidden_layers"],
        hidden_size=CONFIG["hidden_size"],
        ffn_hidden_size=CONFIG["intermediate_size"],
        num_attention_heads=CONFIG["num_attention_heads"],
        num_key_value_heads=CONFIG["num_key_value_heads"],
        head_dim=CONFIG["hidden_size"] // CONFIG["num_attention_heads"],
        vocab_size=CONFIG["vocab_size"],
    )
    plan = plan_mapping(arch, "policy")
    manifest = {name: (shape, torch.bfloat16) for name, shape in hf_manifest(plan).items()}
    SafetensorsWriter(folder, manifest).close()  # reserved, never written: reads as zeros
    groups = [2 * sum(math.prod(shape) for shape in entry.hf_shapes) for entry in plan]
    return sum(groups), max(groups)


def peak_of(action: Any, *arguments: Any) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    action(*arguments)
    return resident("VmHWM")


if __name__ == "__main__":
    work = Path(sys.argv[1])
    total, largest = write_zeros(work / "hf")
    peaks = [peak_of(hf_to_megatron, work / "hf", work / "megatron"), peak_of(megatron_to_hf, work / "megatron", work / "back")]
    print(json.dumps({"total": total, "largest_group": largest, "peaks": peaks}))
