"""The course of a run: evaluation, value pretraining, RL steps with records after each, export, summary."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from vapo_mcore import heartbeat
from vapo_mcore.config.schema import Config
from vapo_mcore.errors import RunStopped
from vapo_mcore.evaluation.report import console_lines, describe, write_report
from vapo_mcore.trainer.console import Console, format_step
from vapo_mcore.trainer.evaluation import Evaluation, Evaluator, evaluation_settings
from vapo_mcore.trainer.models import refresh_critic
from vapo_mcore.trainer.run_dir import RunDirectory, critic_folder, export_folder
from vapo_mcore.trainer.step import StepOutcome, Trainer
from vapo_mcore.trainer.value_pretraining import PretrainingEnd
from vapo_mcore.weights.export import Exporter, save_hf

FIRST_STEPS, LAST_STEPS = 5, 10
"""Steps whose mean reward the summary compares."""


class Run:
    """Drives a ``Trainer`` from start to end. Runs on all ranks alike; the first one has the run directory and the console."""

    def __init__(
        self, config: Config, trainer: Trainer, evaluator: Evaluator | None, run_dir: RunDirectory | None, console: Console
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.evaluator = evaluator
        self.run_dir = run_dir
        self.console = console
        self.rewards: list[float] = []
        self.evaluations: list[tuple[int, Evaluation]] = []

    def execute(self) -> None:
        """The whole run; raises what ends it early."""
        self.trainer.sync_weights()
        if self.evaluator is not None and self.config.eval.at_start:
            evaluation = self._evaluate(0)
            self._write({"step": 0, "stage": "rl"} | evaluation.metrics)
        if self.trainer.models.critic is not None and self.config.critic.value_pretraining.max_steps > 0:
            self._pretrain_values()
        self._train()
        if self.config.export.at_end:
            self._export()
        self._summarise()

    def _pretrain_values(self) -> None:
        end = PretrainingEnd(self.config.critic.value_pretraining)
        self.console.start_progress("value pretraining", end.max_steps)
        for number in range(1, end.max_steps + 1):
            outcome = self.trainer.value_pretraining_step(number)
            self._record(outcome, end.max_steps)
            self._stop_if_asked(outcome)
            if end.after(outcome.row):
                break
        self.console.stop_progress()
        self.console.print(end.describe())
        self._save_critic()
        refresh_critic(self.config, self.trainer.models)

    def _train(self) -> None:
        steps = self.config.run.steps
        self.console.start_progress("training", steps)
        for number in range(1, steps + 1):
            outcome = self.trainer.rl_step(number)
            if outcome.row.get("reward/mean") is not None:
                self.rewards.append(outcome.row["reward/mean"])
            if self._is_evaluated(number):
                outcome.row |= self._evaluate(number).metrics
            self._record(outcome, steps)
            self._stop_if_asked(outcome)
        self.console.stop_progress()

    def _stop_if_asked(self, outcome: StepOutcome) -> None:
        """The safe point after each step: end the run here if any rank asked for it."""
        request = self.trainer.stop_requests.agreed()
        if request is not None:
            raise RunStopped(f"{request.reason}; stopped after step {outcome.row['step']} ({outcome.row['stage']})", request.exit_code)

    def _is_evaluated(self, step: int) -> bool:
        if self.evaluator is None:
            return False
        every, last = self.config.eval.every_steps, step == self.config.run.steps
        return (last and self.config.eval.at_end) or (every > 0 and step % every == 0)

    def _evaluate(self, step: int) -> Evaluation:
        assert self.evaluator is not None
        with heartbeat.entering("evaluation"):
            evaluation = self.evaluator.run()
        self.evaluations.append((step, evaluation))
        for line in console_lines(evaluation.summaries):
            self.console.print(f"evaluation after step {step}: {line}")
        if self.run_dir is not None:
            self.run_dir.write_samples(f"eval_step_{step:04d}", evaluation.records)
            title, settings = f"Evaluation after step {step}", evaluation_settings(self.config)
            write_report(self.run_dir.evaluations, f"step_{step:04d}", title, settings, evaluation.summaries, evaluation.seconds)
        return evaluation

    def _record(self, outcome: StepOutcome, total: int) -> None:
        row = outcome.row
        self._write(row)
        if self.run_dir is not None and outcome.samples:
            prefix = "step" if row["stage"] == "rl" else "value_pretraining"
            self.run_dir.write_samples(f"{prefix}_{row['step']:04d}", outcome.samples)
        self.console.print(format_step(row, total))
        for sentence in outcome.warnings:
            self.console.print(f"warning: step {row['step']}: {sentence}")
        self.console.advance()

    def _write(self, row: dict[str, Any]) -> None:
        if self.run_dir is not None:
            self.run_dir.write_metrics(row)

    def _save_critic(self) -> None:
        critic = self.trainer.models.critic
        assert critic is not None
        folder = critic_folder(self.config.run.dir)
        source = self.config.model.path if self.config.critic.path is None else self.config.critic.path
        self.trainer.models.residency.enter("values")
        with heartbeat.entering("export"):
            save_hf(Exporter(critic.chunks, critic.architecture, critic.parallel, role="critic"), source, folder)
        self.console.print(f"pretrained critic saved: {folder} (a later run takes it with critic.init=saved critic.path={folder})")

    def _export(self) -> None:
        folder: Path = export_folder(self.config.run.dir)
        self.trainer.sync.put_to_sleep()
        self.trainer.models.residency.enter("sync")
        with heartbeat.entering("export"):
            save_hf(self.trainer.sync.exporter, self.config.model.path, folder)
        self.console.print(f"policy exported: {folder}")

    def _summarise(self) -> None:
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
        for old, new in zip(before.summaries, after.summaries, strict=True):
            label = f"{old.name} avg@{old.samples}"
            later = "" if last_step == first_step else f"; after step {last_step}: {describe(new.average)}"
            self.console.print(f"{label} after step {first_step}: {describe(old.average)}{later}")
