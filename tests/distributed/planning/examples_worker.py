"""Plans every recipe, and every preset on the quickstart, in one process: one JSON line each, then errors, time and memory."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from vapo_mcore.cli import main
from vapo_mcore.config import load_config
from vapo_mcore.megatron.host import import_megatron

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
TINY, TINY_MIXTURE = (Path(__file__).parent / f"{name}.json" for name in ("tiny", "tiny_mixture"))
TIMED = "qwen2.5_32b_vapo"
"""Planned first, as the command alone does it: nothing has been measured before."""
REFUSED = {
    "cluster": ["qwen2.5_32b_vapo", "--nodes", "3", "--gpus-per-node", "5"],
    "nodes_not_filled": ["qwen2.5_32b_vapo", "parallel.world_size=16", "--gpus-per-node", "12"],
    "rollout_spans_nodes": ["qwen2.5_32b_vapo", "--gpus-per-node", "2", "parallel.world_size=128"],
    "heads": ["qwen2.5_7b_vapo", "--model-config", "smollm2-135m"],
    "unknown_model": ["qwen2.5_7b_vapo", "model.path=models/mystery"],
    "rate": ["qwen2.5_7b_vapo", "--rate", "speed=3", "--rate", "flops=0"],
    "never_fits": ["qwen2.5_0.5b_vapo", "--device", "h200", "--rate", "memory=1e9"],
}


def plan(arguments: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", *arguments])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.process_time() - start}


def run() -> None:
    import_megatron()
    recipes = sorted(CONFIGS.glob("*.yaml"), key=lambda path: (path.stem != TIMED, path.stem))
    for path in recipes:
        model_path = load_config(path, check_paths=False).model.path
        device = ["--device", "cpu"] if model_path.startswith(("models/tiny", "models/smollm2")) else []
        tiny = TINY_MIXTURE if model_path.startswith("models/tiny_mixture") else TINY
        model = ["--model-config", str(tiny)] if model_path.startswith("models/tiny") else []
        print(json.dumps({"name": path.stem, **plan([str(path), "--json", *device, *model])}), flush=True)
    quickstart = CONFIGS / "quickstart.yaml"
    for preset in sorted((CONFIGS / "presets").glob("*.yaml")):
        stacked = Path(sys.argv[1]) / f"{preset.stem}.yaml"
        stacked.write_text(f"extends: [{quickstart}, {preset}]\nbatch: {{prompts_per_step: 128}}\n", encoding="utf-8")
        cache = ["reward.overlong.cache=32"] if "overlong: {cache" in preset.read_text(encoding="utf-8") else []
        answer = plan([str(stacked), "--json", "--device", "cpu", "--model-config", str(TINY), *cache])
        print(json.dumps({"name": f"presets/{preset.stem}", **answer}), flush=True)
    for name, (recipe, *arguments) in REFUSED.items():
        print(json.dumps({"name": f"refused/{name}", **plan([str(CONFIGS / f"{recipe}.yaml"), *arguments])}), flush=True)
    search = plan([str(CONFIGS / "qwen2.5_0.5b_vapo.yaml"), "--search", "--nodes", "1", "--gpus-per-node", "2", "--json"])
    print(json.dumps({"name": "search", **search}), flush=True)
    print(json.dumps({"name": "text", **plan([str(CONFIGS / "qwen2.5_32b_vapo.yaml")])}), flush=True)
    print(json.dumps({"name": "end", "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


if __name__ == "__main__":
    run()
