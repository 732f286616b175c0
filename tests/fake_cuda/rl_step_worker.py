"""Synchronisations of whole RL steps, counted on the fake device: ``rl_step_worker.py FOLDER [CASE ...]`` writes FOLDER/syncs.json:
case -> for each packing (few and many micro-batches) the number of micro-batches, and phase -> kind and place -> count.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from tests import fake_cuda

fake_cuda.install()

import torch  # noqa: E402

from tests.training_setup import training_config  # noqa: E402
from vapo_mcore.megatron.engine import MegatronModel  # noqa: E402
from vapo_mcore.megatron.losses import PolicyLoss  # noqa: E402
from vapo_mcore.megatron.parallel import initialize_parallel  # noqa: E402
from vapo_mcore.trainer.main import train  # noqa: E402
from vapo_mcore.trainer.step import StepRunner  # noqa: E402

PACKINGS = {"few": "batch.max_tokens_per_microbatch=384", "many": "batch.max_tokens_per_microbatch=48"}
COMMON = (
    "parallel.world_size=1",
    "model.offload=true",
    "run.steps=1",
    "critic.value_pretraining.steps=0",
    "data.eval=[]",
    "export.at_end=false",
)
CASES: dict[str, tuple[str, ...]] = {
    "vapo": (),
    "penalised": (
        "algorithm.kl={place: reward, kind: k3, coef: 0.1}",
        "algorithm.policy_loss.importance_correction.kind=token_truncate",
        "policy.epochs=2",
    ),
    "planted": (),
}
PHASES = {
    "distribution": ("_distribute",),
    "values": ("_start_at_mean_return", "_values"),
    "log-probs": ("_log_probs",),
    "advantages and critic update": ("_advantages_and_critic",),
    "policy update": ("_update_policy",),
    "samples, imitation": ("_gather_sample_tokens", "_imitate"),
    "metrics": ("_finish",),
}
"""Phase of a step -> methods of ``StepRunner`` that it consists of; generation and weight sync are left out."""


@contextmanager
def counting(found: dict[str, Any]) -> Iterator[None]:
    """Count each phase of a step, and its micro-batches."""
    originals = {name: getattr(StepRunner, name) for names in PHASES.values() for name in names}
    forward = MegatronModel.forward

    def counted(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: StepRunner, *arguments: Any, **named: Any) -> Any:
            with fake_cuda.counted_syncs() as syncs:
                result = method(self, *arguments, **named)
            entry = found.setdefault(str(self.rollouts), {}).setdefault(phase, Counter())
            entry.update({f"{kind} {place}": count for (kind, place), count in syncs.items()})
            return result

        return call

    def watched(self: MegatronModel, microbatches: Any, *arguments: Any, **named: Any) -> Any:
        found["microbatches"] = len(microbatches)
        return forward(self, microbatches, *arguments, **named)

    patches = {name: counted(phase, originals[name]) for phase, names in PHASES.items() for name in names}
    with mock.patch.multiple(StepRunner, **patches), mock.patch.object(MegatronModel, "forward", watched):
        yield


@contextmanager
def item_of_every_microbatch() -> Iterator[None]:
    """A loss that looks at a number of each micro-batch."""
    original = PolicyLoss.__call__

    def loss(self: PolicyLoss, outputs: Any, batch: Any) -> Any:
        total, stats = original(self, outputs, batch)
        assert float(total.detach()) == float(total.detach())
        return total, stats

    with mock.patch.object(PolicyLoss, "__call__", loss):
        yield


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    result: dict[str, Any] = {"faults": [], "cases": {}}
    for name in sys.argv[2:] or CASES:
        for packing in PACKINGS:  # a process for each run: its page-locked memory ends with it
            file = folder / f"{name}_{packing}.json"
            child = os.fork()
            if child == 0:
                file.write_text(json.dumps(run(folder, name, packing)))
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (name, packing)
            found = json.loads(file.read_text())
            result["faults"] += found.pop("faults")
            result["cases"].setdefault(name, {})[packing] = found
    (folder / "syncs.json").write_text(json.dumps(result, indent=1))


def run(folder: Path, name: str, packing: str) -> dict[str, Any]:
    """Train for a step; return what was counted."""
    found: dict[str, Any] = {}
    config = training_config(folder, f"{name}_{packing}", *COMMON, *CASES[name], PACKINGS[packing])
    with counting(found), item_of_every_microbatch() if name == "planted" else nullcontext():
        train(config, initialize_parallel(config.parallel), clean=False)
    phases = {phase: dict(sorted(counts.items())) for phase, counts in found["1"].items()}
    return {"microbatches": found["microbatches"], "phases": phases, "faults": list(fake_cuda.FAULTS)}


if __name__ == "__main__":
    main()
