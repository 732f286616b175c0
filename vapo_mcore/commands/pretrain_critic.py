"""``vapo-mcore pretrain-critic``: train a critic on scored responses from disk, without policy and rollout engine.

Each pass over the responses is one step of value pretraining, run by the trainer's own ``StepRunner``. After each pass the critic is
measured on held-out prompts; the weights of the best pass are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vapo_mcore import heartbeat
from vapo_mcore.checkpoint_files import model_folder
from vapo_mcore.collectives import fail_together
from vapo_mcore.commands.pretrain_options import PretrainOptions
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.loading import dump_yaml
from vapo_mcore.config.schema import Config, UntilConfig, ValuePretrainingConfig
from vapo_mcore.errors import ConfigError, TrainingError
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.sampling import Round
from vapo_mcore.experience.scored_responses import ScoredReader, ScoredResponses, require_disjoint, require_spread, split
from vapo_mcore.launch.local import become_stoppable
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.megatron.roles import Models
from vapo_mcore.records.console import Console, format_step
from vapo_mcore.records.run_dir import RunDirectory, critic_folder
from vapo_mcore.records.run_lock import RunLock
from vapo_mcore.trainer.advantages import trainable_rows
from vapo_mcore.trainer.critic_probe import CriticProbe
from vapo_mcore.trainer.main import configure_logging, ending_together, seed_everything
from vapo_mcore.trainer.models import build_critic_alone
from vapo_mcore.trainer.offline import NO_SAMPLER, OfflineStepRunner
from vapo_mcore.trainer.step_state import StepState
from vapo_mcore.trainer.value_pretraining import PROBE, PretrainingEnd
from vapo_mcore.weights.export import Exporter, save_hf

BEFORE = f"{PROBE}_before"


def run_pretraining(config: Config, options: PretrainOptions) -> int:
    """Pretrain in this process, one of ``parallel.world_size``. Returns the exit code 0; raises VapoError if the user can fix the error."""
    configure_logging()
    parallel = initialize_parallel(config.critic_parallel)  # there is no policy
    with ending_together():
        pretrain(config, parallel, options)
    return 0


def pretrain(config: Config, parallel: ParallelContext, options: PretrainOptions) -> list[dict[str, Any]]:
    """Pretrain in existing process groups. Returns the metrics of each pass, the same on all ranks."""
    console = Console(enabled=parallel.rank == 0)
    config = settings_of_passes(config, options)
    seed_everything(config.seed)
    with fail_together():
        training, held_out = read_responses(config, options, console.print)
    console.print(
        f"pretraining the critic on {len(training)} responses to {training.prompts} prompts, at most {options.passes} passes; held out: "
        f"{len(held_out)} responses to {held_out.prompts} other prompts"
    )
    models = build_critic_alone(config, parallel, console.print)
    trainer = StoredStepRunner(config, parallel, models, training, StoredProbe(config, parallel, held_out))
    with ExitStack() as stack:
        run_dir = _open_run_directory(config, parallel, options, stack, console)
        stack.callback(console.stop_progress)
        become_stoppable()
        return _run_passes(config, trainer, run_dir, console, held_out.prompts)


def settings_of_passes(config: Config, options: PretrainOptions) -> Config:
    """Return the configuration of a pretraining in which each step is one pass over all responses and the probe decides when to stop."""
    pretraining = config.critic.value_pretraining
    until = UntilConfig(patience=options.patience, min_rise=options.min_rise, max_steps=options.passes)
    passes = ValuePretrainingConfig(steps=options.passes, lr=pretraining.lr, head_only=pretraining.head_only, until=until)
    critic = config.critic.model_copy(update={"epochs": 1, "updates_per_rollout": None, "value_pretraining": passes, "probe": None})
    run = config.run.model_copy(update={"steps": 0, "samples_per_step": 0})
    rollout = config.rollout.model_copy(update={"horizon": None})  # the responses are whole: none of their tokens is of an earlier segment
    return config.model_copy(update={"critic": critic, "run": run, "rollout": rollout})


def read_responses(config: Config, options: PretrainOptions, say: Callable[[str], None]) -> tuple[ScoredResponses, ScoredResponses]:
    """Return (training, held-out) responses and ``say`` what could not be checked.

    Raises DataError for faulty files, overlapping prompts, and scores that are all equal.
    """
    reader = ScoredReader(config, read_architecture(config.model.path).vocab_size)
    training = reader.read(options.data)
    if options.held_out:
        held_out = reader.read(options.held_out)
        require_disjoint(training, held_out)
    else:
        training, held_out = split(training, options.fraction, config.seed)
    for note in reader.notes:
        say(f"warning: {note}")
    share = f"held-out prompts of --data (--held-out-fraction {options.fraction:g})"
    for data, what in ((training, "--data"), (held_out, "--held-out" if options.held_out else share)):
        require_spread(data, what, trainable_rows(config, data.batch.rows))
    return training, held_out


class StoredStepRunner(OfflineStepRunner):
    """A StepRunner that takes its responses from disk. It has no policy."""

    def __init__(self, config: Config, parallel: ParallelContext, models: Models, training: ScoredResponses, probe: StoredProbe) -> None:
        super().__init__(config, parallel, models, probe=probe)
        self.imitation = None  # trains the policy
        self.stored = training.round(parallel.rank, parallel.world_size)
        self.counts = SamplingCounts(rounds=0, prompts_tried=training.prompts).with_responses([self.stored])

    def _sample(self, step: StepState, *, dynamic: bool) -> tuple[Round, SamplingCounts]:
        return self.stored, self.counts

    def _dump(self, step: StepState) -> str:
        return "its responses are those of --data"


class StoredProbe(CriticProbe):
    """A probe whose responses come from disk."""

    def __init__(self, config: Config, parallel: ParallelContext, held_out: ScoredResponses) -> None:
        super().__init__(config, [], parallel, NO_SAMPLER)
        self.stored = held_out.round(parallel.rank, parallel.world_size)

    def sample(self, models: Models) -> None:
        """Distribute the stored responses."""
        self.hold(self.stored, models)


def _open_run_directory(
    config: Config, parallel: ParallelContext, options: PretrainOptions, stack: ExitStack, console: Console
) -> RunDirectory | None:
    run_dir = None
    with fail_together():
        if parallel.rank == 0:
            run_dir = RunDirectory.create(config.run.dir, clean=options.clean, config_yaml=dump_yaml(config))
            stack.enter_context(RunLock(config.run.dir, console.print))
            stack.callback(run_dir.close)
    return run_dir


def _run_passes(
    config: Config, trainer: StoredStepRunner, run_dir: RunDirectory | None, console: Console, prompts: int
) -> list[dict[str, Any]]:
    """Run passes until ``PretrainingEnd`` ends them, and keep the critic of the best one."""
    end, rows = PretrainingEnd(config.critic.value_pretraining), []
    best: dict[str, Any] | None = None
    console.start_progress("passes", end.max_steps)
    while not end.over:
        row = trainer.value_pretraining_step(end.done + 1).row
        if row[PROBE] is None:
            raise TrainingError("the explained variance on the held-out responses is undefined: their returns, as shaped, are all equal")
        end.after(row)
        rows.append(row)
        with fail_together():
            if run_dir is not None:
                run_dir.write_metrics(row)
        console.print(f"{format_step(row, end.max_steps)} | held-out ev {row[PROBE]:.3f}")
        console.advance()
        if best is None or row[PROBE] > best[PROBE]:
            save_best(config, trainer.models, run_dir is not None)
            best = row
        request = trainer.stop_requests.agreed()
        if request is not None:
            raise TrainingError(f"{request.reason}; stopped after pass {row['step']}")
    console.stop_progress()
    until = config.critic.value_pretraining.until
    early = until is not None and end.done < end.max_steps
    rise = f"no rise of {until.min_rise:g} in {until.patience} passes" if until is not None and early else "all done"
    console.print(f"ended after {end.done} passes: {rise}")
    with fail_together():
        if run_dir is not None:
            run_dir.mark_finished(0)
    assert best is not None, "there is at least one pass"
    before, after, folder = rows[0][BEFORE], best[PROBE], critic_folder(config.run.dir)
    console.print(f"critic's explained variance on {prompts} held-out prompts: {before:.3f} before, {after:.3f} after pass {best['step']}")
    if after <= before:
        console.print(f"warning: no pass improved on the critic that it started from, {before:.3f}: see docs/critic.md")
    console.print(
        f"pretrained critic saved: {folder} (use it with critic.init=saved critic.path={folder} critic.value_pretraining.steps=0)"
    )
    return rows


def save_best(config: Config, models: Models, writes: bool) -> None:
    """Write the critic to a temporary folder, then replace the earlier one, so that a complete critic always exists. Collective."""
    critic = models.critic
    assert critic is not None
    folder = critic_folder(config.run.dir)
    new = folder.with_name("hf.new")
    source = model_folder(config.critic.path or config.model.path, "critic")
    if writes:
        shutil.rmtree(new, ignore_errors=True)
    with heartbeat.entering("export"):
        save_hf(Exporter(critic.chunks, critic.architecture, critic.parallel, role="critic"), source, new)
    with fail_together():
        if writes:
            _replace(new, folder)
    dist.barrier()


def _replace(new: Path, folder: Path) -> None:
    old = folder.with_name("hf.old")
    try:
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
