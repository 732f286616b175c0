"""Measure how long replicas of the real vLLM wait for long responses, in training runs with and without ``rollout.horizon``.

    python tools/make_tiny_model.py --output models/tiny
    python benchmarks/horizon_run.py [--model models/tiny] [--steps 12] [--skip 4] [--horizon 120 60] [--mean 120] [--sigma 1.0]

Two data-parallel ranks on the CPU, each with a vLLM replica, run the recipe ``examples/configs/quickstart.yaml`` with 128 responses a
step; with a horizon (``train: segments``) 256 are open. The engine is vLLM, but a response ends where this file says, not at a stop
token: lengths are lognormal with the given mean before the limit of four times the mean, a function of prompt and sample number.

Prints one JSON line per run, means over the steps after the first ``--skip``:

- ``idle_seconds``: share of replica time between the end of a replica's engine call and that of the slowest one, by the clock;
- ``idle_steps``, ``empty_steps``: the metrics ``generate/idle_frac`` and ``generate/empty_frac``, which count engine steps;
- ``tokens``: sampled a step; ``generate_seconds``, ``tokens_per_second``: of the slowest replica's engine calls;
- ``step_seconds``: of the whole step; ``reprefilled``: tokens that are prefilled again, per sampled token.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from vapo_mcore.rollout import vllm_engine
from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig
from vapo_mcore.rollout.vllm_engine import VllmEngine

MEAN, SIGMA, CAP, LOG = "HORIZON_RUN_MEAN", "HORIZON_RUN_SIGMA", "HORIZON_RUN_CAP", "HORIZON_RUN_LOG"
"""Environment variables through which the runs get their lengths and the folder of the engine's times."""
END_OF_PROMPT = ";"


class LognormalEngine(VllmEngine):
    """vLLM whose responses have the lengths of ``target``; writes down the seconds of each call."""

    def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        left = [target(request) - sampled(request) for request in requests]
        limited = [replace(one, max_tokens=min(one.limit(sampling), rest)) for one, rest in zip(requests, left, strict=True)]
        original = vllm_engine._sampling_parameters

        def without_stops(request: GenerationRequest, how: SamplingConfig, *_: Any) -> Any:
            found = original(request, how, [], None)
            found.ignore_eos = True
            return found

        start = time.time()
        with mock.patch.object(vllm_engine, "_sampling_parameters", without_stops):
            found = super()._generate(limited, sampling)
        with (Path(os.environ[LOG]) / f"replica_{self.replica_index}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([start, time.time()]) + "\n")
        ended = zip(requests, found, left, strict=True)
        return [
            replace(one, request=request, finish_reason="stop" if len(one.token_ids) == rest else "length") for request, one, rest in ended
        ]


def target(request: GenerationRequest) -> int:
    """Return the length of a response: lognormal, by prompt and sample number."""
    mean, sigma = float(os.environ[MEAN]), float(os.environ[SIGMA])
    draw = random.Random(f"{request.prompt_id}/{request.sample_index}").gauss(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(int(os.environ[CAP]), round(math.exp(draw))))


def sampled(request: GenerationRequest) -> int:
    """Return the tokens of earlier segments: those after the prompt's last one."""
    return len(request.prompt_token_ids) - 1 - list(request.prompt_token_ids).index(int(os.environ["HORIZON_RUN_END"]))


def measure(arguments: argparse.Namespace, horizon: int | None, folder: Path) -> dict[str, Any]:
    """Run one configuration; return its means."""
    from transformers import AutoTokenizer

    name = f"h{horizon or 0}"
    log = folder / f"{name}_times"
    log.mkdir()
    cap, end = 4 * arguments.mean, AutoTokenizer.from_pretrained(arguments.model).convert_tokens_to_ids(END_OF_PROMPT)
    settings = [
        f"run.dir={folder / name}",
        f"run.steps={arguments.steps}",
        f"model.path={arguments.model}",
        f"data.train.0.path={arguments.model}/train.jsonl",
        "data.eval=[]",
        f"rollout.engine={Path(__file__).resolve()}:LognormalEngine",
        f"rollout.max_response_length={cap}",
        "rollout.verify_weights=false",
        "critic.value_pretraining.steps=0",
        "critic.probe=null",
    ]
    if horizon is not None:
        settings.append(f"rollout.horizon={{tokens: {horizon}, in_flight: 256, train: segments}}")
    given = {MEAN: arguments.mean, SIGMA: arguments.sigma, CAP: cap, LOG: log, "HORIZON_RUN_END": end, "OMP_NUM_THREADS": 1}
    command = [str(Path(sys.executable).with_name("vapo-mcore")), "train", "examples/configs/quickstart.yaml", *settings]
    result = subprocess.run(command, env=os.environ | {key: str(value) for key, value in given.items()}, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(result.stdout[-4000:] + result.stderr[-4000:])
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["stage"] == "rl" and row["step"] > arguments.skip]
    calls = [[json.loads(line) for line in (log / f"replica_{n}.jsonl").read_text().splitlines()][-len(rows) :] for n in (0, 1)]
    seconds = [[end - start for start, end in part] for part in calls]
    slowest = [max(pair) for pair in zip(*seconds, strict=True)]
    tokens = sum(row["sampling/tokens"] for row in rows)
    mean = lambda key: round(sum(row[key] for row in rows) / len(rows), 4)  # noqa: E731
    return {
        "benchmark": "horizon_run",
        "horizon": horizon,
        "steps": len(rows),
        "idle_seconds": round(1 - sum(map(sum, seconds)) / (2 * sum(slowest)), 4),
        "idle_steps": mean("generate/idle_frac"),
        "empty_steps": mean("generate/empty_frac"),
        "tokens": round(tokens / len(rows)),
        "generate_seconds": round(sum(slowest) / len(rows), 3),
        "tokens_per_second": round(tokens / sum(slowest)),
        "step_seconds": mean("time/step"),
        "reprefilled": round(sum(row.get("tokens/reprefilled", 0) for row in rows) / tokens, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4)
    parser.add_argument("--horizon", type=int, nargs="*", default=[120, 60])
    parser.add_argument("--mean", type=int, default=120)
    parser.add_argument("--sigma", type=float, default=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for horizon in (None, *arguments.horizon):
            print(json.dumps(measure(arguments, horizon, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
