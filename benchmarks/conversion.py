"""Compare offline checkpoint conversion with a plain copy of the same files.

    python benchmarks/conversion.py [--model FOLDER] [--rounds 5]

Prints one JSON line per direction. ``share_of_copy`` is the time of the copy over that of the conversion, medians of alternating rounds.
Both fsync all files and folders and read their source from the page cache. The copy is ``shutil.copyfile`` of each file, done inside the
kernel. The first conversion of a process also imports and compiles (``first_seconds``). Without ``--model`` and models/smollm2-135m, random
weights of the same sizes are converted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.weights.convert import hf_to_megatron, megatron_to_hf
from vapo_mcore.weights.plan import hf_manifest, plan_mapping
from vapo_mcore.weights.writer import SafetensorsWriter

SMOLLM2 = Path("models/smollm2-135m")
SIZES = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def model_folder(given: Path | None, work: Path) -> Path:
    """Return the given folder, SmolLM2-135M-Instruct if it was fetched, or a folder with random weights of the same sizes."""
    if given is not None or SMOLLM2.is_dir():
        return given or SMOLLM2
    folder = work / "random"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    shapes = hf_manifest(plan_mapping(read_architecture(folder), "policy"))
    with SafetensorsWriter(folder, {name: (shape, torch.bfloat16) for name, shape in shapes.items()}) as out:
        for name, shape in shapes.items():
            out.write(name, torch.randn(shape) * 0.02)
    return folder


def copy(source: Path, destination: Path) -> None:
    """Copy a folder with its subfolders and fsync everything."""
    shutil.copytree(source, destination, copy_function=shutil.copyfile)
    for path in (*destination.rglob("*"), destination, destination.parent):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def seconds(action: Callable[[Path, Path], object], source: Path, destination: Path) -> float:
    begin = time.perf_counter()
    action(source, destination)
    elapsed = time.perf_counter() - begin
    shutil.rmtree(destination)
    return elapsed


def measure(name: str, convert: Callable[[Path, Path], object], source: Path, work: Path, rounds: int) -> dict[str, object]:
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    copies, conversions = [], []
    for _ in range(rounds + 1):
        copies.append(seconds(copy, source, work / "copy"))
        conversions.append(seconds(convert, source, work / "converted"))
    copied, converted = statistics.median(copies[1:]), statistics.median(conversions[1:])
    return {
        "benchmark": "conversion",
        "direction": name,
        "model": source.name if name == "hf-to-megatron" else "its result",
        "megabytes": round(size / 1e6),
        "copy_seconds": round(copied, 3),
        "seconds": round(converted, 3),
        "first_seconds": round(conversions[0], 3),
        "share_of_copy": round(copied / converted, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source = model_folder(options.model, work)
        print(json.dumps(measure("hf-to-megatron", hf_to_megatron, source, work, options.rounds)), flush=True)
        hf_to_megatron(source, work / "megatron")
        print(json.dumps(measure("megatron-to-hf", megatron_to_hf, work / "megatron", work, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
