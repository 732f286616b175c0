"""Every configuration of the tree is planned: recipes on the hardware that they name, presets on the quickstart, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.forks import ROOT, run_script

WORKER = Path(__file__).parent / "planning" / "examples_worker.py"
CONFIGS = ROOT / "examples" / "configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
GIB = 2**30


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = run_script(WORKER, str(tmp_path_factory.mktemp("plans")), timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        if "seconds" in line:
            print(f"{line['name']}: {line['seconds']:.2f} s, exit {line['code']}")
    return {line["name"]: line for line in lines}


def _json(plans: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    assert plans[name]["out"], plans[name]["err"]
    return json.loads(plans[name]["out"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_fits_where_it_says(plans: dict[str, dict[str, Any]], recipe: str) -> None:
    answer = _json(plans, recipe)
    assert answer["misfits"] == []
    assert plans[recipe]["code"] == 0
    mixture = any("is a mixture of experts" in note for note in answer["notes"])
    assert mixture == (recipe in ("qwen3_30b_a3b_vapo", "quickstart_mixture"))


def test_every_preset_is_planned_on_the_quickstart(plans: dict[str, dict[str, Any]]) -> None:
    for preset in (CONFIGS / "presets").glob("*.yaml"):
        answer = _json(plans, f"presets/{preset.stem}")
        assert answer["fits"], preset.stem
        assert answer["seconds"]["step"]["policy_update"] > 0


def test_the_papers_recipe(plans: dict[str, dict[str, Any]]) -> None:
    answer = _json(plans, "qwen2.5_32b_vapo")
    assert answer["model"]["policy"]["parameters"] == 32_763_876_352
    assert (answer["cluster"]["nodes"], answer["cluster"]["processes_per_node"], answer["cluster"]["device"]["name"]) == (16, 8, "h100")
    assert (answer["run"]["steps"], answer["run"]["updates"], answer["run"]["pretraining_steps"]) == (312, 4992, 50)
    # 4,992 updates of two models of 32.8 B: at least the operations of their matrix products over all peaks
    tokens = answer["workload"]["tokens"] * 312
    assert answer["run"]["gpu_hours"] > 2 * 6 * 32e9 * tokens / 989e12 / 3600
    stages = answer["pipeline_ranks"][0]["stages"]
    # Who is where: nobody but vLLM while generating, one model with everything in its update
    assert not any("policy" in part or "critic" in part for part in stages["generate"]["parts"])
    assert {"critic weights", "critic gradients", "critic optimizer"} < set(stages["critic_update"]["parts"])
    assert not any("policy" in part for part in stages["critic_update"]["parts"])
    assert {"policy weights", "vLLM weights"} < set(stages["sync"]["parts"])
    elements = 32_763_876_352 / 16
    assert stages["policy_update"]["parts"]["policy weights"] == pytest.approx(2 * elements, rel=0.001)
    assert stages["policy_update"]["parts"]["policy gradients"] == pytest.approx(4 * elements, rel=0.001)
    assert stages["policy_update"]["parts"]["policy optimizer"] == pytest.approx(12 * elements / 8, rel=0.001)
    # 2 (bytes) + 12 / 8 (shard of the optimizer) for each of two models, on the eight ranks of a node
    assert answer["host_bytes_per_node"]["offloaded"] == pytest.approx(8 * 2 * 3.5 * elements, rel=0.001)
    assert answer["kv_cache"]["bytes_per_token"] == 2 * 64 * (8 / answer["layout"]["rollout_tensor"]) * 128 * 2
    assert answer["disk_bytes"]["export"] == 2 * 32_763_876_352


def test_a_recipe_without_critic_has_no_critic_stages(plans: dict[str, dict[str, Any]]) -> None:
    dapo, vapo = _json(plans, "qwen2.5_32b_dapo"), _json(plans, "qwen2.5_32b_vapo")
    assert "critic_update" not in dapo["seconds"]["step"]
    assert list(dapo["model"]) == ["policy"]
    assert dapo["run"]["gpu_hours"] < vapo["run"]["gpu_hours"]


def test_planning_32b_is_quick_and_small(plans: dict[str, dict[str, Any]]) -> None:
    """20 s (of a core, imports aside) and 3 GiB are promised for the command alone; all other plans follow in the process."""
    assert plans["qwen2.5_32b_vapo"]["seconds"] < 20
    assert plans["end"]["rss"] < 3 * GIB


def test_what_cannot_be_planned_is_said(plans: dict[str, dict[str, Any]]) -> None:
    expected = {
        "cluster": "15 processes cannot be split into model replicas of tensor 8 x pipeline 2",
        "nodes_not_filled": "parallel.world_size = 16 does not fill nodes of 12; use a multiple of 12",
        "rollout_spans_nodes": "does not divide the 2 processes of a node, so a replica would span nodes",
        "heads": "parallel.tensor_model_parallel_size: 4 does not divide the model's 9 attention heads; use 1, 3, 9",
        "unknown_model": "'models/mystery' does not exist, and 'mystery' is not a known model; give --model-config",
        "rate": "--rate speed=3: unknown; known are memory, ",
    }
    for name, message in expected.items():
        answer = plans[f"refused/{name}"]
        assert (answer["code"], answer["out"]) == (2, ""), name
        assert message in answer["err"], name
    assert "--rate flops=0: '0' is not a positive number" in plans["refused/rate"]["err"]


def test_what_does_not_fit_is_said_with_what_would_help(plans: dict[str, dict[str, Any]]) -> None:
    answer = plans["refused/never_fits"]
    assert answer["code"] == 2
    pattern = r"does not fit: policy_update: \d+\.\d GiB on a rank of pipeline stage 0, 0\.9 GiB are available \(largest: "
    assert re.search(pattern, answer["out"])
    assert "generate: the KV cache holds 0 tokens, but the longest sequence has 1,536; vLLM would not start" in answer["out"]
    assert "no single change makes it fit; use --search to find layouts" in answer["out"]


def test_search_proposes_layouts_that_fit(plans: dict[str, dict[str, Any]]) -> None:
    layouts = _json(plans, "search")["layouts"]
    assert layouts
    hours = [layout["gpu_hours"] for layout in layouts]
    assert hours == sorted(hours)
    assert all(layout["peak_bytes"] <= 79.6 * GIB and layout["nodes"] == 1 for layout in layouts)
    assert all("parallel.tensor_model_parallel_size=" in layout["settings"] for layout in layouts)


def test_text_has_a_column_a_stage(plans: dict[str, dict[str, Any]]) -> None:
    text = plans["text"]["out"]
    for expected in (
        "critic update",
        "log-probs",
        "weight sync",
        "policy optimizer",
        "everything fits",
        "KV cache of a replica",
        "312 steps",
    ):
        assert expected in text, expected


def test_readme_of_the_examples_says_what_the_plan_says(plans: dict[str, dict[str, Any]]) -> None:
    """Rows: recipe | hardware | GiB of the fullest rank | host GiB a node | seconds a step | GPU-hours."""
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = {}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`configs/"):
            rows[Path(cells[0].strip("`")).stem] = cells[2:]
    assert {recipe for recipe in RECIPES if recipe.startswith("qwen")} <= set(rows) <= set(RECIPES)
    for recipe, cells in rows.items():
        answer = _json(plans, recipe)
        peak = max(stage["total"] for rank in answer["pipeline_ranks"] for stage in rank["stages"].values())
        facts = (
            peak / GIB,
            sum(answer["host_bytes_per_node"].values()) / GIB,
            sum(answer["seconds"]["step"].values()),
            answer["run"]["gpu_hours"],
        )
        for cell, fact in zip(cells, facts, strict=True):
            assert float(cell.replace(",", "")) == pytest.approx(fact, rel=0.02, abs=0.1), (recipe, cells, facts)
