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

from tests.forks import run_ranks
from tests.integration.horizon_checks import assert_nothing_changes, assert_nothing_is_lost, assert_resumed, assert_turns_are_whole
from tests.integration.plain_torch import assert_one_update, assert_self_imitation
from tests.process_groups import release_groups
from tests.rollout_models import reward_model_class, write_reward_model
from tests.training_setup import (
    CHARACTERS,
    HORIZON,
    assert_same_means,
    exported_weights,
    read_metrics,
    read_samples,
    training_config,
    write_setup,
)
from vapo_mcore.checkpoint.resume import ResumeOptions
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.records.metric_table import METRICS
from vapo_mcore.trainer.main import train

WORKER = Path(__file__).with_name("train_worker.py")
UNREADABLE = "\ufffd"  # what transformers reads the tokens of the letters above ASCII as
HEAD_OF_TWO_LAYERS = ("dense.weight", "dense.bias", "out.weight", "out.bias")
RUNS_WITH_LOGPROBS = [
    "vapo_dp2",
    "vapo_tp2",
    "one_update",
    "all_wrong",
    "dynamic_sampling",
    "dying_graders",
    "critic_free",
    "after_update",
    "multi_turn",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_setup(tmp_path_factory.mktemp("training"))
    write_reward_model(folder / "model", folder / "reward_model")
    result = run_ranks(WORKER, 2, str(folder), timeout=900)
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
    absent = {"kl/reference", "policy/kl_loss", "memory/device_peak_gib", "time/environment", "time/imitation", "time/engine_rebuild"}
    absent |= {"policy/loss_spikes", "critic/loss_spikes", "time/checkpoint", "time/dump", "trackers/failed"}
    absent |= {PROBE, f"{PROBE}_before", "time/probe", "advantages/clipped_frac"}
    absent |= {"policy/covarying_frac", "critic/cross_entropy", "critic/returns_outside_frac"}  # of clip_cov, kl_cov and a categorical head
    absent |= {f"mismatch/{what}_frac" for what in ("rejected_low", "rejected_high", "responses_rejected", "responses_lost")}  # of a mask
    absent |= {metric.name for metric in METRICS if metric.name.startswith(("imitation/", "horizon/", "mismatch/off_policy_"))}
    absent |= {"tokens/reprefilled", *(metric.name for metric in METRICS if metric.name.endswith("_by_cut"))}
    routers = ("experts_", "balance_loss", "router_z_loss")  # of mixtures of experts
    absent |= {metric.name for metric in METRICS if metric.name.rpartition("/")[2].startswith(routers)}
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
    assert all(0 < row["time/generate_mean"] < row["time/generate"] for row in rows[1:])  # no two replicas take equally long
    taken = [row["time/run"] for row in rows]
    assert taken[0] > 0 and all(before < now for before, now in pairwise(taken))
    assert all(row["time/gpu_hours"] == pytest.approx(2 * row["time/run"] / 3600) for row in rows)


def test_samples_and_evaluations_are_written(folder: Path) -> None:
    run = folder / "vapo_dp2"
    samples = read_samples(run, "step_0001")
    assert len(samples) == 3
    for sample in samples:
        assert sample["prompt"].endswith("=")
        assert sample["score"] == float(sum(map(ord, sample["response"])) % 3 == 0) == sample["reward"]
        assert sample["response_length"] - len(sample["response"]) >= (sample["finish_reason"] == "stop")
        tokens = sample["tokens"]
        assert "".join(tokens["text"]).removesuffix("<eos>") == sample["response"] or UNREADABLE in sample["response"]
        assert {len(column) for column in tokens.values()} == {sample["response_length"]}
        assert set(tokens) == {"text", "rollout_logprob", "logprob", "value", "return", "advantage"}
        assert tokens["return"] == [sample["reward"]] * sample["response_length"]
        assert tokens["logprob"] == pytest.approx(tokens["rollout_logprob"], abs=1e-3)
    before = read_samples(run, "value_pretraining_0001")
    assert all(set(sample["tokens"]) == {"text", "rollout_logprob", "value", "return"} for sample in before)
    for step in (0, 2):
        items = read_samples(run, f"eval_step_{step:04d}")
        assert len(items) == 14
        assert not any("tokens" in item for item in items)
        assert len({(item["prompt_id"], item["sample_index"]) for item in items}) == 14
        row = next(row for row in read_metrics(run) if row["stage"] == "rl" and row["step"] == step)
        assert row["eval/heldout/avg@2"] == pytest.approx(sum(item["correct"] for item in items) / 14)
        assert row["eval/heldout/prompts"] == 7


def test_data_and_tensor_parallel_runs_agree(folder: Path) -> None:
    """Up to the first policy updates: after them a rounding may turn a sampled token."""
    own = ("time/", "memory/", "packing/", "generate/", "mismatch/", "tokens/per_second", "policy/approx_kl_first")
    runs = [read_metrics(folder / name) for name in ("vapo_dp2", "vapo_tp2")]
    assert len(runs[0]) == len(runs[1]) == 5
    for one, other in list(zip(*runs, strict=True))[:4]:
        assert one.keys() == other.keys()
        for name in one:
            if isinstance(one[name], float) and not name.startswith(own):
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
            elif isinstance(one[name], list):
                assert_same_means(one[name], other[name], name)
            elif not name.startswith(own):
                assert one[name] == other[name], name


def test_one_update_equals_plain_torch(folder: Path) -> None:
    assert_one_update(folder, rl_rows(folder / "one_update")[0])


def test_trap_10_explained_variance_is_of_the_values_before_the_update(folder: Path) -> None:
    """The head is zero then: nothing is explained. With the values after the update it would be something."""
    row = rl_rows(folder / "one_update")[0]
    assert row["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert row["critic/updates"] == 1


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


def test_value_pretraining_is_a_job_whose_critic_a_later_run_begins_with(folder: Path) -> None:
    """The worker compares the weights bit for bit, on each rank; here, that nothing else was done."""
    job, later = folder / "pretraining_job", folder / "after_job"
    rows = read_metrics(job)
    assert [(row["stage"], row["step"]) for row in rows] == [("rl", 0), ("value_pretraining", 1), ("value_pretraining", 2)]
    assert all(row["policy/updates"] == 0 and "policy/loss" not in row and "time/logprobs" not in row for row in rows[1:])
    assert not (job / "export").exists()
    assert [row["stage"] for row in read_metrics(later)] == ["rl", "rl"]  # the evaluation at the start, and one step
    assert not (later / "critic_pretrained").exists()
    saved, initial = (load_file(path / "model.safetensors") for path in (job / "critic_pretrained" / "hf", folder / "model"))
    trunk = {name for name in saved if not name.startswith("score.")}
    assert trunk == {name for name in initial if name != "lm_head.weight"}
    assert all(torch.equal(saved[name], initial[name]) for name in trunk)  # head only
    assert {name for name in saved if name.startswith("score.")} == {f"score.{part}" for part in HEAD_OF_TWO_LAYERS}


def test_the_critic_begins_as_the_reward_model_that_it_was_loaded_from(folder: Path) -> None:
    """V of each response token is the reward model's score of what comes before it."""
    model = reward_model_class().from_pretrained(folder / "reward_model", dtype=torch.float64)
    for rank in range(2):
        batch = torch.load(folder / f"valued_rank{rank}.pt", weights_only=True)
        for a, b in pairwise(batch["cu_seqlens"].tolist()):
            with torch.no_grad():
                scores = model.score(model.model(batch["tokens"][a:b][None]).last_hidden_state[0])[:, 0]
            mask = batch["response_mask"][a + 1 : b]
            assert mask.any()
            assert torch.allclose(batch["values"][a + 1 : b][mask].double(), scores[:-1][mask], atol=1e-5)
    assert scores.std() > 0.1


def test_values_and_returns_by_position_and_length_are_those_of_all_ranks(folder: Path) -> None:
    """Each token of both data-parallel ranks into its bin, one after another."""
    row = next(row for row in read_metrics(folder / "from_reward_model") if row["stage"] == "value_pretraining")
    found: dict[str, dict[int, list[tuple[float, float]]]] = {"position": {}, "length": {}}
    for rank in range(2):
        batch = torch.load(folder / f"valued_rank{rank}.pt", weights_only=True)
        for a, b in pairwise(batch["cu_seqlens"].tolist()):
            mask = batch["response_mask"][a:b]
            pairs = list(zip(batch["values"][a:b][mask].tolist(), batch["returns"][a:b][mask].tolist(), strict=True))
            for place, pair in enumerate(pairs):
                found["position"].setdefault(math.floor(20 * place / len(pairs)), []).append(pair)
                found["length"].setdefault(math.ceil(16 * len(pairs) / 40) - 1, []).append(pair)  # (2.5 (n - 1), 2.5 n] tokens
    for name, bins in (("position", 20), ("length", 16)):
        pairs_of = [found[name].get(number, []) for number in range(bins)]
        assert row[f"critic/tokens_by_{name}"] == [len(pairs) for pairs in pairs_of]
        for column, what in enumerate(("values", "returns")):
            means = [sum(pair[column] for pair in pairs) / len(pairs) if pairs else None for pairs in pairs_of]
            assert_same_means(row[f"critic/{what}_by_{name}"], means, f"{what}_by_{name}")
    assert sum(row["response/length_histogram"]) == 16 and sum(row["groups/accuracy_histogram"]) == 4


PROBE = "critic/probe_explained_variance"


def test_the_probe_is_the_explained_variance_on_held_out_responses_of_both_ranks(folder: Path) -> None:
    """By hand in float64: each response's reward is the return of all its tokens. Before the first update, after both pretraining steps and
    after the second RL step; the run is the one without a probe, to the last bit."""
    rows, ranks = read_metrics(folder / "probe"), [torch.load(folder / f"probe_rank{rank}.pt", weights_only=True) for rank in range(2)]
    recorded = [row.get(PROBE) for row in rows if row["step"] > 0]
    assert recorded[2] is None and PROBE not in rows[3]  # the first RL step is not measured
    before = [row.get(f"{PROBE}_before") for row in rows]
    assert [value is not None for value in before] == [False, True, False, False, False]
    expected = []
    for measured in zip(*ranks, strict=True):
        pairs = []
        for part in measured:
            for row, (a, b) in enumerate(pairwise(part["cu_seqlens"].tolist())):
                values = part["values"][a:b][part["response_mask"][a:b]].double()
                pairs += [(value, float(part["reward"][row])) for value in values.tolist()]
        values, returns = torch.tensor(pairs, dtype=torch.float64).T
        expected.append(float(1 - (returns - values).var(correction=0) / returns.var(correction=0)))
        assert sum(len(part["prompts"]) for part in measured) == 15 and all(
            p.startswith("heldout/") for part in measured for p in part["prompts"]
        )
    assert [before[1], *recorded[:2], recorded[3]] == pytest.approx(expected, abs=1e-5)
    first, after_one, after_two, at_the_end = ranks[0]
    assert torch.equal(first["tokens"], after_two["tokens"])  # the same responses
    assert not torch.equal(first["values"], after_one["values"]) and not torch.equal(after_one["values"], after_two["values"])
    assert at_the_end["prompts"] and set(first["prompts"]) | set(ranks[1][0]["prompts"]) == set(at_the_end["prompts"]) | set(
        ranks[1][3]["prompts"]
    )
    plain = read_metrics(folder / "vapo_dp2")
    for name in ("reward/mean", "critic/loss", "critic/explained_variance", "policy/loss", "policy/grad_norm"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in plain], name


def test_a_new_head_starts_at_the_mean_return_and_learns_from_there(folder: Path) -> None:
    """All first values are the mean over response tokens; the optimizer goes on from that bias, by at most its rate an update."""
    (row,) = read_metrics(folder / "mean_return")
    mean = row["critic/returns_mean"]
    assert 0.01 < mean < 0.99
    assert [row[f"critic/values_{name}"] for name in ("mean", "min", "max")] == pytest.approx([mean] * 3, abs=1e-6)
    assert row["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    bias = float(load_file(folder / "mean_return" / "critic_pretrained" / "hf" / "model.safetensors")["score.bias"])
    assert 0.0 < abs(bias - mean) < 2.1e-3


def test_self_imitation_equals_plain_torch_in_both_layouts(folder: Path) -> None:
    assert_self_imitation(folder, [rl_rows(folder / name) for name in ("imitation_dp2", "imitation_tp2")])


def test_tool_tokens_are_skipped_by_gae_and_turns_have_rewards(folder: Path) -> None:
    """Each response of a run with an environment, worked out by a plain loop over its sampled tokens."""
    row = rl_rows(folder / "multi_turn")[0]
    samples = {(s["prompt_id"], s["sample_index"]): s for s in read_samples(folder / "multi_turn", "step_0001")}
    assert len(samples) == 16
    turns = tools = turn_rewards = 0
    seen, expected, lengths, summed = [], [], [], []
    for rank in range(2):
        batch = torch.load(folder / f"turns_rank{rank}.pt", weights_only=True)
        for number, (a, b) in enumerate(pairwise(batch["cu_seqlens"].tolist())):
            mask = batch["response_mask"][a:b]
            places = mask.nonzero()[:, 0].tolist()
            prompt, length = int(batch["prompt_length"][number]), len(places)
            assert places[0] == prompt and places[-1] == b - a - 1  # the model's first and last word
            assert length == int(batch["response_length"][number])
            assert b - a == prompt + length + int(batch["tool_length"][number])
            gaps = [place for place in range(prompt, b - a) if place not in places]
            assert len(gaps) == int(batch["tool_length"][number])
            assert not batch["rollout_logprobs"][a:b][~mask].any()
            rewards = dict.fromkeys(places, 0.0)
            for place, reward in batch["step_rewards"][number]:
                rewards[place] += reward
            rewards[places[-1]] += float(batch["reward"][number])
            turns, tools, turn_rewards = (
                turns + int(batch["turns"][number]),
                tools + len(gaps),
                turn_rewards + len(batch["step_rewards"][number]),
            )
            assert batch["rewards"][a:b].tolist() == pytest.approx([rewards.get(place, 0.0) for place in range(b - a)])
            values = batch["values"][a:b].tolist()
            lam = max(0.0, 1 - 1 / (0.2 * length))
            returns = batch["returns"][a:b].tolist()
            end = returns[places[-1]] - rewards[places[-1]]  # the critic's value where the response was cut, else nothing
            advantage, following, total = 0.0, end, end
            for place in reversed(places):
                advantage = rewards[place] + following - values[place] + lam * advantage
                following, total = values[place], rewards[place] + total
                assert returns[place] == pytest.approx(total, abs=1e-5)
                expected.append(advantage)
                seen.append(float(batch["advantages"][a:b][place]))
            assert not batch["advantages"][a:b][~mask].any() and not batch["returns"][a:b][~mask].any()
            lengths.append(length)
            summed.append(end != pytest.approx(0.0, abs=1e-7))
    mean = sum(expected) / len(expected)
    std = math.sqrt(sum((x - mean) ** 2 for x in expected) / len(expected) + 1e-8)
    assert seen == pytest.approx([(x - mean) / std for x in expected], abs=1e-4)
    assert (row["turns/mean"], row["tokens/tool"], row["tokens/response"]) == (turns / 16, tools, sum(lengths))
    assert row["tokens/trained"] == sum(lengths)
    assert turns > 20 and tools > 30 and turn_rewards > 5  # enough of everything
    assert sum(summed) == round(16 * row["response/truncated_frac"])
    cut = 0
    for sample in samples.values():
        if "turns" in sample:
            assert sample["response"] == "\n".join(sample["turns"])
            for turn, (text, shown) in enumerate(zip(sample["turns"], sample["observations"], strict=False)):
                assert shown.startswith(f"|[{turn + 1}:{len(text)}"[:9])
                cut += len(f"[{turn + 1}:{len(text)}]") > 7
            for text, reward in zip(sample["turns"], sample["turn_rewards"], strict=True):
                assert reward in ((-0.5, 0.0) if "Q" in text else (0.25, 0.0)) and (reward != 0.25 or len(text) % 2 == 0)
    assert row["turns/observations_cut"] == cut


def test_an_environment_that_dies_costs_its_responses_their_verdicts(folder: Path) -> None:
    row = rl_rows(folder / "dying_environment")[0]
    assert 0 < row["grading/failed"] < 16
    assert row["tokens/trained"] < row["tokens/response"]
    assert row["turns/mean"] > 1
    assert row["mismatch/logprob_abs_mean"] <= 1e-5


def test_step_rewards_of_a_verifier_reach_the_returns(folder: Path) -> None:
    """From sampled tokens to the critic's targets. The tokenizer has a character a token; its three special tokens write nothing."""
    row = rl_rows(folder / "step_rewards")[0]
    sums, counts = [], []
    for rank in range(2):
        batch = torch.load(folder / f"steps_rank{rank}.pt", weights_only=True)
        for number, (a, b) in enumerate(pairwise(batch["cu_seqlens"].tolist())):
            tokens, prompt = batch["tokens"][a:b].tolist(), int(batch["prompt_length"][number])
            written = [place for place in range(prompt, b - a) if tokens[place] > 2]
            expected = {place: ord(CHARACTERS[tokens[place]] if tokens[place] < 97 else UNREADABLE) / 100 for place in written[3::4]}
            assert dict(batch["step_rewards"][number]) == pytest.approx(expected)
            total = 0.0
            for place in range(b - a - 1, prompt - 1, -1):
                total += expected.get(place, 0.0) + (float(batch["reward"][number]) if place == b - a - 1 else 0.0)
                assert float(batch["returns"][a + place]) == pytest.approx(total, rel=1e-5)
            sums.append(sum(expected.values()))
            counts.append(len(expected))
    assert row["reward/steps_mean"] == pytest.approx(sum(sums) / 16, rel=1e-5)
    assert row["reward/steps_per_response"] == sum(counts) / 16 > 4
    for sample in read_samples(folder / "step_rewards", "step_0001"):
        codes = [ord(character) / 100 for character in sample["response"]]
        assert sample["step_rewards"] == [[end, codes[end - 1]] for end in range(4, len(codes) + 1, 4)]


def test_process_supervision_trains_on_two_data_parallel_ranks(folder: Path) -> None:
    row = rl_rows(folder / "process_supervision")[0]
    assert row["policy/updates"] == 2
    assert row["reward/steps_per_response"] > 1
    assert "critic/loss" not in row
    assert row["advantages/std"] > 0


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


@pytest.mark.parametrize("mode", ["completed", "segments"])
def test_a_horizon_as_long_as_the_responses_changes_nothing_on_two_ranks(folder: Path, mode: str) -> None:
    assert_nothing_changes(folder / f"horizon_long_{mode}", folder / "horizon_none")


@pytest.mark.parametrize("mode", ["completed", "segments"])
def test_a_short_horizon_loses_nothing_on_two_ranks(folder: Path, mode: str) -> None:
    assert_nothing_is_lost(folder / f"horizon_{mode}", mode)
    assert exported_weights(folder / f"horizon_{mode}") != exported_weights(folder / f"horizon_long_{mode}")


@pytest.mark.parametrize("mode", ["completed", "segments"])
def test_open_responses_of_two_ranks_are_continued_after_a_stop(folder: Path, mode: str) -> None:
    stopped = folder / f"horizon_{mode}_stopped"
    assert_resumed(stopped, folder / f"horizon_{mode}")
    parts = sorted(path.name for path in (stopped / "checkpoints" / "step_000002" / "open_responses").iterdir())
    assert parts == ["replica_00000.safetensors", "replica_00001.safetensors"]


def test_turns_of_two_ranks_go_on_after_a_cut_and_after_a_stop(folder: Path) -> None:
    run = folder / "horizon_turns_segments"
    assert_nothing_changes(folder / "horizon_turns_long_segments", folder / "horizon_turns_none")
    assert_nothing_is_lost(run, "segments")
    assert assert_turns_are_whole(run) > 0
    assert_resumed(folder / "horizon_turns_segments_stopped", run)


def test_open_responses_of_two_ranks_are_continued_by_one(folder: Path) -> None:
    """The first step after it samples with the saved weights, so that the same is sampled as by two ranks."""
    whole, alone = folder / "horizon_completed", folder / "horizon_completed_stopped_for_one"
    short = "rollout.horizon={tokens: 7, in_flight: 20, train: completed}"
    config = training_config(folder, alone.name, *HORIZON, short, "parallel.world_size=1", "run.steps=3")
    parallel = initialize_parallel(config.parallel)
    try:
        train(config, parallel, clean=False, resume=ResumeOptions("step_000002"))
    finally:
        release_groups()
        torch.distributed.destroy_process_group()
    found, expected = rl_rows(alone)[2], rl_rows(whole)[2]
    for name in ("open", "finished", "cut", "segments_mean", "staleness_mean"):
        assert found[f"horizon/{name}"] == expected[f"horizon/{name}"]
    one, two = ([(e["prompt_id"], e["sample_index"], e["response"]) for e in read_samples(run, "step_0003")] for run in (alone, whole))
    assert one == two != []
    assert found["policy/loss"] == pytest.approx(expected["policy/loss"], rel=1e-3, abs=1e-4)
