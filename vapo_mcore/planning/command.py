"""Command line of ``vapo-mcore plan``: arguments, cluster, checks and exit code. Imports torch only after all checks."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_mcore.config.architecture import ModelArchitecture, new_critic, read_architecture
from vapo_mcore.errors import ConfigError
from vapo_mcore.planning.catalog import find_architecture, known_models
from vapo_mcore.planning.devices import DEVICES, choose_device
from vapo_mcore.rollout.factory import ranks_of_replica

if TYPE_CHECKING:
    from vapo_mcore.config.schema import Config
    from vapo_mcore.planning.planner import Cluster, Subject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=_positive, help="nodes of the cluster; sets parallel.world_size to nodes x devices per node")
    parser.add_argument("--gpus-per-node", type=_positive, default=8, metavar="N", help="devices per node (default: 8)")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100", help="device type, with its memory and rates (default: h100)")
    parser.add_argument(
        "--rate", action="append", default=[], metavar="KEY=NUMBER", help="override a number of the device's table; repeatable"
    )
    parser.add_argument("--model-config", metavar="MODEL", help="a known model, a config.json or a folder, instead of model.path")
    parser.add_argument("--response-length", type=_positive, metavar="TOKENS", help="assumed mean (default: 0.4 of the maximum)")
    parser.add_argument(
        "--horizon",
        type=_positive,
        action="append",
        default=[],
        metavar="TOKENS",
        help="also estimate the step with rollout.horizon.tokens, and the time that it waits for long responses; repeatable",
    )
    parser.add_argument(
        "--length-sigma",
        type=_positive_number,
        default=1.0,
        metavar="SIGMA",
        help="with --horizon: standard deviation of the logarithm of response lengths, which are assumed lognormal (default: 1.0)",
    )
    parser.add_argument("--search", action="store_true", help="search for the cheapest layouts that fit on at most these nodes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _positive_number(text: str) -> float:
    value = float(text)
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{value} is not a number above 0 and below 10")
    return value


def run(options: argparse.Namespace) -> int:
    """Print the plan. Returns 0 if everything fits, else 2; raises ConfigError if the configuration cannot be planned."""
    notes: list[str] = []
    loader = _Loader(options, notes)
    subject = loader.subject([])
    cluster = _cluster(options, subject.config)
    notes += _warnings(subject, cluster)

    from rich.console import Console

    from vapo_mcore.planning import report
    from vapo_mcore.planning.horizons import compare_horizons
    from vapo_mcore.planning.planner import Planner, single_changes
    from vapo_mcore.planning.search import cheapest_layouts

    planner = Planner()
    plan = planner.plan(subject, cluster, build=True)
    changes = [] if plan.fits else list(single_changes(plan, planner, loader.subject, options.rate))
    layouts = cheapest_layouts(plan, planner, loader.subject) if options.search else []
    horizons = compare_horizons(plan, _horizons(options, subject.config), options.length_sigma) if options.horizon else []
    if options.json:
        print(json.dumps(report.to_json(plan, notes, changes, layouts, horizons), indent=2))
        return 0 if plan.fits else 2
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, soft_wrap=True)
    report.print_plan(console, plan, notes)
    if horizons:
        report.print_horizons(console, horizons, options.length_sigma)
    report.print_verdict(console, plan, changes)
    if options.search:
        report.print_layouts(console, layouts)
    return 0 if plan.fits else 2


def _horizons(options: argparse.Namespace, config: Config) -> list[int]:
    """Return the lengths to compare: those given, and the recipe's own."""
    own = [] if config.rollout.horizon is None else [config.rollout.horizon.tokens]
    return sorted({*options.horizon, *own}, reverse=True)


class _Loader:
    """Loads the recipe with changed settings, checks it against the architecture rules, and caches the architectures."""

    def __init__(self, options: argparse.Namespace, notes: list[str]) -> None:
        self.options = options
        self.given = [f"parallel.world_size={options.nodes * options.gpus_per_node}"] if options.nodes else []
        self._architectures: dict[str, ModelArchitecture] = {}
        self.notes = notes

    def subject(self, settings: list[str]) -> Subject:
        from vapo_mcore.config import load_config
        from vapo_mcore.planning.planner import Subject

        overrides = [*self.options.overrides, *self.given, *settings]
        config = load_config(self.options.file, overrides, check_paths=False)
        policy = self._architecture("model.path", config.model.path)
        critic = None
        if config.uses_critic:
            critic = new_critic(config, policy)
            if config.critic.path is not None:
                critic = self._architecture("critic.path", config.critic.path, critic)
        _check_rules(config, policy, critic, self.options.file)
        return Subject(config, policy, critic, self.options.response_length)

    def _architecture(self, key: str, folder: str, otherwise: ModelArchitecture | None = None) -> ModelArchitecture:
        """Return the architecture of --model-config, else of the folder, else of the known model with its name, else ``otherwise``."""
        if key not in self._architectures:
            self._architectures[key] = self._find(key, folder, otherwise)
        return self._architectures[key]

    def _find(self, key: str, folder: str, otherwise: ModelArchitecture | None) -> ModelArchitecture:
        if key == "model.path" and self.options.model_config is not None:
            return find_architecture(self.options.model_config)
        if os.path.isdir(folder):
            return read_architecture(folder)
        name = Path(folder).name.lower().removesuffix("-instruct")  # tuned models have the architecture of their base model
        if name in known_models():
            self.notes.append(f"{key}: {folder!r} does not exist; planned with the published architecture of {name}")
            return find_architecture(name)
        if otherwise is not None:
            self.notes.append(f"{key}: {folder!r} does not exist; planned with the policy's architecture")
            return otherwise
        raise ConfigError(
            f"{key}: {folder!r} does not exist, and {name!r} is not a known model; give --model-config with a config.json or one of "
            f"{', '.join(known_models())}"
        )


def _check_rules(config: Config, policy: ModelArchitecture, critic: ModelArchitecture | None, file: str) -> None:
    """Check the rules that need the architecture, which loading skips without the model folder."""
    from vapo_mcore.config.rules import Subject as RuleSubject
    from vapo_mcore.config.rules import broken_rules

    other = None if critic is None or config.critic.path is None else critic
    faults = list(broken_rules(RuleSubject(config, policy, other, lambda name: True), set()))
    if faults:
        lines = "\n".join(f"  {fault.where}: {fault.message}" for fault in faults)
        raise ConfigError(f"configuration {file}: {len(faults)} fault{'s' * (len(faults) > 1)}\n{lines}")


def _cluster(options: argparse.Namespace, config: Config) -> Cluster:
    from vapo_mcore.planning.planner import Cluster

    world, per_node = config.parallel.world_size, options.gpus_per_node
    if world > per_node and world % per_node:
        raise ConfigError(
            f"parallel.world_size = {world} does not fill nodes of {per_node}; use a multiple of {per_node}, or another --gpus-per-node"
        )
    tp = ranks_of_replica(config)
    if min(per_node, world) % tp:
        raise ConfigError(
            f"rollout.tensor_parallel_size = {tp} (null: parallel.tensor_model_parallel_size) does not divide the {min(per_node, world)} "
            "processes of a node, so a replica would span nodes"
        )
    device = choose_device(options.device, options.rate)
    return Cluster.of(world, per_node, device)


def _warnings(subject: Subject, cluster: Cluster) -> Iterator[str]:
    config = subject.config
    layouts = {"": config.parallel} | ({"critic: ": config.critic_parallel} if config.layouts_differ else {})
    if subject.is_moe:
        yield (
            f"{subject.policy.family} is a mixture of experts: state sizes are exact, activations are those of tokens spread evenly over "
            "the experts, and times are those of a dense model of the active size, without the exchanges of routing"
        )
    for whose, p in layouts.items():
        if p.tensor_model_parallel_size * p.context_parallel_size > cluster.processes_per_node:
            yield (
                f"{whose}tensor {p.tensor_model_parallel_size} x context {p.context_parallel_size} spans nodes of "
                f"{cluster.processes_per_node}: the communication time is underestimated"
            )
    if subject.config.rollout.horizon is not None:
        yield "rollout.horizon: memory and times are those of a step without it; --horizon TOKENS estimates the time of steps with one"
    if subject.config.rollout.dynamic_sampling.enabled:
        yield "dynamic sampling draws further prompts for groups whose verdicts are all equal; only one round is included in the time"
    if not cluster.device.is_gpu:
        return
    yield "nothing has been measured on a GPU: state sizes are exact, activations follow the kernels' saved tensors, rates are assumed"
