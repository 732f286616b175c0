"""Worker of ranks: models of Megatron's Transformer Engine layers against float64. Prints one JSON line a case, and one of the calls.

    layouts_worker.py WORKDIR [PART OF A NAME]

The comparison is that of ``tests/distributed/layouts/worker.py``: log-probs, entropies, values, losses, every gradient and the gradient
norm against transformers in float64, weights after two updates against a single process. ``TF32=1`` rounds as cuBLAS does for float32.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests import te_reference

te_reference.install(tf32=os.environ.get("TF32") == "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed" / "layouts"))

import problem  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import worker as layouts  # noqa: E402
from cases import BF16, Case  # noqa: E402

from tests import fake_cuda  # noqa: E402
from tests.process_groups import release_groups  # noqa: E402
from vapo_mcore.megatron.parallel import initialize_distributed  # noqa: E402

MODELS = ("qwen2", "qwen2_tied", "qwen3", "llama_tied", "one_kv_head")
CASES: dict[int, list[Case]] = {
    1: [
        *(Case(model, attention="te") for model in MODELS),
        Case("qwen2", attention="te", recompute="full"),
        Case("qwen3", attention="te", recompute="selective"),
        *(Case(model, attention="te", dtype=BF16) for model in ("qwen2", "qwen3")),
        *(Case(model, attention="te") for model in problem.MIXTURES),
        Case(problem.MIXTURE, attention="te", recompute="selective"),
        Case(problem.MIXTURE, attention="te", recompute="full", replay=True),
    ],
    2: [
        *(Case(model, attention="te", **degrees) for model in ("qwen2", "qwen2_tied", "qwen3") for degrees in ({"tp": 2}, {"pp": 2}, {})),
        Case("qwen2", attention="te", tp=2, sequence_parallel=False),
        Case("qwen3", attention="te", tp=2, recompute="full"),
        *(Case("qwen2", attention="te", dtype=BF16, **degrees) for degrees in ({"cp": 2}, {"tp": 2})),
        Case("qwen3", attention="te", dtype=BF16, cp=2),
        Case(problem.MIXTURE, attention="te", ep=2),
        Case(problem.MIXTURE, attention="te", ep=2, replay=True),
        Case(problem.MIXTURE, attention="te", tp=2),
        Case(problem.MIXTURE, attention="te", tp=2, ep=2, etp=1),
        Case(problem.MIXTURE, attention="te", pp=2),
    ],
    4: [Case(problem.MIXTURE, attention="te", tp=2, ep=2), Case(problem.MIXTURE, attention="te", pp=2, ep=2)],
}


def main() -> None:
    torch.set_num_threads(1)
    workdir, only = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    initialize_distributed(5)
    for case in CASES[dist.get_world_size()]:
        if only in case.name:
            layouts.say(case.name, layouts.check(case, layouts.Reference(workdir, case.model), workdir))
            release_groups()
            layouts.BUILT.clear()
    if dist.get_rank() == 0:
        print(json.dumps({"calls": te_reference.CALLS, "faults": fake_cuda.FAULTS}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
