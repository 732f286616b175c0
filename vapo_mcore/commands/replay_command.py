"""``vapo-mcore replay-step RUN STEP``: define the options and start the replay. Importing it imports no third-party package."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.errors import ConfigError
from vapo_mcore.interrupts import importing

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config, CriticParallelConfig, ParallelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("run", metavar="RUN", help="run directory (run.dir)")
    parser.add_argument("step", metavar="STEP", type=int, help="a step whose rollout was dumped (run.dump_steps, run.dump_every_steps)")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help="settings that override those of the run")
    parser.add_argument("--stage", choices=("rl", "value_pretraining"), default="rl", help="stage of the step (default: rl)")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="start from this folder of RUN/checkpoints (default: the newest before the step)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the comparison as JSON")


def _reset_derived(file: str, overrides: Sequence[str]) -> list[str]:
    """Return overrides that reset derived parallel settings if ``overrides`` changes the layout.

    The resolved configuration also contains settings derived from its layout. Those with their derived value must be derived again.
    """
    changed = {override.partition("=")[0].strip() for override in overrides}
    sections = [name for name in ("parallel", "critic.parallel") if any(key == name or key.startswith(f"{name}.") for key in changed)]
    if not sections:
        return []
    from vapo_mcore.config import load_config

    config = load_config(file, check_paths=False)
    recorded = {"parallel": config.parallel, "critic.parallel": config.critic.parallel}
    return [reset for name in sections if (section := recorded[name]) is not None for reset in _resets(name, section)]


def _resets(name: str, recorded: ParallelConfig | CriticParallelConfig) -> list[str]:
    layout = type(recorded)
    derived = {key for key, field in layout.model_fields.items() if field.default_factory is not None}
    own = layout(**recorded.model_dump(exclude=derived))
    return [f"{name}.{key}=null" for key in sorted(derived) if getattr(recorded, key) == getattr(own, key)]


def run(options: argparse.Namespace, arguments: list[str], load: Callable[[argparse.Namespace, Sequence[str]], Config]) -> int:
    """Check, start the ranks of the run's layout unless torchrun has started them, and replay. Returns the exit code.

    ``load`` reads the configuration named by the options, with additional settings.
    """
    from vapo_mcore.launch import local
    from vapo_mcore.records.run_dir import holds_run

    if options.step < 1:
        raise ConfigError(f"STEP = {options.step}: steps count from 1")
    if not holds_run(options.run):
        raise ConfigError(f"{options.run!r} is not a run directory of vapo-mcore; give the run.dir of a run")
    options.file = str(Path(options.run) / "config.yaml")
    options.overrides = [*_reset_derived(options.file, options.overrides), *options.overrides]
    config = load(options, (f"run.dir={json.dumps(os.path.abspath(options.run))}",))

    from vapo_mcore.commands.replay_checks import ReplayOptions, check_replay

    replay = ReplayOptions(options.step, options.stage, options.checkpoint, options.json)
    if not local.under_torchrun():
        check_replay(config, replay)
        if config.parallel.world_size > 1:
            return local.launch("vapo_mcore.cli", arguments, config.parallel.world_size)
        local.become_single_process()

    with importing():
        from vapo_mcore.commands.replay import run_replay

    return run_replay(config, replay)
