"""Command line of ``vapo-mcore convert``: hf-to-megatron, megatron-to-hf, verify, inspect. Importing it does not import torch."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from vapo_mcore.errors import CheckpointError, ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHOWN = 20
_DEFAULT_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42, and 7 * 8 = 56."
_DEFAULT_TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four actions and their options to a parser; ``options.action`` holds the chosen one."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    to_megatron = actions.add_parser("hf-to-megatron", help="Hugging Face folder -> Megatron distributed checkpoint")
    to_hf = actions.add_parser("megatron-to-hf", help="Megatron distributed checkpoint -> Hugging Face folder")
    for action in (to_megatron, to_hf):
        action.add_argument("source", type=Path, metavar="SOURCE")
        action.add_argument("destination", type=Path, metavar="DESTINATION", help="must not exist")
        action.add_argument("--role", choices=("policy", "critic"), help="kind of model (default: detected from its head)")
        action.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="dtype of the weights (default: as stored)")
    to_megatron.add_argument("--vocab-multiple", type=int, default=128, metavar="N", help="pad the vocabulary to a multiple of N (128)")
    to_hf.add_argument("--max-shard-size", type=_size, default=_size("5GB"), metavar="SIZE", help="largest safetensors file (5GB)")
    verify = actions.add_parser("verify", help="compare two models; exit code 0: equal, 1: different")
    verify.add_argument("first", type=Path, metavar="FIRST", help="Hugging Face or Megatron folder; Hugging Face with --logits")
    verify.add_argument("second", type=Path, nargs="?", metavar="SECOND", help="the other model (default: FIRST's own checksums)")
    verify.add_argument("--logits", action="store_true", help="compare outputs: FIRST in transformers, SECOND in Megatron, float32")
    verify.add_argument("--text", type=Path, metavar="FILE", help="one text per line for --logits (default: a built-in sentence)")
    verify.add_argument("--tolerance", type=float, default=_DEFAULT_TOLERANCE, metavar="X", help="largest difference allowed (1e-5)")
    inspect = actions.add_parser("inspect", help="describe the contents of a model folder")
    inspect.add_argument("source", type=Path, metavar="FOLDER")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor with dtype, shape and checksum")
    for action in (to_hf, verify, inspect):
        action.add_argument("--config", type=Path, metavar="HF_FOLDER", help="config of a Megatron checkpoint (default: its subfolder hf)")


def run(options: argparse.Namespace) -> int:
    """Run the chosen action; returns the exit code. Raises VapoError for invalid input."""
    if options.action in ("hf-to-megatron", "megatron-to-hf"):
        return _convert(options)
    if options.action == "verify":
        return _verify_logits(options) if options.logits else _verify(options)
    return _inspect(options)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper().removeprefix("B")]) if match else 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 1GiB")
    return size


def _convert(options: argparse.Namespace) -> int:
    import torch

    from vapo_mcore.weights import convert

    started = time.monotonic()
    common: dict[str, Any] = {"role": options.role, "dtype": getattr(torch, options.dtype) if options.dtype else None}
    if options.action == "hf-to-megatron":
        if options.vocab_multiple < 1:
            raise ConfigError(f"--vocab-multiple {options.vocab_multiple} must be at least 1")
        report = convert.hf_to_megatron(options.source, options.destination, vocab_multiple=options.vocab_multiple, **common)
    else:
        report = convert.megatron_to_hf(
            options.source, options.destination, config=options.config, max_shard_bytes=options.max_shard_size, **common
        )
    seconds = time.monotonic() - started
    size = f"{report.num_bytes / 1e9:.3f} GB in {seconds:.1f} s ({report.num_bytes / 1e6 / seconds:.0f} MB/s)"
    print(f"{options.destination}: {report.role}, {report.tensors} tensors, {size}")
    for name, reason in report.dropped.items():
        print(f"skipped: {name} ({reason})")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from vapo_mcore.weights import verify

    if options.second is None:
        result, against = verify.check_own_checksums(options.first, config=options.config), "its own checksums"
    else:
        result, against = verify.compare(options.first, options.second, config=options.config), str(options.second)
    for name, difference in list(result.differences.items())[:_SHOWN]:
        print(f"{name}: {difference}")
    if len(result.differences) > _SHOWN:
        print(f"... and {len(result.differences) - _SHOWN} more")
    verdict = "equal" if result.equal else f"NOT equal: {len(result.differences)} differ"
    print(f"{options.first} and {against}: {result.tensors} tensors, {verdict}")
    return 0 if result.equal else 1


def _verify_logits(options: argparse.Namespace) -> int:
    from vapo_mcore.weights import verify

    lines = [_DEFAULT_TEXT]
    if options.text is not None:
        try:
            lines = options.text.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {options.text} cannot be read as UTF-8 text: {error}") from error
    texts = [line for line in lines if line.strip()]
    result = verify.compare_logits(options.first, options.second or options.first, texts, config=options.config)
    agreement = "" if result.top1_agreement is None else f", top-1 agreement {result.top1_agreement:.2%}"
    print(f"{result.tokens} tokens: largest difference {result.max_difference:.3g}, mean {result.mean_difference:.3g}{agreement}")
    equal = result.max_difference <= options.tolerance
    print(f"{'equal' if equal else 'NOT equal'} within {options.tolerance:g}")
    return 0 if equal else 1


def _inspect(options: argparse.Namespace) -> int:
    from vapo_mcore.weights.checksums import tensor_checksum
    from vapo_mcore.weights.views import MegatronFolderView, open_view

    with open_view(options.source, companions=options.config) as view:
        kind = "Megatron distributed checkpoint" if isinstance(view, MegatronFolderView) else "Hugging Face folder"
        arch = view.architecture
        names = [name for entry in view.plan for name in entry.hf_names]
        types = sorted({str(view.dtype(name)).removeprefix("torch.") for name in names})
        heads = f"{arch.num_attention_heads} heads, {arch.num_key_value_heads} key-value heads of {arch.head_dim}"
        print(f"{options.source}: {kind}, {view.role}, {arch.family}")
        print(f"{arch.num_layers} layers, hidden {arch.hidden_size}, ffn {arch.ffn_hidden_size}, {heads}, vocabulary {arch.vocab_size}")
        tied = "tied" if arch.tie_word_embeddings else "untied"
        print(f"{len(names)} tensors, {view.num_bytes / 1e9:.3f} GB, {', '.join(types)}, embeddings {tied}")
        if options.tensors:
            for name, tensor in view.all_tensors():
                print(f"{name}  {tensor_checksum(tensor)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command standalone (``tools/convert_checkpoint.py``)."""
    parser = argparse.ArgumentParser(description="Convert and compare model checkpoints.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except (CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
