"""``vapo-mcore replay-step``: repeat one step of a run from its dumped rollout and compare the metrics with the recorded ones.

The weights come from the newest checkpoint before the step. If that is the state right before the step, all metrics are reproduced up
to rounding and whatever was changed since. If it is older, the weights differ; metrics that depend on them are marked ``~``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.checkpoint.resume import Checkpoint, choose, load_models, load_state, restore_random
from vapo_mcore.collectives import fail_together
from vapo_mcore.commands.replay_checks import ReplayOptions, check_json_path, checkpoint_before, is_exact
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import Config
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES, RolloutBatch
from vapo_mcore.data.tokenizer import load_tokenizer, unknown_token_ids
from vapo_mcore.errors import CheckpointError, ConfigError
from vapo_mcore.experience.bad_batch import BadUpdate
from vapo_mcore.experience.batches import Experience
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round
from vapo_mcore.experience.step_dump import StepDump, json_number, load_step
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.megatron.roles import Models, refresh_critic
from vapo_mcore.metrics_file import Row, whole_rows
from vapo_mcore.records.console import Console
from vapo_mcore.trainer.main import configure_logging, ending_together, seed_everything
from vapo_mcore.trainer.models import build_models
from vapo_mcore.trainer.offline import OfflineStepRunner
from vapo_mcore.trainer.step_state import StepOutcome, StepState
from vapo_mcore.trainer.updates import StoppedUpdate

OF_THE_WEIGHTS = ("policy/", "critic/", "mismatch/", "advantages/", "kl/", "imitation/")
"""Prefixes of metrics that depend on the weights."""
_NOT_REPLAYED = ("time/", "memory/", "weights/", "diagnosis/", "eval/", "trackers/", "metrics/", "sampling/engine", "grading/restarts")
_NEVER = ("step", "stage", "warnings", "tokens/per_second")


@dataclass(frozen=True)
class Comparison:
    """One metric of the step: the value recorded by the run (None if not recorded) and the replay's."""

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
    """Replay in this process, one of ``parallel.world_size``. Returns the exit code 0; raises VapoError if the user can fix the error."""
    configure_logging()
    parallel = initialize_parallel(config.parallel)
    with ending_together():
        replay(config, parallel, options)
    return 0


def replay(config: Config, parallel: ParallelContext, options: ReplayOptions) -> list[Comparison]:
    """Replay in existing process groups. Rank 0 prints the table. Writes nothing into the run directory."""
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
        dump = with_choices(config, dump)
        rows = whole_rows(Path(config.run.dir) / "metrics.jsonl")
        name = checkpoint_before(config.run.dir, options)
        if parallel.rank == 0 and options.json_path is not None:
            check_json_path(options.json_path)
    checkpoint = None if name is None else choose(config.run.dir, name, console.print)
    models = build_models(config, parallel, console.print)
    if checkpoint is not None:
        load_models(config, models, checkpoint)
    objects, after_pretraining = None, False
    if checkpoint is not None:
        objects = load_state(checkpoint)["objects"]
        restore_random(checkpoint, parallel.rank)  # before pretraining ends, as in the run: a new critic may draw from it
        after_pretraining = checkpoint.manifest.stage != options.stage
    trainer = ReplayStepRunner(config, parallel, models, objects, after_pretraining=after_pretraining)
    exact = is_exact(options, None if checkpoint is None else checkpoint.manifest, rows)
    console.print(describe_start(config, options, checkpoint, exact=exact))
    outcome = trainer.replay(dump)
    recorded = _recorded(rows, options)
    comparisons = compare(recorded, outcome.row, exact=exact)
    for line in table(comparisons, has_record=recorded is not None):
        console.print(line)
    request = trainer.stop_requests.agreed()
    if request is not None:
        console.print(f"this step would have ended the run: {request.reason}")
    with fail_together():  # last, so that the table is printed even if the file cannot be written
        if parallel.rank == 0 and options.json_path is not None:
            write_json(options.json_path, comparisons, exact)
    return comparisons


def with_choices(config: Config, dump: StepDump) -> StepDump:
    """Return the dump with the engine's choices of experts if this configuration repeats them, without them otherwise.

    Raises CheckpointError if it repeats them and the dump has none, or those of another model.
    """
    local, repeats = dump.sampled.local, dump.stage == "rl" and config.model.router.replay == "engine"
    if repeats and ENGINE_CHOICES not in local:
        raise CheckpointError(
            "model.router.replay = 'engine', but the dump has no choices of experts: the run sampled it with another setting; replay it "
            "with model.router.replay=trainer (or off)"
        )
    shape = read_architecture(config.model.path).expert_choices if repeats else None
    if shape is not None and list(local[ENGINE_CHOICES].shape[1:]) != [shape.layers, shape.topk]:
        layers, topk = local[ENGINE_CHOICES].shape[1:]
        raise CheckpointError(
            f"the dump has {topk} experts of {layers} layers for each token, but model.path has {shape.topk} of {shape.layers}: it is from "
            "another model"
        )
    if repeats or ENGINE_CHOICES not in local:
        return dump
    tensors = {name: tensor for name, tensor in local.tensors.items() if name != ENGINE_CHOICES}
    without = RolloutBatch(local.rows, local.cu_seqlens, tensors, local.row_ids)
    return replace(dump, sampled=replace(dump.sampled, local=without))


def _known_tokens(config: Config) -> Tensor:
    """Return bool ``[vocab_size]``, True for token ids that the model's tokenizer has."""
    known = torch.ones(read_architecture(config.model.path).vocab_size, dtype=torch.bool)
    known[list(unknown_token_ids(load_tokenizer(config.model.path), known.numel()))] = False
    return known


class ReplayStepRunner(OfflineStepRunner):
    """A StepRunner that takes its responses from dumps, and writes nothing."""

    def __init__(
        self,
        config: Config,
        parallel: ParallelContext,
        models: Models,
        objects: Mapping[str, Any] | None = None,
        *,
        after_pretraining: bool,
    ) -> None:
        """Collective.

        Args:
            objects: those of a checkpoint, whose state of the trainer is loaded; other objects are ignored. None: a fresh trainer.
            after_pretraining: do what a run does between value pretraining and its first RL step, after the state is loaded.
        """
        super().__init__(config, parallel, models)
        self._dumped: StepDump | None = None  # the step under way
        if objects is not None:
            mine = self.state.state_dict()
            self.state.load_state_dict({name: state for name, state in objects.items() if name in mine})
        if after_pretraining:
            if self.imitation is not None:
                self.imitation.end_of_pretraining()
            refresh_critic(config, models)

    def replay(self, dump: StepDump) -> StepOutcome:
        """Run the dumped step, with the seeds of its rollout's number. Collective over all ranks."""
        self._dumped, self.rollouts = dump, dump.rollouts - 1
        return self.value_pretraining_step(dump.step) if dump.stage == "value_pretraining" else self.rl_step(dump.step)

    def _sample(self, step: StepState, *, dynamic: bool) -> tuple[Round, SamplingCounts]:
        assert self._dumped is not None, "called by replay"
        return self._dumped.sampled, self._dumped.counts

    def _dump(self, step: StepState) -> str:
        return "its rollout is dumped already"

    def _keep_batch(self, step: StepState, experience: Experience, update: BadUpdate, stopped: StoppedUpdate) -> str:
        return f"epoch {update.epoch}, mini-batch {update.minibatch}"


def describe_start(config: Config, options: ReplayOptions, checkpoint: Checkpoint | None, *, exact: bool) -> str:
    """Describe which weights the replay starts from and which metrics are comparable."""
    source = "the initial models" if checkpoint is None else f"checkpoint {checkpoint.path}"
    start = f"replaying step {options.step} ({options.stage}) of {config.run.dir} from {source}"
    if exact:
        return f"{start}, the state right before the step: all metrics are comparable"
    return (
        f"{start}, which is not the state right before the step: the weights differ, so metrics that depend on them "
        f"({', '.join(OF_THE_WEIGHTS)}) are not comparable (marked ~); those of responses, rewards, groups and packing are. To compare all "
        "metrics, save a checkpoint at the previous step (checkpoint.every_steps)"
    )


def _recorded(rows: list[Row], options: ReplayOptions) -> Row | None:
    """Return the run's row of the step, or None if there is none, for example because the run ended in this step."""
    found = [row for row in rows if row["step"] == options.step and row.get("stage", "rl") == options.stage]
    return found[-1] if found else None


def compare(recorded: Row | None, replayed: Row, *, exact: bool) -> list[Comparison]:
    """Pair recorded and replayed numbers, in the replay's order. Skips times, memory, and metrics of the rollout engine."""
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
    """Format the comparison as a table: metric, recorded, replayed, difference."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.9g}"

    width = max((len(entry.name) for entry in comparisons), default=6) + 2
    lines = [f"{'metric':{width}} {'recorded':>16} {'replayed':>16} {'difference':>12}"]
    for entry in comparisons:
        difference = "-" if entry.difference is None else f"{entry.difference:.2e}" if entry.difference else "0"
        mark = "" if entry.comparable else " ~"
        lines.append(f"{entry.name:{width}} {shown(entry.recorded):>16} {shown(entry.replayed):>16} {difference:>12}{mark}")
    if not has_record:
        return [*lines, "the run has no record of this step: it ended in it"]
    worst = max(
        (entry for entry in comparisons if entry.comparable and entry.difference is not None and not math.isnan(entry.difference)),
        key=lambda entry: abs(entry.difference or 0.0) / max(abs(entry.recorded or 0.0), 1e-12),
        default=None,
    )
    if worst is None:
        return lines
    if worst.difference == 0:
        return [*lines, "all comparable metrics are equal"]
    return [*lines, f"largest relative difference: {worst.name}, recorded {worst.recorded:.9g}, replayed {worst.replayed:.9g}"]


def write_json(path: str, comparisons: list[Comparison], exact: bool) -> None:
    """Write the comparison as JSON; NaN and infinities become strings. Raises ConfigError."""
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
