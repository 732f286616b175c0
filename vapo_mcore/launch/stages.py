"""Split a run into jobs (doctor, value pretraining, training, evaluation), each a ``vapo-mcore`` command with its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo_mcore.config import Config, load_config
from vapo_mcore.errors import ConfigError
from vapo_mcore.launch import STAGES


@dataclass(frozen=True)
class StageJob:
    """One job: its name and configuration, and the command and options of ``vapo-mcore``."""

    name: str
    config: Config
    command: str
    options: tuple[str, ...]

    def arguments(self, file: Path) -> list[str]:
        """Return the arguments of ``vapo-mcore`` with the configuration stored in ``file``."""
        return [self.command, str(file), *self.options]


def stage_jobs(file: str | Path, overrides: Sequence[str], stages: Iterable[str], *, check_paths: bool = True) -> list[StageJob]:
    """Return the jobs of ``stages`` in execution order. Raises ConfigError for an invalid configuration or stages that it cannot run.

    A separate value-pretraining job is a run without RL steps in ``<run.dir>_value_pretraining``; the training job loads its critic.
    Outputs of earlier jobs do not exist yet, so only the paths of the recipe itself are checked (``check_paths=False``: not even those,
    for use on a machine other than the cluster).
    """
    chosen = [name for name in STAGES if name in set(stages)]
    whole = load_config(file, overrides, check_paths=check_paths)
    if "pretrain" in chosen and not (whole.uses_critic and whole.critic.value_pretraining.max_steps > 0):
        raise ConfigError("stage pretrain: this recipe has no value pretraining (critic.value_pretraining.steps = 0, or no critic)")
    if "eval" in chosen and not whole.data.eval:
        raise ConfigError("stage eval: data.eval is empty, so there is nothing to evaluate on")
    if {"train", "eval"} <= set(chosen) and not whole.export.at_end:
        raise ConfigError("stage eval: export.at_end = false, so the training job leaves no model to evaluate; set export.at_end=true")
    folder = Path(whole.run.dir)
    pretrained = f"{folder}_value_pretraining"  # not inside run.dir, which holds one run
    jobs = []
    for name in chosen:
        changes: list[str] = []
        if name == "pretrain":
            changes = [f"run.dir={pretrained}", "run.steps=0", "eval.at_start=false"]
        elif name == "train" and "pretrain" in chosen:
            critic = Path(pretrained) / "critic_pretrained" / "hf"
            changes = ["critic.init=saved", f"critic.path={critic}", "critic.value_pretraining.steps=0"]
        config = load_config(file, [*overrides, *changes], check_paths=False) if changes else whole
        options: tuple[str, ...] = ("--resume",) if name in ("pretrain", "train") else ()
        if name == "doctor":
            options = ("--accept-warnings",)
        if name == "eval":
            options = ("--checkpoint", str(folder / "export" / "hf"))
        command = "train" if name in ("pretrain", "train") else name
        jobs.append(StageJob(name, config, command, options))
    return jobs
