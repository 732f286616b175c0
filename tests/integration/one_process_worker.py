"""Runs in one process: one_process_worker.py FOLDER.

The example's four extensions on a tiny model, with two ways of packing; a sampler that never gets new weights, which the diagnosis ends; a
rollout engine that the tests define.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.process_groups import release_groups
from tests.torchrun import ROOT
from tests.training_setup import training_config
from vapo_mcore.config import Config, load_config
from vapo_mcore.errors import RunStopped
from vapo_mcore.launch.local import become_single_process
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.trainer.main import train
from vapo_mcore.weights.export import Exporter

FOLDER = Path(sys.argv[1])
EXAMPLE = ROOT / "examples" / "extensions" / "arithmetic.py"
TERMS = Path(__file__).with_name("sequence_terms.py")
LONG_PROMPT = 11


def with_extensions(name: str, *overrides: str) -> Config:
    """The tiny run with the algorithm and the tasks of examples/configs/extensions.yaml, and two terms more; one update in each epoch."""
    document = yaml.safe_load((FOLDER / "base.yaml").read_text(encoding="utf-8"))
    example = (ROOT / "examples" / "configs" / "extensions.yaml").read_text(encoding="utf-8")
    settings = yaml.safe_load(example.replace(str(EXAMPLE.relative_to(ROOT)), str(EXAMPLE)))
    document["data"] |= settings["data"] | {"max_prompt_length": LONG_PROMPT}
    document["algorithm"] = settings["algorithm"]
    document["algorithm"]["loss_terms"] += [{"name": name, "function": f"{TERMS}:{name}", "coef": 1e-3} for name in ("place", "share")]
    document["run"]["samples_per_step"] = document["batch"]["mini_batch_size"] = 16
    del document["critic"]
    path = FOLDER / "extensions.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return load_config(
        path,
        [f"run.dir={FOLDER / name}", "parallel.world_size=1", "policy.epochs=2", "eval.at_end=false", "eval.max_prompts=8", *overrides],
    )


def stale_sampler() -> None:
    """The rollout engine gets the initial weights in every sync."""
    original, first = Exporter.buckets, []

    def buckets(self: Exporter) -> Iterator[list[tuple[str, Any]]]:
        if not first:
            first.extend([(name, tensor.clone()) for name, tensor in bucket] for bucket in original(self))
        yield from first

    settings = ("run.steps=8", "parallel.world_size=1", "critic.value_pretraining.steps=0", "eval.at_start=false", "export.at_end=false")
    config = training_config(FOLDER, "stale", *settings, "diagnosis.halt_on=[stale_weights]")
    with mock.patch.object(Exporter, "buckets", buckets), pytest.raises(RunStopped, match=r"diagnosis.halt_on: stale_weights") as stopped:
        train(config, initialize_parallel(config.parallel), clean=False)
    assert stopped.value.exit_code == 2


def own_engine() -> None:
    """One step with a rollout engine of the tests."""
    engine = f"rollout.engine={Path(__file__).with_name('uniform_engine.py')}:UniformEngine"
    settings = ("run.steps=1", "parallel.world_size=1", "critic.value_pretraining.steps=0", "eval.at_start=false", "export.at_end=false")
    config = training_config(FOLDER, "own_engine", *settings, engine, "rollout.verify_weights=true", "rollout.vllm.max_num_seqs=8")
    train(config, initialize_parallel(config.parallel), clean=False)


if __name__ == "__main__":
    become_single_process()
    own_engine()
    release_groups()
    stale_sampler()
    for name, cap in (("large_packs", 400), ("small_packs", 56)):
        release_groups()
        config = with_extensions(name, f"batch.max_tokens_per_microbatch={cap}")
        train(config, initialize_parallel(config.parallel), clean=False)
