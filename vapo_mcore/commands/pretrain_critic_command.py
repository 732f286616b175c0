"""``vapo-mcore pretrain-critic``: define the options and start the ranks. Importing it imports no third-party package."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vapo_mcore.commands.pretrain_options import PretrainOptions
from vapo_mcore.errors import ConfigError
from vapo_mcore.interrupts import importing

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config

_DATA_HELP = "JSONL files of scored responses, dumps of steps, or run directories with dumps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    default = PretrainOptions(())
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help=_DATA_HELP)
    parser.add_argument("--held-out", nargs="+", default=[], metavar="FILE", help="the same for the held-out responses")
    parser.add_argument(
        "--held-out-fraction",
        type=float,
        metavar="F",
        help=f"share of the prompts of --data held out without --held-out (default: {default.fraction})",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="run directory of the pretraining; replaces run.dir")
    parser.add_argument(
        "--passes", type=int, default=default.passes, metavar="N", help=f"maximum number of passes (default: {default.passes})"
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=default.patience,
        metavar="N",
        help=f"stop after this many passes without a rise of the held-out explained variance (default: {default.patience})",
    )
    parser.add_argument(
        "--min-rise", type=float, default=default.min_rise, metavar="X", help=f"smallest rise that counts (default: {default.min_rise})"
    )
    parser.add_argument("--clean", action="store_true", help="delete the run in FOLDER before starting")


def run(options: argparse.Namespace, arguments: list[str], load: Callable[[argparse.Namespace, Sequence[str]], Config]) -> int:
    """Check, start the ranks of the layout unless torchrun has started them, and pretrain. Returns the exit code.

    ``load`` reads the configuration named by the options, with additional settings.
    """
    from vapo_mcore.launch import local

    _move_settings(options)
    chosen = _checked(options)
    config = load(options, (f"run.dir={json.dumps(os.path.abspath(options.output))}",))
    if not config.uses_critic:
        raise ConfigError(
            f"algorithm.advantage.estimator = {config.algorithm.advantage.estimator!r} builds no critic; use a recipe with 'gae', such as "
            "presets/vapo.yaml"
        )
    if not local.under_torchrun():
        from vapo_mcore.records.run_dir import check_run_directory

        check_run_directory(config.run.dir, clean=chosen.clean)
        if config.parallel.world_size > 1:
            return local.launch("vapo_mcore.cli", arguments, config.parallel.world_size)
        local.become_single_process()

    with importing():
        from vapo_mcore.commands.pretrain_critic import run_pretraining

    return run_pretraining(config, chosen)


def _move_settings(options: argparse.Namespace) -> None:
    """Move KEY=VALUE settings that follow the files of --data or --held-out to the settings."""
    for name in ("data", "held_out"):
        given = getattr(options, name)
        settings = [item for item in given if "=" in item and not os.path.exists(item)]
        setattr(options, name, [item for item in given if item not in settings])
        options.overrides = [*options.overrides, *settings]


def _checked(options: argparse.Namespace) -> PretrainOptions:
    """Return the options. Raises ConfigError with all that are out of range or name no file."""
    faults = []
    for name in ("passes", "patience"):
        if getattr(options, name) < 1:
            faults.append(f"--{name} {getattr(options, name)}: use at least 1")
    if not options.min_rise >= 0:
        faults.append(f"--min-rise {options.min_rise:g}: use 0 or more")
    fraction = PretrainOptions(()).fraction if options.held_out_fraction is None else options.held_out_fraction
    if not 0 < fraction < 1:
        faults.append(f"--held-out-fraction {fraction:g}: use a share between 0 and 1")
    if options.held_out and options.held_out_fraction is not None:
        faults.append("--held-out gives the held-out responses, --held-out-fraction takes them from --data: use only one of them")
    if not options.data:
        faults.append("--data: names no file")
    for flag, paths in (("--data", options.data), ("--held-out", options.held_out)):
        faults += [f"{flag} {path}: does not exist" for path in paths if not os.path.exists(path)]
    if faults:
        raise ConfigError("\n".join(faults))
    return PretrainOptions(
        tuple(options.data), tuple(options.held_out), fraction, options.passes, options.patience, options.min_rise, options.clean
    )
