"""Command line of ``vapo-mcore data check``. Importing this module imports no reader."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_mcore.errors import ConfigError

if TYPE_CHECKING:
    from vapo_mcore.config.schema import DataConfig
    from vapo_mcore.data.check import TruthFaults

_SHOWN = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``check`` action and its options to a parser."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="report on data files; exit code 0: no bad rows, 1: bad rows")
    check.add_argument("paths", nargs="+", metavar="FILE|CONFIG", help="data files and folders, or one .yaml configuration and overrides")
    check.add_argument("--eval", nargs="+", default=[], metavar="FILE", dest="held_out", help="evaluation sets, to find overlaps")
    check.add_argument("--tokenizer", metavar="FOLDER", help="model folder, for lengths in tokens (default with CONFIG: its model)")
    check.add_argument("--max-prompt-length", type=int, default=None, metavar="N", help="count prompts of more than N tokens as bad rows")
    check.add_argument("--prompt", metavar="FIELD", help="field of the prompt (default: detected from the column names)")
    check.add_argument("--answer", metavar="FIELD", help="field of the answer (default: detected from the column names)")
    check.add_argument("--answer-list", choices=("any", "all"), help="meaning of a list of several answers (as fields.answer_list)")
    check.add_argument("--verifier", metavar="NAME", default=None, help="verifier that must be able to read the answers (default: exact)")
    check.add_argument("--all", action="store_true", help=f"show all faults, not only the first {_SHOWN} of each source")
    check.add_argument("--json", metavar="FILE", help="also write the report with all faults as JSON")


def run(options: argparse.Namespace, truth_faults: TruthFaults) -> int:
    """Check the data and print the report; returns 0 if no row is bad, else 1. Raises VapoError for bad command-line options."""
    data, folder = _what_to_check(options)
    from vapo_mcore.data.check import check_data, render

    tokenizer = None if folder is None else _load_tokenizer(folder, data)
    if tokenizer is not None and data.chat_template and not tokenizer.chat_template:
        if _is_config(options):
            raise ConfigError("data.chat_template is true, but the model's tokenizer has no chat template; set data.chat_template: false")
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    report = check_data(data, tokenizer, truth_faults)
    limit = data.max_prompt_length if _is_config(options) else options.max_prompt_length
    print(render(report, limit, None if options.all else _SHOWN))
    if options.json is not None:
        try:
            Path(options.json).write_text(json.dumps(report.to_dict(), indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json!r} cannot be written: {error.strerror}") from error
    return 1 if report.faults else 0


def _is_config(options: argparse.Namespace) -> bool:
    return options.paths[0].endswith((".yaml", ".yml"))


def _what_to_check(options: argparse.Namespace) -> tuple[DataConfig, str | None]:
    """Return the sources, and the tokenizer's folder or None."""
    if options.max_prompt_length is not None and options.max_prompt_length < 1:
        raise ConfigError(f"--max-prompt-length {options.max_prompt_length} must be at least 1")
    if not _is_config(options):
        if options.max_prompt_length is not None and options.tokenizer is None:
            raise ConfigError("--max-prompt-length counts tokens: also give --tokenizer")
        return _data_config(options), options.tokenizer
    given = [name for name in ("held_out", "max_prompt_length", "prompt", "answer", "answer_list", "verifier") if getattr(options, name)]
    if given:
        names = ", ".join("--eval" if name == "held_out" else "--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{names}: not allowed with a configuration, which sets this itself; override it with key.path=value")
    from vapo_mcore.config import load_config

    # The report covers missing files; without a model it omits the lengths in tokens.
    config = load_config(options.paths[0], options.paths[1:], check_paths=False)
    folder = options.tokenizer or (config.model.path if os.path.isdir(config.model.path) else None)
    return config.data, folder


def _data_config(options: argparse.Namespace) -> DataConfig:
    from vapo_mcore.config.schema import DataConfig
    from vapo_mcore.config.verifiers import verifier_name_fault

    if options.verifier is not None and (fault := verifier_name_fault(options.verifier)) is not None:
        raise ConfigError(f"--verifier: {fault}")

    def sources(paths: list[str], split: str) -> list[dict[str, Any]]:
        fields = {"prompt": options.prompt, "answer": options.answer, "answer_list": options.answer_list}
        return [
            {"kind": "file", "path": path, "name": f"{split}-{number}", "verifier": options.verifier or "exact", "fields": fields}
            for number, path in enumerate(paths, start=1)
        ]

    limit = options.max_prompt_length or 2**31 - 1
    return DataConfig.model_validate(
        {"train": sources(options.paths, "file"), "eval": sources(options.held_out, "eval"), "max_prompt_length": limit}
    )


def _load_tokenizer(folder: str, data: DataConfig) -> Any:
    from vapo_mcore.data.chat_template import chat_tokenizer

    return chat_tokenizer(folder, data)
