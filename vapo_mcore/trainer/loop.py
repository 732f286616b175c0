"""Drive a run from step to step: evaluation, value pretraining, RL steps, records and checkpoints after each step, export, summary."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from vapo_mcore import heartbeat
from vapo_mcore.checkpoint.best_export import BestExport, best_folder, install_export, restore_best, staging_folder, step_of
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.checkpoint.state import Part
from vapo_mcore.checkpoint_files import Stage, model_folder
from vapo_mcore.collectives import fail_together
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import EXIT_REQUEUE, CheckpointError, EngineStuck, RecordError, RolloutError, RunStopped, StepAbandoned, StepBroken
from vapo_mcore.evaluation.report import console_lines, describe, write_report
from vapo_mcore.experience.evaluator import Evaluation, Evaluator, evaluation_settings
from vapo_mcore.megatron.host import HAS_CUDA
from vapo_mcore.megatron.roles import refresh_critic
from vapo_mcore.records.console import Console, format_step
from vapo_mcore.records.run_dir import RunDirectory, critic_folder, export_folder
from vapo_mcore.records.timing import RunClock
from vapo_mcore.trainer.step import StepOutcome, StepRunner
from vapo_mcore.trainer.value_pretraining import PROBE, PretrainingEnd
from vapo_mcore.weights.export import Exporter, save_hf

BEFORE = f"{PROBE}_before"
FIRST_STEPS, LAST_STEPS = 5, 10
"""The summary compares the mean reward of the first and of the last steps."""


class TrainingLoop:
    """Drives a ``StepRunner`` from the first step to the last. All ranks run it; only rank 0 has the run directory and prints.

    ``stage`` and ``step`` name the last completed step. ``load_state_dict`` restores them, and all other state, when a run resumes.
    """

    def __init__(
        self,
        config: Config,
        trainer: StepRunner,
        evaluator: Evaluator | None,
        console: Console,
        checkpointer: Checkpointer,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.evaluator = evaluator
        self.run_dir: RunDirectory | None = None
        self.console = console
        self.checkpointer = checkpointer
        self.rewards: list[float] = []
        self.evaluations: list[tuple[int, dict[str, str]]] = []  # step, and one line of the summary for each set
        self.probes: list[tuple[str, float | None]] = []  # when, in words, and explained variance on held-out prompts
        self.best = BestExport(config.export.best)
        self.pretraining = PretrainingEnd(config.critic.value_pretraining)
        self.clock = RunClock(config.parallel.world_size)
        pretrains = trainer.models.critic is not None and config.critic.value_pretraining.max_steps > 0
        self.stage: Stage = "value_pretraining" if pretrains else "rl"
        self.step = 0
        self.resumed = False
        self.unevaluated: dict[str, Any] | None = None  # row of the last step if its evaluation failed; a resumed run repeats it
        self.unwritten: dict[str, Any] | None = None  # row of the last step if writing metrics.jsonl failed; a resumed run writes it
        self.record_fault: str | None = None  # on rank 0: the first failure to write a record
        self._before_step: dict[str, Any] = {}
        self._steps_done = 0  # since this process started
        trainer.state.register("run", self)

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "step": self.step,
            "rewards": self.rewards,
            "evaluations": [[step, results] for step, results in self.evaluations],
            "probes": [list(entry) for entry in self.probes],
            "pretraining": self.pretraining.state_dict(),
            "unevaluated": self.unevaluated,
            "unwritten": self.unwritten,
            "clock": self.clock.state_dict(),
            "best": self.best.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stage, self.step, self.rewards = state["stage"], state["step"], state["rewards"]
        self.evaluations = [(step, results) for step, results in state["evaluations"]]
        # Checkpoints of early 0.1 versions lack the keys read with a default below.
        self.probes = [(when, value) for when, value in state.get("probes", [])]
        self.pretraining.load_state_dict(state["pretraining"])
        self.unevaluated = state.get("unevaluated")
        self.unwritten = state.get("unwritten")
        if "clock" in state:
            self.clock.load_state_dict(state["clock"])
        if "best" in state:
            self.best.load_state_dict(state["best"])
        self.resumed = True

    def execute(self, run_dir: RunDirectory | None) -> None:
        """Run all steps, or the remaining steps of a resumed run. Raises RunStopped or another VapoError if the run ends early.

        ``run_dir``: on rank 0, opened after loading the state of a resumed run, because opening deletes newer records.
        """
        self.run_dir = run_dir
        try:
            self._execute()
        except EngineStuck as stuck:
            # A requeue only where it continues from a newer checkpoint, so that a permanent failure ends the run.
            raise EngineStuck(str(stuck), EXIT_REQUEUE if self.checkpointer.has_saved else 2) from stuck

    def _execute(self) -> None:
        with fail_together():
            self._restore_best_export()
        self.trainer.sync.run()
        if self.evaluator is not None and self.config.eval.at_start and not self.resumed:
            metrics = self._evaluate(0)
            self._write({"step": 0, "stage": "rl"} | metrics)
            self.best.start(metrics)
            with fail_together():  # nothing to save yet: no step has trained
                if self.record_fault is not None:
                    raise RecordError(self.record_fault)
        if self.unevaluated is not None:
            self._repeat_evaluation(self.unevaluated)
        elif self.unwritten is not None:
            self._retry_write(self.unwritten)
        if self.stage == "value_pretraining":
            self._pretrain_values()
        if self.config.run.steps > 0:
            self._train()
        self.checkpointer.wait()
        if self.config.run.steps > 0 and self.config.export.at_end:
            self._export()
        with fail_together():
            if self.run_dir is not None:
                self.run_dir.mark_finished(self.config.run.steps)
        self._summarise()

    def _restore_best_export(self) -> None:
        """On rank 0, complete an interrupted replacement of the best export, and report an export newer than the resumed state."""
        if self.run_dir is None:
            return
        best = best_folder(self.config.run.dir)
        if restored := restore_best(self.config.run.dir):
            self.console.print(f"note: renamed {restored} to {best}: the run was killed while it replaced the export")
        exported = step_of(best) if self.resumed else None
        if exported is not None and (self.stage != "rl" or exported > self.step):
            self.console.print(f"note: {best} holds the policy of step {exported}, exported before this resume")

    def _pretrain_values(self) -> None:
        end = self.pretraining
        row: dict[str, Any] = {}
        self.console.start_progress("value pretraining", end.max_steps)
        while not end.over:
            outcome = self._do("value_pretraining", self.step + 1)
            row = outcome.row
            end.after(row)
            self._note_probe(row)
            self._complete(outcome, end.max_steps)
        self.console.stop_progress()
        self.console.print(end.describe())
        if self.config.run.steps == 0 and self.config.checkpoint.at_end:
            self._save_now(row, final=True)  # no-op if the last step saved already; thresholds may end pretraining early
        if self.trainer.imitation is not None:
            self.trainer.imitation.end_of_pretraining()
        self._save_critic()
        if self.config.run.steps > 0:
            refresh_critic(self.config, self.trainer.models)
        self.stage, self.step = "rl", 0

    def _train(self) -> None:
        steps = self.config.run.steps
        self.console.start_progress("training", steps)
        for number in range(self.step + 1, steps + 1):
            outcome = self._do("rl", number)
            if outcome.row.get("reward/mean") is not None:
                self.rewards.append(outcome.row["reward/mean"])
            if self._is_evaluated(number):
                self._evaluate_step(outcome.row)
            self._note_probe(outcome.row)
            self._complete(outcome, steps)
        self.console.stop_progress()

    def _do(self, stage: Stage, number: int) -> StepOutcome:
        """Run one step. On StepAbandoned, checkpoint the previous step; on StepBroken, finish the checkpoint being written."""
        self._before_step = self.trainer.state.state_dict()
        try:
            return self.trainer.rl_step(number) if stage == "rl" else self.trainer.value_pretraining_step(number)
        except StepAbandoned as lost:
            if number > 1 or (stage == "rl" and self.pretraining.done):
                self.trainer.state.load_state_dict(self._before_step)
                self._save_now({})
            raise StepAbandoned(str(lost), self._exit_code(lost)) from lost
        except StepBroken:
            self.checkpointer.wait()
            raise

    def _exit_code(self, lost: StepAbandoned) -> int:
        """Return the exit code. Request a requeue only if this process completed a step, so that a permanent failure ends the run."""
        return 2 if lost.exit_code == EXIT_REQUEUE and not self._steps_done else lost.exit_code

    def _complete(self, outcome: StepOutcome, total: int) -> None:
        """Record the step, write the checkpoint if one is due, publish written checkpoints, and stop if any rank requested it."""
        self.step = outcome.row["step"]
        self._steps_done += 1
        self._record(outcome, total)
        self._commit(outcome.row)
        self.checkpointer.poll()
        self._stop_if_asked(outcome.row)

    def _stop_if_asked(self, row: dict[str, Any]) -> None:
        request = self.trainer.stop_requests.agreed()
        if request is None:
            return
        self._save_now(row)
        message = f"{request.reason}; stopped after step {row['step']} ({row['stage']})"
        self.console.stop_progress()
        self.console.print(f"{message}; exit code {request.exit_code}, continue with --resume")
        raise RunStopped(message, request.exit_code)

    # ----------------------------------------------------------------------------------------------------------- checkpoints

    def _commit(self, row: dict[str, Any]) -> None:
        """Start writing the snapshot, if one was taken. Raises RecordError on all ranks if the metric rows cannot be written."""
        if not self.checkpointer.has_begun:
            return
        state = None
        with fail_together():
            if self.run_dir is not None:
                written_again = self.unevaluated is not None and self.unwritten is None
                files = self.run_dir.position(without_last_row=written_again)
                state = {"objects": self.trainer.state.state_dict(), "files": files, "run_id": self.run_dir.run_id}
        self.checkpointer.commit(state, row, self._open_part())

    def _open_part(self) -> Part | None:
        """Return the tokens of this replica's open responses, on its leader."""
        responses, engine = self.trainer.open_responses, self.trainer.sampler.engine
        return Part.of(engine.replica_index, responses.part()) if responses is not None and engine.is_replica_leader else None

    def _save_now(self, row: dict[str, Any], *, final: bool = False) -> None:
        """Publish a checkpoint of the current state; retries once. May free the rollout engine, so nothing can be sampled afterwards."""
        here = (self.stage, self.step)
        for _ in range(2):
            if self.checkpointer.under_way != here and self.checkpointer.published != here:
                self._free_device()
                self.checkpointer.begin(self.stage, self.step, final=final)
                self._commit(row)
            self.checkpointer.wait()
            if self.checkpointer.published == here:
                return
        self.console.print("warning: this step has no checkpoint; --resume continues from the one before")

    def _free_device(self) -> None:
        """Free the rollout engine's memory for offloaded models, which return to the device to be saved."""
        if self.trainer.models.residency.enabled:
            try:
                self.trainer.sync.release()
            except RolloutError as error:
                self.console.print(f"warning: cannot put the rollout engine to sleep: {error}")

    # ---------------------------------------------------------------------------------------------------- records, results

    def _is_evaluated(self, step: int) -> bool:
        if self.evaluator is None:
            return False
        every, last = self.config.eval.every_steps, step == self.config.run.steps
        return (last and self.config.eval.at_end) or (every > 0 and step % every == 0)

    def _evaluate_step(self, row: dict[str, Any]) -> None:
        """Evaluate after a step and add the metrics to its ``row``.

        If the evaluation fails, the step is still recorded and saved, the run stops, and a resumed run first repeats the evaluation.
        """
        self.unevaluated = None
        try:
            row |= self._evaluate(row["step"])
            if self.record_fault is not None:
                self.unevaluated = row
            self._export_if_best(row["step"], row)
        except StepAbandoned as lost:
            self.unevaluated = row
            reason = f"the evaluation after step {row['step']} failed: {lost}"
            self.trainer.stop_requests.request(reason, exit_code=self._exit_code(lost))

    def _repeat_evaluation(self, row: dict[str, Any]) -> None:
        """Repeat the evaluation at which the run stopped, then write its step's row, which metrics.jsonl does not contain yet."""
        self.unevaluated = self.unwritten = None
        if self.evaluator is not None:
            self._evaluate_step(row)
        self._write(row)
        self._stop_if_asked(row)

    def _retry_write(self, row: dict[str, Any]) -> None:
        """Write the row that could not be written before the run stopped."""
        self.unwritten = None
        self._write(row)
        self._stop_if_asked(row)

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate, print and write the results, and return the metrics for the step's row."""
        assert self.evaluator is not None
        with heartbeat.entering("evaluation"):
            evaluation: Evaluation = self.evaluator.run(self.trainer.sampler)
        results = {f"{summary.name} avg@{summary.samples}": describe(summary.average) for summary in evaluation.summaries}
        self.evaluations.append((step, results))
        cost = self.clock.metrics()
        spent = f"run time {cost['time/run'] / 3600:.2f} h, {cost['time/gpu_hours']:.2f} {'GPU' if HAS_CUDA else 'process'}-hours"
        for line in console_lines(evaluation.summaries):
            self.console.print(f"evaluation after step {step}: {line}; {spent}")
        if self.run_dir is not None:
            try:
                self.run_dir.write_samples(f"eval_step_{step:04d}", evaluation.records)
                title, settings = f"Evaluation after step {step}", evaluation_settings(self.config)
                write_report(
                    self.run_dir.evaluations,
                    f"step_{step:04d}",
                    title,
                    settings,
                    evaluation.summaries,
                    evaluation.seconds,
                    processes=self.config.parallel.world_size,
                )
            except RecordError as error:
                self._stop_for(error)
                self.evaluations.pop()  # a resumed run repeats this evaluation
        return evaluation.metrics

    def _record(self, outcome: StepOutcome, total: int) -> None:
        row = outcome.row
        self._write(row)
        if self.run_dir is not None and outcome.samples:
            prefix = "step" if row["stage"] == "rl" else "value_pretraining"
            try:
                self.run_dir.write_samples(f"{prefix}_{row['step']:04d}", outcome.samples)
            except RecordError as error:
                self._stop_for(error)
        self.console.print(format_step(row, total))
        for sentence in outcome.warnings:
            self.console.print(f"warning: step {row['step']}: {sentence}")
        self.console.advance()

    def _write(self, row: dict[str, Any]) -> None:
        row |= self.clock.metrics()
        if self.run_dir is not None:
            try:
                self.run_dir.write_metrics(row)
            except RecordError as error:
                self.unwritten = row
                self._stop_for(error)

    def _stop_for(self, error: RecordError) -> None:
        """On rank 0, request a stop after this step because a record could not be written; the checkpoint is best-effort."""
        self.record_fault = self.record_fault or str(error)
        self.trainer.stop_requests.request(self.record_fault, exit_code=error.exit_code)

    def _save_critic(self) -> None:
        critic = self.trainer.models.critic
        assert critic is not None
        folder = critic_folder(self.config.run.dir)
        source = model_folder(self.config.critic.path or self.config.model.path, "critic")
        self.trainer.models.residency.enter("values")
        if self.run_dir is not None:
            shutil.rmtree(folder.parent, ignore_errors=True)  # left by this run before it resumed
        with heartbeat.entering("export"):
            save_hf(Exporter(critic.chunks, critic.architecture, critic.parallel, role="critic"), source, folder)
        self.console.print(f"pretrained critic saved: {folder} (reuse it with critic.init=saved critic.path={folder})")

    def _export(self) -> None:
        folder: Path = export_folder(self.config.run.dir)
        self.trainer.sync.put_to_sleep()
        self.trainer.models.residency.enter("sync")
        with heartbeat.entering("export"):
            save_hf(self.trainer.sync.exporter, self.config.model.path, folder)
        self.console.print(f"policy exported: {folder}")

    def _export_if_best(self, step: int, row: dict[str, Any]) -> None:
        """Export the evaluated policy if its score is the best so far. If the export fails, warn and continue."""
        score = self.best.improved(step, row)
        if score is None:
            return
        assert self.best.settings is not None
        run_dir, metric = self.config.run.dir, self.best.settings.metric
        folder = staging_folder(run_dir, step) if self.run_dir is not None else best_folder(run_dir)
        self.trainer.sync.put_to_sleep()
        self.trainer.models.residency.enter("sync")
        try:
            with heartbeat.entering("export"):
                save_hf(self.trainer.sync.exporter, self.config.model.path, folder)
            with fail_together():
                if self.run_dir is not None:
                    install_export(folder, run_dir, {"metric": metric, "score": score, "step": step, "run_id": self.run_dir.run_id})
            self.best.exported(step, score)
            self.console.print(f"best policy so far: {metric} = {score:.4g} after step {step}, exported to {best_folder(run_dir)}")
        except CheckpointError as error:
            self.console.print(f"warning: cannot export the best policy so far ({metric} = {score:.4g} after step {step}): {error}")
        self.trainer.sync.run()  # wake the engine again

    def _note_probe(self, row: dict[str, Any]) -> None:
        """Keep the probe's values for the summary: before and after value pretraining, and at the last measured RL step."""
        if row["stage"] == "value_pretraining":
            if not self.probes and BEFORE in row:
                self.probes.append(("before value pretraining", row[BEFORE]))
            if PROBE in row:
                self.probes = [*self.probes[:1], ("after it", row[PROBE])]
        elif PROBE in row:
            earlier = [entry for entry in self.probes if not entry[0].startswith("after step")]
            self.probes = [*earlier, (f"after step {row['step']}", row[PROBE])]

    def _summarise(self) -> None:
        """Print open responses, the probe's explained variance, the change in mean reward, and the first and last evaluation."""
        if self.trainer.open_responses is not None and (count := self.trainer.open_responses.unfinished):
            self.console.print(f"open responses: {count} have not ended; a resume with a larger run.steps continues them")
        if self.probes:
            assert self.config.critic.probe is not None
            values = ", ".join(f"{'undefined' if value is None else format(value, '.3f')} {when}" for when, value in self.probes)
            self.console.print(f"critic's explained variance on {self.config.critic.probe.prompts} held-out prompts: {values}")
        if self.rewards:
            first, last = self.rewards[:FIRST_STEPS], self.rewards[-LAST_STEPS:]
            change = fmean(last) - fmean(first)
            self.console.print(
                f"mean reward: {fmean(first):.3f} in the first {len(first)} steps, "
                f"{fmean(last):.3f} in the last {len(last)} ({change:+.3f})"
            )
        if not self.evaluations:
            return
        (first_step, before), (last_step, after) = self.evaluations[0], self.evaluations[-1]
        for label, result in before.items():
            # A resume may have changed the evaluation sets or their number of samples: then nothing is comparable.
            later = f"; after step {last_step}: {after[label]}" if last_step != first_step and label in after else ""
            self.console.print(f"{label} after step {first_step}: {result}{later}")
