"""``vapo-mcore eval``: define the options and run the checks that do not need torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vapo_mcore.errors import ConfigError, VapoError
from vapo_mcore.interrupts import importing

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options except ``file`` and ``overrides``, which ``cli`` adds."""
    parser.add_argument(
        "--checkpoint", required=True, metavar="FOLDER", help="Hugging Face folder, Megatron distributed checkpoint, or checkpoint of a run"
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder for results and responses; an interrupted evaluation there resumes (default: <run.dir>_eval/<checkpoint>)",
    )
    parser.add_argument("--clean", action="store_true", help="delete the evaluation in the output folder before starting")


def run(options: argparse.Namespace, arguments: list[str], load: Callable[[argparse.Namespace, Sequence[str]], Config]) -> int:
    """Check, start the ranks unless torchrun has started them, and evaluate. Returns the exit code.

    ``load`` reads the configuration named by the options, with additional settings.
    """
    from vapo_mcore.launch import local

    checkpoint = weights_folder(options.checkpoint)
    megatron = os.path.isfile(os.path.join(checkpoint, ".metadata"))
    # A Hugging Face folder has its own config and tokenizer, so it replaces model.path.
    config = load(options, () if megatron else (f"model.path={json.dumps(checkpoint)}",))
    name = "-".join(part for part in os.path.abspath(options.checkpoint).split(os.sep)[-2:] if part)
    output = options.output or os.path.join(f"{config.run.dir.rstrip('/')}_eval", name)
    if not local.under_torchrun():
        _check_evaluation(config, checkpoint)
        if config.parallel.world_size > 1:
            return local.launch("vapo_mcore.cli", arguments, config.parallel.world_size)
        local.become_single_process()

    with importing():
        from vapo_mcore.commands.evaluate import run_evaluation

    return run_evaluation(config, checkpoint, output, clean=options.clean)


def weights_folder(checkpoint: str) -> str:
    """Return the folder of the policy's weights: ``policy/weights`` of a training checkpoint, else the folder itself."""
    inside = os.path.join(checkpoint, "policy", "weights")
    return inside if os.path.isfile(os.path.join(inside, ".metadata")) else checkpoint


def _check_evaluation(config: Config, checkpoint: str) -> None:
    """Check the rows of the evaluation sets and the headers of the weights. Raises one ConfigError with all errors."""
    from vapo_mcore.data.chat_template import chat_tokenizer
    from vapo_mcore.data.prompts import check_prompts
    from vapo_mcore.weights.views import open_view

    if not config.data.eval:
        raise ConfigError("data.eval is empty: add at least one evaluation set")
    companions = None if os.path.isdir(os.path.join(checkpoint, "hf")) else config.model.path
    faults = []
    checks: list[Callable[[], object]] = [
        lambda: check_prompts(config.data, lambda: chat_tokenizer(config.model.path, config.data), splits=("eval",)),
        lambda: open_view(checkpoint, role="policy", companions=companions).close(),
    ]
    for check in checks:
        try:
            check()
        except VapoError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
