"""Scored responses from disk: JSONL and dumps, what is refused, and how prompts are held out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training_setup import CHARACTERS, training_config, write_setup
from vapo_mcore import cli
from vapo_mcore.commands.pretrain_critic import settings_of_passes
from vapo_mcore.commands.pretrain_options import PretrainOptions
from vapo_mcore.errors import DataError
from vapo_mcore.experience.collecting import SamplingCounts
from vapo_mcore.experience.scored_responses import ScoredReader, ScoredResponses, require_disjoint, require_spread, split
from vapo_mcore.experience.step_dump import StepDump, save_step

ROW: dict[str, Any] = {"prompt": "1+2=", "response": "ab3", "score": 1.0}
IDS = {character: number for number, character in enumerate(CHARACTERS)}


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_setup(tmp_path_factory.mktemp("scored"))


@pytest.fixture
def read(setup: Path, tmp_path: Path) -> Callable[..., ScoredResponses]:
    def reader(*rows: dict[str, Any], settings: tuple[str, ...] = (), name: str = "scored.jsonl") -> ScoredResponses:
        write(tmp_path / name, *rows)
        config = training_config(setup, "run", *settings)
        return ScoredReader(config, len(CHARACTERS)).read([str(tmp_path / name)])

    return reader


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_text_becomes_tokens_with_the_token_that_ends_a_finished_response(read: Callable[..., ScoredResponses]) -> None:
    cut = {**ROW, "response": "x", "score": 0.25, "finish_reason": "length", "step_rewards": [[1, 0.5]]}
    failed = {**ROW, "score": None, "error": "time-out"}
    data = read(ROW, cut, failed, {**ROW, "prompt": "5=", "response_ids": [IDS["a"], IDS["b"], IDS["3"]]})
    rows, tokens = data.batch.rows, data.batch["tokens"].split(data.batch.lengths.tolist())
    assert tokens[0].tolist() == [IDS[c] for c in "1+2=ab3"] + [IDS["<eos>"]]
    assert tokens[1].tolist() == [IDS[c] for c in "1+2=x"], "a truncated response has no end"
    assert tokens[3].tolist() == [IDS[c] for c in "5=ab3"], "given ids are taken as they are"
    assert rows.prompt_length.tolist() == [4, 4, 4, 2] and rows.response_length.tolist() == [4, 1, 4, 3]
    assert rows.truncated.tolist() == [False, True, False, False]
    assert rows.graded.tolist() == [True, True, False, True] and rows.verdict.tolist() == [True, False, False, True]
    assert rows.score.tolist() == [1.0, 0.25, 0.0, 1.0] and rows.step_rewards[1] == ((4, 0.5),)
    assert rows.group.tolist() == [0, 0, 0, 1] and data.prompts == 2
    mask = data.batch["response_mask"].split(data.batch.lengths.tolist())
    assert [part.nonzero().flatten().tolist() for part in mask] == [[4, 5, 6, 7], [4], [4, 5, 6, 7], [2, 3, 4]]


def test_a_scale_moves_the_range_of_scores(read: Callable[..., ScoredResponses]) -> None:
    scaled = ("reward.scale={source: [-2.0, 2.0], target: [-1.0, 1.0]}",)
    assert read({**ROW, "score": -1.5}, settings=scaled).batch.rows.score.tolist() == [-1.5]
    with pytest.raises(DataError, match=r"2\.5 is not in \[-2, 2\], the range of scores"):
        read({**ROW, "score": 2.5}, settings=scaled)


REFUSED = {
    "no text": ({"response": None}, "field 'response': is null; a scored response needs its text"),
    "empty": ({"response": ""}, "field 'response': is empty; a scored response needs its text"),
    "score": ({"score": 1.5}, r"field 'score': 1.5 is not in \[0, 1\], the range of scores"),
    "negative": ({"score": -0.1}, r"field 'score': -0.1 is not in \[0, 1\]"),
    "nan": ({"score": float("nan")}, r"field 'score': nan is not in \[0, 1\]"),
    "verdict": ({"score": True}, "field 'score': must be a number, is a boolean: True"),
    "none": ({"score": None}, "field 'score': must be a number, is missing"),
    "correct": ({"correct": 1}, "field 'correct': must be true or false, is a number: 1"),
    "steps": ({"step_rewards": [[4, 1.0]]}, "field 'step_rewards': must be a list of"),
    "reason": ({"finish_reason": "abort"}, "field 'finish_reason': must be 'stop' or 'length', is text: 'abort'"),
    "turns": ({"observations": ["+"]}, "was written in turns, whose tokens the text does not give; use the run's dumps"),
    "characters": ({"response": "a\u4e00b"}, "field 'response': .*where the text is 'a\u4e00b': made with another tokenizer"),
    "ids": ({"response_ids": [IDS["b"], IDS["a"], IDS["3"]]}, "field 'response_ids': .*reads 'ba3' where the text is 'ab3'"),
    "vocabulary": ({"prompt_ids": [5, 500]}, "field 'prompt_ids': 500 is not an id of the tokenizer of model.path"),
    "no ids": ({"response_ids": "ab3"}, "field 'response_ids': must be a list of token ids, is text: 'ab3'"),
    "long": ({"response": "a" * 60}, "have 65 tokens, more than data.max_prompt_length .* = 48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_faulty_row_is_named(read: Callable[..., ScoredResponses], case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(DataError, match=rf"1 fault in the data: .*scored.jsonl: 1 \(2 rows read\)\n.*row 2(: |, ).*{message}"):
        read(ROW, {**ROW, **change})


def test_all_faults_are_reported_at_once(read: Callable[..., ScoredResponses], setup: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 faults in the data") as caught:
        read({"response": "", "score": 7}, ROW)
    for field in ("'prompt': is missing", "'response': is empty", "'score': 7"):
        assert field in str(caught.value)
    (tmp_path / "bad.jsonl").write_text("{\n[]\n")
    with pytest.raises(DataError, match=r"row 1: is not JSON.*\n.*row 2: must be an object, is a list"):
        reader(setup).read([str(tmp_path / "bad.jsonl")])
    with pytest.raises(DataError, match=r"no responses in .*empty.jsonl"):
        reader(setup).read([write(tmp_path / "empty.jsonl")])
    with pytest.raises(DataError, match="is neither a JSONL file, nor the dump of a step, nor a run directory with dumps"):
        reader(setup).read([str(tmp_path)])


def reader(setup: Path, *settings: str) -> ScoredReader:
    return ScoredReader(training_config(setup, "run", *settings), len(CHARACTERS))


def dumped(setup: Path, run: Path, *rows: dict[str, Any]) -> Path:
    """Write the rows as the dump of step 3 of a run with the model of ``setup``."""
    sampled = reader(setup).read([write(run.parent / "rows.jsonl", *rows)]).round(0, 1)
    run.mkdir()
    (run / "config.yaml").write_text(f"model: {{path: {setup / 'model'}}}\n")
    assert save_step(run, StepDump("rl", 3, 5, sampled, SamplingCounts(rounds=1, prompts_tried=1)), 0) is None
    return run


def test_a_dump_gives_the_same_tokens_as_its_text(setup: Path, tmp_path: Path) -> None:
    rows = (ROW, {**ROW, "prompt": "7=", "response": "x", "score": 0.0, "finish_reason": "length"})
    run = dumped(setup, tmp_path / "run", *rows)
    for path in (run, run / "dumps" / "step_000003"):
        both = reader(setup).read([write(tmp_path / "rows.jsonl", *rows), str(path)])
        assert len(both) == 4 and both.keys[:2] == both.keys[2:] and both.prompts == 2
        tokens = [part.tolist() for part in both.batch["tokens"].split(both.batch.lengths.tolist())]
        assert tokens[:2] == tokens[2:]
        assert both.batch.rows.score.tolist() == [1.0, 0.0, 1.0, 0.0] and both.batch.row_ids.tolist() == [0, 1, 2, 3]


def test_a_tokenizer_that_is_gone_is_a_note(setup: Path, tmp_path: Path) -> None:
    run = dumped(setup, tmp_path / "run", ROW)
    for settings, reason in (("model: {path: gone}\n", "no tokenizer in gone"), ("[]\n", "config.yaml has no readable model.path")):
        (run / "config.yaml").write_text(settings)
        read = reader(setup)
        assert len(read.read([str(run)])) == 1
        assert len(read.notes) == 1 and reason in read.notes[0] and "not checked" in read.notes[0]


def test_a_dump_of_another_tokenizer_or_with_other_scores_is_refused(setup: Path, tmp_path: Path) -> None:
    run = dumped(setup, tmp_path / "run", ROW)
    with pytest.raises(DataError, match=r"step_000003, row 1, field 'score': 1 is not in \[2, 3\]"):
        reader(setup, "reward.scale={source: [2.0, 3.0], target: [0.0, 1.0]}").read([str(run)])
    other = tmp_path / "other"
    shutil.copytree(setup / "model", other)
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    words = vocabulary["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    (run / "config.yaml").write_text(f"model: {{path: {other}}}\n")
    with pytest.raises(DataError, match=r"its run used another tokenizer, that of .*other, than model.path = .*"):
        reader(setup).read([str(run)])


def responses(read: Callable[..., ScoredResponses], prompts: int) -> ScoredResponses:
    return read(*({**ROW, "prompt": f"{number // 3}=", "score": float(number % 2)} for number in range(3 * prompts)))


def test_prompts_are_held_out_whole_and_the_same_ones_for_a_seed(read: Callable[..., ScoredResponses]) -> None:
    data = responses(read, 10)
    training, held_out = split(data, 0.2, seed=1)
    assert (training.prompts, held_out.prompts, len(training), len(held_out)) == (8, 2, 24, 6)
    assert not set(training.keys) & set(held_out.keys)
    require_disjoint(training, held_out)
    assert split(data, 0.2, seed=1)[1].keys == held_out.keys != split(data, 0.2, seed=2)[1].keys
    assert held_out.batch.rows.group.tolist() == [0, 0, 0, 1, 1, 1] and held_out.batch.row_ids.tolist() == list(range(6))
    assert split(data, 0.001, seed=1)[1].prompts == 1 and split(data, 0.999, seed=1)[0].prompts == 1
    with pytest.raises(DataError, match="all 3 responses answer one prompt, so no prompt can be held out; give --held-out FILE"):
        split(responses(read, 1), 0.1, seed=1)


def test_held_out_prompts_that_are_training_prompts_are_refused(read: Callable[..., ScoredResponses]) -> None:
    data = responses(read, 4)
    other = read({**ROW, "prompt": "A="}, {**ROW, "prompt": "2="}, {**ROW, "prompt": "a="}, name="held.jsonl")
    with pytest.raises(DataError, match=r"--held-out: 1 of its 2 prompts are training prompts \(held.jsonl/2\): "):
        require_disjoint(data, other)
    require_disjoint(data, read({**ROW, "prompt": "A="}))


def test_the_passes_train_whole_responses_whatever_the_recipes_horizon(setup: Path) -> None:
    config = training_config(setup, "horizon", "rollout.horizon.tokens=4", "rollout.horizon.train=segments")
    assert config.rollout.horizon is not None
    passes = settings_of_passes(config, PretrainOptions(data=("unused",), passes=3))
    assert passes.rollout.horizon is None and passes.critic.value_pretraining.max_steps == 3


def test_equal_scores_teach_nothing(read: Callable[..., ScoredResponses]) -> None:
    def check(data: ScoredResponses) -> None:
        require_spread(data, "--data", data.batch.rows.graded & ~data.batch.rows.truncated)

    check(responses(read, 2))
    check(read(ROW, {**ROW, "step_rewards": [[1, 0.5]]}))
    with pytest.raises(DataError, match="--data: all 2 scores are 1; a critic learns from responses of different scores"):
        check(read(ROW, ROW, {**ROW, "score": 0.0, "finish_reason": "length"}))
    with pytest.raises(DataError, match="--data: none of the 1 responses has a score and carries a loss"):
        check(read({**ROW, "error": "x"}))


def test_each_rank_holds_its_share(read: Callable[..., ScoredResponses]) -> None:
    data = responses(read, 3)
    parts = [data.round(rank, 2) for rank in range(2)]
    assert [part.local.row_ids.tolist() for part in parts] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    assert all(torch.equal(part.holder, torch.arange(9) % 2) and len(part.rows) == 9 for part in parts)


OPTIONS = {
    "passes": (("--passes", "0"), "--passes 0: use at least 1"),
    "patience": (("--patience", "0"), "--patience 0: use at least 1"),
    "rise": (("--min-rise", "-1"), "--min-rise -1: use 0 or more"),
    "share": (("--held-out-fraction", "1"), "--held-out-fraction 1: use a share between 0 and 1"),
    "both": (("--held-out-fraction", "0.2", "--held-out", "{data}"), "use only one of them"),
    "missing": (("--held-out", "nothing.jsonl"), "--held-out nothing.jsonl: does not exist"),
    "critic": (("algorithm.advantage.estimator=grpo",), "estimator = 'grpo' builds no critic; use a recipe with 'gae'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_the_command_refuses_before_a_model_loads(setup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    options, message = OPTIONS[case]
    data = write(tmp_path / "data.jsonl", {**ROW, "score": 2})
    given = ["--data", data, "--output", str(tmp_path / "out"), *(option.format(data=data) for option in options)]
    assert cli.main(["pretrain-critic", str(setup / "base.yaml"), *given]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error, re.DOTALL) and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_the_command_refuses_faulty_rows(setup: Path, tmp_path: Path) -> None:
    """In a process of its own: reading needs the process group, which the command leaves behind."""
    data = write(tmp_path / "data.jsonl", {**ROW, "score": 2})
    given = ["--data", data, "--output", str(tmp_path / "out"), "parallel.world_size=1"]
    command = [sys.executable, "-m", "vapo_mcore", "pretrain-critic", str(setup / "base.yaml"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"1 fault in the data.*field 'score': 2 is not in", done.stderr, re.DOTALL)
    assert not (tmp_path / "out").exists()
