"""``vapo-mcore replay-step``: one step of a run again from its dumped rollout, beside what the run recorded of it.

The weights are those of the newest checkpoint before the step. Where that is the state right before the step, everything is made
again, and differences are of rounding and of whatever was changed since; where it is older, what depends on the weights cannot agree,
and that is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vapo_mcore.checkpoint.resume import Checkpoint, choose, load_models, load_state, restore_random
from vapo_mcore.collectives import fail_together
from vapo_mcore.commands.replay_checks import ReplayOptions, check_json_path, checkpoint_before, is_exact
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.data.tokenizer import load_tokenizer, unknown_token_ids
from vapo_mcore.errors import ConfigError
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import ResponseSampler, Round
from vapo_mcore.experience.step_dump import StepDump, json_number, load_step
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.megatron.roles import Models, refresh_critic
from vapo_mcore.metrics_file import Row, whole_rows
from vapo_mcore.records.console import Console
from vapo_mcore.trainer.bad_batch import BadUpdate
from vapo_mcore.trainer.main import configure_logging, ending_together, seed_everything
from vapo_mcore.trainer.models import build_models
from vapo_mcore.trainer.step import StepOutcome, StepRunner, _Step
from vapo_mcore.trainer.updates import StoppedUpdate
from vapo_mcore.trainer.weight_sync import WeightSync

OF_THE_WEIGHTS = ("policy/", "critic/", "mismatch/", "advantages/", "kl/", "imitation/")
"""Metrics that a step measures with its models."""
_NOT_REPLAYED = ("time/", "memory/", "weights/", "diagnosis/", "eval/", "trackers/", "metrics/", "sampling/engine", "grading/restarts")
_NEVER = ("step", "stage", "warnings", "tokens/per_second")


@dataclass(frozen=True)
class Comparison:
    """One metric of the step: recorded by the run (None without a record) and of the replay."""

    name: str
    recorded: float | None
    replayed: float | None
    comparable: bool

    @property
    def difference(self) -> float | None:
        if self.recorded is None or self.replayed is None:
            return None
        return self.replayed - self.recorded


def run_replay(config: Config, options: ReplayOptions) -> int:
    """Replay in this process, one of ``parallel.world_size``; returns the exit code 0. Raises VapoError for what a person can solve."""
    configure_logging()
    parallel = initialize_parallel(config.parallel)
    with ending_together():
        replay(config, parallel, options)
    return 0


def replay(config: Config, parallel: ParallelContext, options: ReplayOptions) -> list[Comparison]:
    """The replay itself, in process groups that exist; rank 0 prints the table. Writes nothing into the run directory."""
    console = Console(enabled=parallel.rank == 0)
    seed_everything(config.seed)
    with fail_together():
        dump = load_step(
            config.run.dir,
            options.stage,
            options.step,
            rank=parallel.rank,
            world_size=parallel.world_size,
            known=_known_tokens(config),
        )
        rows = whole_rows(Path(config.run.dir) / "metrics.jsonl")
        name = checkpoint_before(config.run.dir, options)
        if parallel.rank == 0 and options.json_path is not None:
            check_json_path(options.json_path)
    checkpoint = None if name is None else choose(config.run.dir, name, console.print)
    models = build_models(config, parallel, console.print)
    if checkpoint is not None:
        load_models(config, models, parallel, checkpoint)
    trainer = ReplayStepRunner(config, parallel, models, dump)
    if checkpoint is not None:
        trainer.load(load_state(checkpoint)["objects"])
        restore_random(checkpoint, parallel.rank)
        if checkpoint.manifest.stage != options.stage:
            trainer.end_pretraining()
    exact = is_exact(config, options, None if checkpoint is None else checkpoint.manifest, rows)
    console.print(describe_start(config, options, checkpoint, exact=exact))
    trainer.rollouts = dump.rollouts - 1
    outcome = trainer.replay()
    recorded = _recorded(rows, options)
    comparisons = compare(recorded, outcome.row, exact=exact)
    for line in table(comparisons, has_record=recorded is not None):
        console.print(line)
    request = trainer.stop_requests.agreed()
    if request is not None:
        console.print(f"the step would have ended the run: {request.reason}")
    with fail_together():  # last: a replay is not lost with a file
        if parallel.rank == 0 and options.json_path is not None:
            write_json(options.json_path, comparisons, exact)
    return comparisons


def _known_tokens(config: Config) -> Tensor:
    """bool ``[vocab_size]``: which ids of the model its tokenizer has."""
    known = torch.ones(read_architecture(config.model.path).vocab_size, dtype=torch.bool)
    known[list(unknown_token_ids(load_tokenizer(config.model.path), known.numel()))] = False
    return known


class ReplayStepRunner(StepRunner):
    """A trainer whose responses come from a dump: no rollout engine, no weight sync, and nothing is written."""

    def __init__(self, config: Config, parallel: ParallelContext, models: Models, dump: StepDump) -> None:
        super().__init__(config, parallel, models, cast(ResponseSampler, _NoSampler()), cast(WeightSync, None), _no_prompts)
        self.dump = dump

    def load(self, objects: Mapping[str, Any]) -> None:
        """What a checkpoint has of the trainer's state."""
        mine = self.state.state_dict()
        self.state.load_state_dict({name: state for name, state in objects.items() if name in mine})

    def end_pretraining(self) -> None:
        """What a run does between value pretraining and its first step."""
        if self.imitation is not None:
            self.imitation.end_of_pretraining()
        refresh_critic(self.config, self.models)

    def replay(self) -> StepOutcome:
        """The step. A collective over all ranks."""
        if self.dump.stage == "value_pretraining":
            return self.value_pretraining_step(self.dump.step)
        return self.rl_step(self.dump.step)

    def _sample(self, step: _Step, *, dynamic: bool) -> tuple[Round, SamplingCounts]:
        return self.dump.sampled, self.dump.counts

    def _dump(self, step: _Step) -> str:
        return "its rollout was dumped before"

    def _keep_batch(self, step: _Step, experience: Experience, update: BadUpdate, stopped: StoppedUpdate) -> str:
        return f"epoch {update.epoch}, mini-batch {update.minibatch}"

    def _sync(self, step: _Step) -> None:
        """There is no engine to take the weights."""


class _NoSampler:
    grader_restarts = 0


def _no_prompts(count: int) -> list[Prompt]:
    raise AssertionError("a replay draws no prompts")


def describe_start(config: Config, options: ReplayOptions, checkpoint: Checkpoint | None, *, exact: bool) -> str:
    """Where the weights come from, and what that means for the comparison."""
    at = "the models as the run began" if checkpoint is None else f"checkpoint {checkpoint.path}"
    begun = f"replaying step {options.step} ({options.stage}) of {config.run.dir} from {at}"
    if exact:
        return f"{begun}, the state right before the step: all metrics can be compared"
    return (
        f"{begun}, which is not the state right before the step: what depends on the weights ({', '.join(OF_THE_WEIGHTS)}) is that of "
        "other weights and cannot be compared (marked ~); responses, rewards, groups and packing can. For all of it, save a checkpoint at "
        "the step before (checkpoint.every_steps)"
    )


def _recorded(rows: list[Row], options: ReplayOptions) -> Row | None:
    """The run's row of the step; None where the run has not recorded it, for example because it ended in it."""
    found = [row for row in rows if row["step"] == options.step and row.get("stage", "rl") == options.stage]
    return found[-1] if found else None


def compare(recorded: Row | None, replayed: Row, *, exact: bool) -> list[Comparison]:
    """The numbers of both, in the order of the replay's; those of time and place and of the rollout engine are left out."""
    names = [name for name in {**replayed, **(recorded or {})} if name not in _NEVER and not name.startswith(_NOT_REPLAYED)]
    found = []
    for name in names:
        before, after = _number((recorded or {}).get(name)), _number(replayed.get(name))
        if before is not None or after is not None:
            found.append(Comparison(name, before, after, exact or not name.startswith(OF_THE_WEIGHTS)))
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def table(comparisons: list[Comparison], *, has_record: bool) -> list[str]:
    """Lines for people: metric, recorded, replayed, difference."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.9g}"

    width = max((len(entry.name) for entry in comparisons), default=6) + 2
    lines = [f"{'metric':{width}} {'recorded':>16} {'replayed':>16} {'difference':>12}"]
    for entry in comparisons:
        difference = "-" if entry.difference is None else f"{entry.difference:.2e}" if entry.difference else "0"
        mark = "" if entry.comparable else " ~"
        lines.append(f"{entry.name:{width}} {shown(entry.recorded):>16} {shown(entry.replayed):>16} {difference:>12}{mark}")
    if not has_record:
        return [*lines, "the run has recorded nothing of this step: it ended in it"]
    worst = max(
        (entry for entry in comparisons if entry.comparable and entry.difference is not None and not math.isnan(entry.difference)),
        key=lambda entry: abs(entry.difference or 0.0) / max(abs(entry.recorded or 0.0), 1e-12),
        default=None,
    )
    if worst is None:
        return lines
    if worst.difference == 0:
        return [*lines, "all metrics that can be compared are equal"]
    return [*lines, f"the largest relative difference is that of {worst.name}: {worst.recorded:.9g} and {worst.replayed:.9g}"]


def write_json(path: str, comparisons: list[Comparison], exact: bool) -> None:
    """The comparison as JSON; numbers that JSON does not have by their names."""
    content = {
        "exact": exact,
        "metrics": {
            entry.name: {"recorded": json_number(entry.recorded), "replayed": json_number(entry.replayed)} for entry in comparisons
        },
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path!r} cannot be written: {error.strerror}") from error
