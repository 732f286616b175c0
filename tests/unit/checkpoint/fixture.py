"""A small checkpoint as the package writes it now, kept in tests/cases/checkpoint so that later versions have something old to load:

    python -m tests.unit.checkpoint.fixture tests/cases/checkpoint

writes a new one, for a new format version only, into a folder of its own: the old ones stay and must go on loading.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.checkpoint.conftest import LAYOUT, build, contents, update
from tests.unit.config_helpers import load, write_base, write_model
from vapo_mcore.checkpoint.saver import Checkpointer
from vapo_mcore.checkpoint_files import list_checkpoints
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.megatron.offload import Residency
from vapo_mcore.megatron.parallel import ParallelContext, initialize_parallel
from vapo_mcore.megatron.roles import Models
from vapo_mcore.weights.checksums import tensor_checksum

SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}
STATE = {
    "objects": {"trainer": {"rollouts": 5, "critic_updates": 2}, "replay": {"tokens": torch.arange(3)}},
    "files": {},
    "run_id": "fixture",
}


def make_models(folder: Path, parallel: ParallelContext, *, seed: int, offload: bool = False) -> Models:
    """A policy in bfloat16 and a critic in float32, as a run holds them."""
    model = write_model(folder / "model", **SHAPE)
    policy = build("policy", model, parallel, seed=seed, dtype="bfloat16")
    critic = build("critic", model, parallel, seed=seed + 1)
    residency = Residency(enabled=offload)
    for trained in (policy, critic):
        residency.add(trained)
    return Models(read_architecture(model), policy, critic, None, residency)


def fingerprints(models: Models) -> dict[str, str]:
    """A checksum of every tensor of both models and optimizers."""
    assert models.critic is not None
    found = {"policy": contents(models.policy), "critic": contents(models.critic)}
    return {f"{role}.{name}": tensor_checksum(tensor) for role, tensors in found.items() for name, tensor in tensors.items()}


def save(run: Path, parallel: ParallelContext) -> tuple[Path, dict[str, str]]:
    """Two checkpoints of made-up steps, in both forms of optimizer state."""
    models = make_models(run, parallel, seed=1)
    assert models.critic is not None
    update(models.policy, 3, seed=3)
    update(models.critic, 2, seed=4)
    write_base(run)
    write_model(run / "model", **SHAPE)
    config = load(run, f"run.dir={run}", "checkpoint={asynchronous: false, reshardable_every: 2}")
    saver = Checkpointer(config, parallel, models, print)
    for step in (6, 7):
        saver.begin("rl", step)
        saver.commit(STATE, {"reward/mean": 0.25, "step": step, "stage": "rl"})
    saver.close()
    assert [path.name for path in list_checkpoints(run)] == ["step_000006", "step_000007"]
    return run / "checkpoints", fingerprints(models)


def main() -> None:
    import shutil
    import tempfile

    layout: Any = SimpleNamespace(**LAYOUT)
    parallel = initialize_parallel(layout)
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        written, expected = save(Path(folder), parallel)
        shutil.copytree(written, target / "checkpoints")
    (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
