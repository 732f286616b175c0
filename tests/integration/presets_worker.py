"""Every preset for two steps on a tiny model, in one process: presets_worker.py FOLDER [NAME ...]."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import yaml

from tests.process_groups import release_groups
from tests.training_setup import read_metrics
from vapo_mcore.config import Config, load_config
from vapo_mcore.launch.local import become_single_process
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train

FOLDER = Path(sys.argv[1])
PRESETS = sorted((Path(__file__).parents[2] / "examples" / "configs" / "presets").glob("*.yaml"))
CHOSEN = [path for path in PRESETS if len(sys.argv) == 2 or path.stem in sys.argv[2:]]


def scaled_down(preset: Path) -> Config:
    """The preset on the tiny model: sizes are ours, the algorithm is the preset's; 16 responses a step in groups of its kind."""
    document = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    full = load_config(preset, _settings(preset, document), check_paths=False)
    group = 1 if full.batch.responses_per_prompt == 1 else 4
    overrides = [
        *_settings(preset, document),
        f"batch.prompts_per_step={16 // group}",
        f"batch.responses_per_prompt={group}",
        "batch.mini_batch_size=8",
    ]
    if full.uses_critic and full.critic.value_pretraining.max_steps > 0:
        overrides.append("critic.value_pretraining.steps=1")
    return load_config(preset, overrides)


def _settings(preset: Path, document: dict) -> list[str]:
    overlong = yaml.safe_load(preset.read_text(encoding="utf-8")).get("reward", {}).get("overlong")
    return [
        f"run={{dir: {FOLDER / preset.stem}, steps: 2, tensorboard: false}}",
        f"model={{path: {FOLDER / 'model'}, dtype: float32}}",
        "batch.max_tokens_per_microbatch=96",
        f"data={json.dumps(document['data'])}",
        "rollout.engine=transformers",
        "rollout.max_response_length=40",
        *(["reward.overlong.cache=10"] if overlong else []),
    ]


def check(config: Config) -> None:
    last = read_metrics(Path(config.run.dir))[-1]
    assert last["step"] == 2
    assert last["policy/updates"] > 0
    assert last["warnings"] == 0, last
    assert ("critic/loss" in last) == config.uses_critic
    assert all(math.isfinite(last[name]) for name in ("policy/loss", "policy/grad_norm", "policy/approx_kl"))


if __name__ == "__main__":
    become_single_process()
    for preset in CHOSEN:
        config = scaled_down(preset)
        train(config, initialize_parallel(config.parallel), clean=False)
        check(config)
        release_groups()
        print(f"preset {preset.stem} ok", flush=True)
