"""Whole runs on two processes with the real Megatron-Core engine, against plain torch, between layouts, and in hard situations.

train_worker.py makes all runs in one launch; the tests read the run directories.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout_models import load_model
from tests.torchrun import run_torchrun
from tests.training_setup import read_metrics, read_samples, write_setup
from vapo_mcore.trainer.metric_table import METRICS

WORKER = Path(__file__).with_name("train_worker.py")
RUNS_WITH_LOGPROBS = ["vapo_dp2", "vapo_tp2", "one_update", "all_wrong", "dynamic_sampling", "dying_graders", "critic_free", "after_update"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("training"))
    result = run_torchrun(WORKER, 2, str(folder), timeout=900)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    written = re.search(r"^CASES: .*?\[$(.*?)^\]$", WORKER.read_text(), re.MULTILINE | re.DOTALL)
    assert written is not None
    assert re.findall(r"^case (\w+) ok", result.stdout, re.MULTILINE) == re.findall(r"\w+", written[1])
    return folder


def rl_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["stage"] == "rl" and row["step"] > 0]


@pytest.mark.parametrize("name", RUNS_WITH_LOGPROBS)
def test_invariants_of_the_first_update_and_of_the_rollout(folder: Path, name: str) -> None:
    rows = rl_rows(folder / name)
    assert rows
    for row in rows:
        assert row["policy/approx_kl_first"] <= 1e-6
        assert row["mismatch/logprob_abs_mean"] <= 1e-5  # the same weights in the engine: after each sync, too
        assert row["mismatch/logprob_abs_max"] <= 1e-4
        assert row["mismatch/kl"] <= 1e-8
        assert row["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
        assert row["mismatch/beyond_cap_frac"] == 0.0


def test_metrics_are_complete_and_pretraining_spends_no_logprob_pass(folder: Path) -> None:
    rows = read_metrics(folder / "vapo_dp2")
    assert [(row["stage"], row["step"]) for row in rows] == [
        ("rl", 0),
        *[("value_pretraining", n) for n in (1, 2)],
        *[("rl", n) for n in (1, 2)],
    ]
    absent = {"kl/reference", "policy/kl_loss", "memory/device_peak_gib"}
    assert all({metric.name for metric in METRICS} - set(row) <= absent for row in rows[3:])
    for row in rows[1:3]:
        assert "time/logprobs" not in row
        assert "policy/loss" not in row
        assert row["policy/updates"] == 0
        assert row["critic/loss"] > 0
    assert [row["critic/updates"] for row in rows[1:]] == [2, 4, 6, 8]
    assert [row["policy/updates"] for row in rows[1:]] == [0, 0, 2, 4]
    assert {"eval/heldout/avg@2", "eval/heldout/ci_low", "time/eval"} <= set(rows[0]) & set(rows[-1])
    assert all(row["warnings"] == 0 for row in rows[1:])


def test_samples_and_evaluations_are_written(folder: Path) -> None:
    run = folder / "vapo_dp2"
    samples = read_samples(run, "step_0001")
    assert len(samples) == 3
    for sample in samples:
        assert sample["prompt"].endswith("=")
        assert sample["score"] == float(sum(map(ord, sample["response"])) % 3 == 0) == sample["reward"]
        assert sample["response_length"] - len(sample["response"]) >= (sample["finish_reason"] == "stop")
    for step in (0, 2):
        items = read_samples(run, f"eval_step_{step:04d}")
        assert len(items) == 14
        assert len({(item["prompt_id"], item["sample_index"]) for item in items}) == 14
        row = next(row for row in read_metrics(run) if row["stage"] == "rl" and row["step"] == step)
        assert row["eval/heldout/avg@2"] == pytest.approx(sum(item["correct"] for item in items) / 14)
        assert row["eval/heldout/prompts"] == 7


def test_data_and_tensor_parallel_runs_agree(folder: Path) -> None:
    """Up to the first policy updates: after them a rounding may turn a sampled token."""
    own = ("time/", "memory/", "packing/", "mismatch/", "tokens/per_second", "policy/approx_kl_first")
    runs = [read_metrics(folder / name) for name in ("vapo_dp2", "vapo_tp2")]
    assert len(runs[0]) == len(runs[1]) == 5
    for one, other in list(zip(*runs, strict=True))[:4]:
        assert one.keys() == other.keys()
        for name in one:
            if isinstance(one[name], float) and not name.startswith(own):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
            elif not name.startswith(own):
                assert one[name] == other[name], name


def test_one_update_equals_plain_torch(folder: Path) -> None:
    """Log-probs, length-adaptive advantages, loss, gradient norm and AdamW's step, worked out with transformers in float64."""
    row = rl_rows(folder / "one_update")[0]
    model = load_model(folder / "model").double().requires_grad_(True)
    model.get_input_embeddings().padding_idx = None  # transformers would keep the gradient from the pad token, which is sampled here
    responses = _responses(folder)
    assert len(responses) == 16
    tokens = sum(len(r["logprobs_seen"]) for r in responses)
    positive_tokens = sum(len(r["logprobs_seen"]) for r in responses if r["verdict"])
    advantages = [_length_adaptive_advantages(len(r["logprobs_seen"]), r["reward"]) for r in responses]
    everything = torch.cat(advantages)
    std = (everything.var(correction=0) + 1e-8).sqrt()
    loss, nll = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for response, advantage in zip(responses, advantages, strict=True):
        start, sequence = response["start"], response["tokens"]
        logits = model(sequence[None]).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, sequence[start:, None])[:, 0]
        whitened = (advantage - everything.mean()) / std
        assert response["logprobs_seen"] == pytest.approx(logprobs.tolist(), abs=1e-5)
        assert response["advantages_seen"] == pytest.approx(whitened.tolist(), abs=1e-5)
        assert response["returns_seen"] == pytest.approx([response["reward"]] * len(advantage))
        loss = loss - ((logprobs - logprobs.detach()).exp() * whitened).sum() / tokens
        nll = nll - logprobs.sum() * response["verdict"] / positive_tokens
    (loss + 0.1 * nll).backward()
    parameters = dict(model.named_parameters())
    norm = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm()
    assert row["policy/surrogate_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert row["policy/nll_loss"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["policy/loss"] == pytest.approx((loss + 0.1 * nll).item(), rel=1e-5)
    assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    _assert_exported_weights(folder, parameters, clip=1.0 / (norm.item() + 1e-6), lr=row["policy/lr"])


def _responses(folder: Path) -> list[dict[str, Any]]:
    """What each rank trained on, a response at a time."""
    found = []
    for rank in range(2):
        batch = torch.load(folder / f"batch_rank{rank}.pt", weights_only=True)
        offsets = batch["cu_seqlens"].tolist()
        for number, (a, b) in enumerate(pairwise(offsets)):
            mask = batch["response_mask"][a:b]
            start = int(mask.nonzero()[0])
            assert bool(mask[start:].all())
            found.append(
                {
                    "tokens": batch["tokens"][a:b],
                    "start": start,
                    "reward": float(batch["reward"][number]),
                    "verdict": bool(batch["verdict"][number]),
                    "logprobs_seen": batch["old_logprobs"][a:b][start:].tolist(),
                    "advantages_seen": batch["advantages"][a:b][start:].tolist(),
                    "returns_seen": batch["returns"][a:b][start:].tolist(),
                }
            )
    return found


def _length_adaptive_advantages(length: int, reward: float) -> torch.Tensor:
    """All values are 0 (zero head), so the only TD error is the reward at the end."""
    lam = max(0.0, 1.0 - 1.0 / (0.05 * length))
    return torch.tensor([reward * lam ** (length - 1 - t) if length - 1 - t else reward for t in range(length)], dtype=torch.float64)


def _assert_exported_weights(folder: Path, parameters: dict[str, Any], *, clip: float, lr: float) -> None:
    """AdamW's first step from zero moments is g / (|g| + eps); where |g| is near eps its rounding shows, so entries are counted."""
    exported = load_file(folder / "one_update" / "export" / "hf" / "model.safetensors")
    assert set(exported) == set(parameters)
    assert lr == 1e-3
    off = total = 0
    for name, parameter in parameters.items():
        gradient = parameter.grad * min(1.0, clip)
        decay = 0.1 if parameter.dim() > 1 else 0.0
        expected = parameter.detach() * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
        off += int(((exported[name].double() - expected).abs() > 1e-2 * lr).sum())
        total += expected.numel()
    assert off <= 1e-4 * total, f"{off} of {total}"


def test_a_batch_without_a_correct_response_is_trained_on(folder: Path) -> None:
    for row in rl_rows(folder / "all_wrong"):
        assert row["accuracy/mean"] == 0.0
        assert row["policy/nll_loss"] == 0.0
        assert row["policy/positive_tokens"] == 0
        assert row["critic/explained_variance"] is None  # constant returns
        assert math.isfinite(row["policy/loss"])
        assert row["policy/updates_skipped"] == 0


def test_all_wrong_data_under_dynamic_sampling_takes_three_rounds_and_changes_nothing(folder: Path) -> None:
    for row in rl_rows(folder / "all_wrong_dynamic"):
        assert (row["sampling/rounds"], row["sampling/prompts_tried"], row["sampling/dropped_all_wrong"]) == (3, 12, 12)
        assert row["response/count"] == 0
        assert row["policy/updates"] == 0
        assert row["warnings"] == 1
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(folder / "all_wrong_dynamic" / "export" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_dynamic_sampling_trains_on_mixed_groups_only(folder: Path) -> None:
    for row in rl_rows(folder / "dynamic_sampling"):
        kept = row["response/count"] / 4
        dropped = sum(row[f"sampling/dropped_{kind}"] for kind in ("all_right", "all_wrong", "ungraded", "surplus"))
        assert kept > 0
        assert row["groups/mixed_frac"] == 1.0
        assert row["sampling/prompts_tried"] == kept + dropped


def test_a_dead_grader_costs_its_responses_and_not_the_run(folder: Path) -> None:
    rows = rl_rows(folder / "dying_graders")
    assert len(rows) == 2
    assert sum(row["grading/failed"] for row in rows) > 0
    for row in rows:
        assert (row["tokens/trained"] < row["tokens/response"]) == (row["grading/failed"] > 0)


def test_a_critic_free_estimator_builds_no_critic(folder: Path) -> None:
    rows = rl_rows(folder / "critic_free")
    assert not any(name.startswith(("critic/", "gae/", "time/values", "time/critic")) for row in rows for name in row)
    assert not (folder / "critic_free" / "critic_pretrained").exists()
    assert rows[0]["kl/reference"] == 0.0
    assert rows[1]["kl/reference"] > 0.0


def test_masked_minibatches_are_skipped_and_counted(folder: Path) -> None:
    row = rl_rows(folder / "overlong_masked")[0]
    masked = row["policy/minibatches_masked"]
    assert 0 < masked < 8
    assert row["policy/updates"] == row["critic/updates"] == 8 - masked
    assert row["tokens/trained"] == row["tokens/response"] - 21 * 16 * row["response/truncated_frac"]


def test_values_after_the_update_with_epochs(folder: Path) -> None:
    rows = rl_rows(folder / "after_update")
    assert [row["policy/updates"] for row in rows] == [4, 8]
    assert [row["critic/updates"] for row in rows] == [12, 16]
    assert all(math.isfinite(row["policy/loss"]) and math.isfinite(row["critic/loss"]) for row in rows)
    assert rows[0]["policy/approx_kl"] > 0


def test_rollout_logprobs_save_the_pass_and_the_mismatch_is_still_measured(folder: Path) -> None:
    for row in rl_rows(folder / "rollout_logprobs"):
        assert 0 < row["mismatch/logprob_abs_mean"] <= 1e-5
        assert row["mismatch/ess"] == pytest.approx(1.0, abs=1e-6)
        assert row["policy/entropy"] > 0
        assert row["time/logprobs"] < row["time/policy_update"] / 10


def test_a_saved_critic_goes_on_where_it_was_and_head_only_leaves_the_trunk(folder: Path) -> None:
    saved = load_file(folder / "vapo_dp2" / "critic_pretrained" / "hf" / "model.safetensors")
    after = load_file(folder / "saved_critic" / "critic_pretrained" / "hf" / "model.safetensors")
    assert saved.keys() == after.keys()
    changed = {name for name in saved if not torch.equal(saved[name], after[name])}
    assert changed == {"score.weight", "score.bias"}
    row = next(row for row in read_metrics(folder / "saved_critic") if row["stage"] == "value_pretraining")
    assert row["critic/lr"] == pytest.approx(1e-2)
    assert rl_rows(folder / "saved_critic")[0]["critic/lr"] < 1e-2
    assert [row["critic/updates"], rl_rows(folder / "saved_critic")[0]["critic/updates"]] == [2, 4]  # over both optimizers
