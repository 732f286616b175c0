"""Fixed-horizon rollouts: which responses are open, where they are continued, and what trains, over simulated steps without processes.

The engine of these tests draws one token after another; how likely the end is depends on the tokens so far. A segment's tokens depend only
on what it continues and on its seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.rollout_models import letters
from tests.settings import config_of
from vapo_mcore.checkpoint import state
from vapo_mcore.config import Config
from vapo_mcore.data.prompts import Prompt
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.open_responses import HorizonCounts, OpenResponses
from vapo_mcore.rollout.base import Generation, GenerationRequest, Trajectory
from vapo_mcore.rollout.seeds import sampling_seed
from vapo_mcore.rollout.stopping import StopTexts

LONGEST, END, STEPS = 30, 1, 30
PROBLEMS = {f"set/{n}": Prompt(f"set/{n}", [40 + n, 50, 60 + n], f"{n}?", str(n), "set", "exact", {}) for n in range(7)}
Trained = tuple[str, int, tuple[int, ...], tuple[float, ...], str, tuple[tuple[int, int], ...]]


def configured(horizon: dict[str, Any], estimator: str = "gae", samples: int = 3, **rollout: Any) -> Config:
    return config_of(
        {
            "run": {"dir": "unused", "steps": 1},
            "model": {"path": "unused"},
            "batch": {
                "max_tokens_per_microbatch": 512,
                "prompts_per_step": 4,
                "responses_per_prompt": samples,
                "mini_batch_size": 4,
            },
            "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum", "size": 4}], "max_prompt_length": 16},
            "rollout": {"max_response_length": LONGEST, "horizon": horizon} | rollout,
            "algorithm": {
                "advantage": {"estimator": estimator},
                "policy_loss": {"importance_correction": {"kind": "token_truncate"}},
            },
        }
    )


def generate(request: GenerationRequest) -> Generation:
    """Up to the request's limit: the longer the sequence, the likelier its end; a version of the policy would be in the seed."""
    random = np.random.Generator(np.random.Philox(key=request.seed))
    ids: list[int] = []
    assert request.max_tokens is not None
    while len(ids) < request.max_tokens:
        odds = 0.02 + 0.004 * (len(request.prompt_token_ids) + len(ids))
        ids.append(END if random.random() < odds else int(random.integers(2, 100)))
        if ids[-1] == END:
            return Generation(request, ids, [-0.5 * token for token in ids], "stop")
    return Generation(request, ids, [-0.5 * token for token in ids], "length")


@dataclass
class Run:
    """A run on some replicas, each with its own table; the steps, the prompts drawn, and what trained in each step."""

    config: Config
    replicas: int
    step: int = 0
    drawn: int = 0
    log: list[tuple[list[Trained], HorizonCounts]] = field(default_factory=list)
    loads: list[list[int]] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [OpenResponses(self.config, replica=r, replicas=self.replicas, prompts=PROBLEMS) for r in range(self.replicas)]

    def prompts(self, count: int) -> Iterator[Prompt]:
        from dataclasses import replace

        for number in range(self.drawn, self.drawn + count):
            epoch, place = divmod(number, len(PROBLEMS))
            yield replace(PROBLEMS[f"set/{place}"], prompt_id=f"set/{place}#{epoch}")

    def do(self, steps: int) -> Run:
        for _ in range(steps):
            self.step += 1
            counts = {rank.vacancies for rank in self.ranks}
            assert len(counts) == 1
            fresh = list(self.prompts(counts.pop()))
            tables = [rank.opened(fresh, self.step) for rank in self.ranks]
            assert all(table == tables[0] for table in tables)
            self.moved.append(self.ranks[0].moved_tokens(tables[0]))
            found = [self._sampled(rank, self.leaving(tables[0]), tables[0]) for rank in self.ranks]
            ends = {key: end for _, segments in found for key, end in ends_of(segments).items()}
            assert len(ends) == sum(len(segments) for _, segments in found)  # each response on one replica
            self.loads.append([len(segments) for _, segments in found])
            trained: dict[tuple[int, int], Trained] = {}
            after = []
            for rank, (table, segments) in zip(self.ranks, found, strict=True):
                remaining, ended, counted = rank.settled(table, ends, self.step)
                after.append((remaining, [response.key for response in ended], counted))
                for response in ended:
                    if response.replica == rank.replica:
                        trained[response.key] = as_trained(rank.trajectory(response, segments, self.step))
                rank.commit(remaining, segments, len(fresh))
            assert all(entry == after[0] for entry in after)  # the same on all ranks
            assert sorted(trained) == sorted(after[0][1])
            self.log.append(([trained[key] for key in after[0][1]], after[0][2]))
            self.drawn += len(fresh)
        return self

    def leaving(self, table: Any) -> dict[Any, Any]:
        """What moves between the replicas, and no more."""
        found = {key: tokens for rank in self.ranks for key, tokens in rank.leaving(table).items()}
        assert sum(len(ids) for ids, _ in found.values()) == self.ranks[0].moved_tokens(table)
        return found

    def _sampled(self, rank: OpenResponses, leaving: Mapping[Any, Any], table: Any) -> tuple[Any, Any]:
        rank.arrive(table, leaving)
        requests = rank.requests(table, self.step)
        return table, rank.segments(table, [generate(request) for request in requests])

    def saved(self) -> tuple[Mapping[str, Any], dict[str, bytes]]:
        encoded = state.encode(self.ranks[0].state_dict())
        parts = [state.Part.of(rank.replica, rank.part()) for rank in self.ranks]
        return state.decode(*encoded), {part.file_name: part.data for part in parts}

    def resumed(self, replicas: int) -> Run:
        """A new process with another number of replicas, from what is on disk."""
        saved, files = self.saved()
        other = Run(self.config, replicas, self.step, self.drawn)
        for rank in other.ranks:
            rank.load_state_dict(saved)
            rank.load_parts([state.decode_part(files[state.part_name(replica)]) for replica in rank.parts_needed()])
        return other


def ends_of(segments: Any) -> dict[Any, Any]:
    return {key: segment.end for key, segment in segments.items()}


def as_trained(trajectory: Trajectory) -> Trained:
    request = trajectory.request
    values = (tuple(trajectory.token_ids), tuple(trajectory.logprobs), trajectory.finish_reason, trajectory.segments)
    return (request.prompt_id, request.sample_index, *values)


SMALL = {"tokens": 4, "in_flight": 15}


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_nothing_is_lost_or_asked_twice_and_the_budget_holds(estimator: str) -> None:
    run = Run(configured(SMALL, estimator), replicas=2).do(STEPS)
    trained = [entry for entries, _ in run.log for entry in entries]
    names = [(name, sample) for name, sample, *_ in trained]
    assert len(set(names)) == len(names) > 60
    waiting = [(response.prompt.prompt_id, response.sample_index) for response in run.ranks[0].table]
    expected = [(prompt.prompt_id, sample) for prompt in Run(run.config, 1).prompts(run.drawn) for sample in range(3)]
    assert sorted(names + waiting) == sorted(expected)
    for step, (entries, counts) in enumerate(run.log, 1):
        assert counts.open == counts.finished + counts.cut <= 15
        assert counts.open > 15 - 3  # filled up to less than a prompt's responses
        for *_, ids, logprobs, finish, segments in entries:
            assert len(ids) == len(logprobs) == sum(tokens for tokens, _ in segments) <= LONGEST
            assert list(logprobs) == [-0.5 * token for token in ids]  # none is anyone else's
            assert all(tokens == 4 for tokens, _ in segments[:-1]) and 1 <= segments[-1][0] <= 4
            assert (finish == "stop") == (ids[-1] == END) and END not in ids[:-1]
            ages = [age for _, age in segments]
            assert ages == list(range(ages[0], ages[0] - len(ages), -1)) and ages[-1] >= 0 and ages[0] < step
            assert estimator == "grpo" or ages[-1] == 0  # without groups a response trains in the step in which it ends
    assert any(len(segments) > 3 for *_, segments in trained)
    assert {finish for *_, finish, _ in trained} == {"stop", "length"}


def test_segments_train_when_they_are_sampled() -> None:
    """Those of ended responses come first; over the steps, each token trains once."""
    completed = Run(configured(SMALL), replicas=2).do(STEPS)
    run = Run(configured(SMALL | {"train": "segments"}), replicas=2).do(STEPS)
    seen: dict[tuple[str, int], list[int]] = {}
    for (entries, counts), (ended, _) in zip(run.log, completed.log, strict=True):
        cut = [finish == "cut" for *_, finish, _ in entries]
        assert cut == sorted(cut) and cut.count(True) == counts.cut and len(cut) == counts.open
        assert entries[: len(ended)] == ended  # the same responses, since nothing here depends on what trains
        for name, sample, ids, _, _, segments in entries:
            tokens = seen.setdefault((name, sample), [])
            assert segments[-1][1] == 0 and len(tokens) == len(ids) - segments[-1][0]
            tokens += ids[len(tokens) :]
            assert tokens == list(ids)
    assert sum(map(len, seen.values())) == sum(counts.sampled for _, counts in run.log)


def test_a_group_trains_when_all_of_it_has_ended() -> None:
    run = Run(configured(SMALL, "grpo"), replicas=2).do(STEPS)
    for entries, _ in run.log:
        names = [name for name, *_ in entries]
        assert all(names.count(name) == 3 for name in names)
        assert not entries or 0 in {segments[-1][1] for *_, segments in entries}  # one of each has just ended
    assert any(segments[-1][1] > 0 for entries, _ in run.log for *_, segments in entries)  # others waited
    assert any(counts.waiting for _, counts in run.log)


@pytest.mark.parametrize("replicas", [1, 3, 4])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_steps_do_not_depend_on_the_number_of_replicas(estimator: str, replicas: int) -> None:
    config = configured(SMALL, estimator)
    assert Run(config, replicas).do(STEPS).log == Run(config, 2).do(STEPS).log


@pytest.mark.parametrize("replicas", [1, 2, 5])
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_resumed_run_samples_the_same_with_any_number_of_replicas(estimator: str, replicas: int) -> None:
    whole = Run(configured(SMALL, estimator), replicas=2).do(STEPS)
    first = Run(whole.config, replicas=2).do(11)
    again = first.resumed(replicas)
    if replicas == 2:  # each replica keeps its responses, so that its batches are the same
        assert again.ranks[0].table == first.ranks[0].table
    assert [response.key for response in again.ranks[0].table] == [response.key for response in first.ranks[0].table]
    assert again.do(STEPS - 11).log == whole.log[11:]
    assert [sum(loads) for loads in again.loads] == [sum(loads) for loads in whole.loads[11:]]
    assert max(max(loads) - min(loads) for loads in again.loads) <= 3


def test_the_replicas_have_equally_many_open_responses() -> None:
    run = Run(configured({"tokens": 4, "in_flight": 24}), replicas=3).do(STEPS)
    assert max(max(loads) - min(loads) for loads in run.loads) <= 2


@pytest.mark.parametrize("tokens", [LONGEST, LONGEST + 5])
def test_a_horizon_as_long_as_responses_asks_what_a_run_without_one_asks(tokens: int) -> None:
    run = Run(configured({"tokens": tokens}), replicas=2)
    for step in (1, 2):
        fresh = list(run.prompts(run.ranks[0].vacancies))
        assert len(fresh) == 4
        tables = [rank.opened(fresh, step) for rank in run.ranks]
        asked = [request for rank, table in zip(run.ranks, tables, strict=True) for request in rank.requests(table, step)]
        assert [len(rank.requests(table, step)) for rank, table in zip(run.ranks, tables, strict=True)] == [6, 6]
        expected = [
            GenerationRequest(
                prompt.prompt_id, index, prompt.token_ids, sampling_seed(run.config.seed, step, prompt.prompt_id, index), max_tokens=LONGEST
            )
            for prompt in fresh
            for index in range(3)
        ]
        assert asked == expected
        run.do(1)
        assert len(run.log[-1][0]) == 12 and not run.ranks[0].table
        assert all(segments == ((len(ids), 0),) for *_, ids, _, _, segments in run.log[-1][0])


def test_later_segments_continue_the_tokens_with_seeds_of_their_own() -> None:
    run = Run(configured(SMALL), replicas=1).do(3)
    rank = run.ranks[0]
    table = rank.opened(list(run.prompts(rank.vacancies)), 4)
    open_ones = [response for response in table if response.finish_reason is None]
    for response, request in zip(open_ones, rank.requests(table, 4), strict=True):
        prompt, number = response.prompt, len(response.segments)
        assert request.seed == sampling_seed(run.config.seed, 4, prompt.prompt_id, response.sample_index, number)
        assert list(request.prompt_token_ids[:3]) == prompt.token_ids
        assert len(request.prompt_token_ids) == 3 + response.length == 3 + 4 * number
        assert request.max_tokens == min(4, LONGEST - response.length)
    assert {len(response.segments) for response in open_ones} == {0, 1, 3}


def test_the_last_segment_that_is_allowed_is_not_cut() -> None:
    run = Run(configured(SMALL | {"max_segments": 3}), replicas=2).do(STEPS)
    segments = [segments for entries, _ in run.log for *_, segments in entries]
    assert max(map(len, segments)) == 3
    assert max(tokens for part in segments if len(part) == 3 for tokens, _ in part[2:]) > 4


def test_reprefilled_tokens_are_those_of_the_continued_responses() -> None:
    run = Run(configured(SMALL), replicas=2).do(1)
    assert run.log[0][1].reprefilled == 0
    expected = sum(3 + response.length for response in run.ranks[0].table)
    run.do(1)
    assert run.log[1][1].reprefilled == expected == 7 * run.log[0][1].cut > 0


def test_a_step_that_fails_can_be_undone_before_and_after_its_commit() -> None:
    whole = Run(configured(SMALL, "grpo"), replicas=2).do(12)
    run = Run(whole.config, replicas=2).do(11)
    before = [rank.state_dict() for rank in run.ranks]
    table = run.ranks[0].opened(list(run.prompts(3)), 12)
    leaving = run.leaving(table)
    assert leaving  # some have moved when the step fails
    for rank in run.ranks:  # fails before the commit
        rank.arrive(table, leaving)
        rank.segments(table, [generate(r) for r in rank.requests(table, 12)])
    for rank in run.ranks:
        rank.load_state_dict(before[0])
    log, drawn = list(run.log), run.drawn
    run.do(1)  # fails after it
    for rank in run.ranks:
        rank.load_state_dict(before[0])
        assert rank.state_dict() == before[0]
    run.log, run.drawn, run.step = log, drawn, 11
    assert run.saved()[1].keys() == {"replica_00000.safetensors", "replica_00001.safetensors"}
    assert run.resumed(2).do(1).log == whole.log[11:]
    assert run.do(1).log == whole.log


def test_a_checkpoint_that_lacks_tokens_or_data_that_lacks_a_prompt_are_refused() -> None:
    run = Run(configured(SMALL), replicas=2).do(5)
    saved, files = run.saved()
    fresh = OpenResponses(run.config, replica=0, replicas=1)
    with pytest.raises(CheckpointError, match=r"data\.train lacks \('set/\d#\d'.*--restart-data"):
        fresh.load_state_dict(saved)
    fresh = OpenResponses(run.config, replica=0, replicas=1, prompts=PROBLEMS)
    fresh.load_state_dict(saved)
    assert fresh.parts_needed() == [0, 1]
    with pytest.raises(CheckpointError, match="it has no tokens, or too many or few, of"):
        fresh.load_parts([state.decode_part(files["replica_00001.safetensors"])])
    with pytest.raises(CheckpointError, match="damaged"):
        state.decode_part(files["replica_00001.safetensors"][:50])


def test_a_stop_text_over_a_cut_ends_the_response_where_it_is_complete() -> None:
    tokenizer = letters()
    text = tokenizer.decode([20, 21, 22])
    responses = OpenResponses(configured({"tokens": 4}, samples=1), replica=0, replicas=1, stop_texts=StopTexts(tokenizer, (text,)))
    first, then = [30, 31, 20, 21], [22, 40, 41, 42]
    for step, ids in enumerate((first, then), 1):
        table = responses.opened([PROBLEMS["set/1"]] if step == 1 else [], step)
        (request,) = responses.requests(table, step)
        segments = responses.segments(table, [Generation(request, ids, [-1.0] * 4, "length")])
        remaining, trained, _ = responses.settled(table, ends_of(segments), step)
        assert bool(trained) == (step == 2)
        if trained:
            whole = responses.trajectory(trained[0], segments, step)
            assert (whole.token_ids, whole.finish_reason, whole.segments) == ([*first, 22], "stop", ((4, 1), (1, 0)))
        responses.commit(remaining, segments, 1 if step == 1 else 0)


def test_the_replicas_have_about_equal_work_and_little_moves() -> None:
    """Work: cached tokens that the next segments read at most; without moves the replicas with the older responses would have more."""
    run = Run(configured({"tokens": 2, "in_flight": 48}), replicas=3).do(STEPS)
    for _ in range(20):
        table = run.ranks[0].opened(list(run.prompts(run.ranks[0].vacancies)), run.step + 1)
        work = [[run.ranks[0]._work(response) for response in table if response.replica == replica] for replica in range(3)]
        sums = [sum(part) for part in work]
        assert max(sums) - min(sums) <= max(0.0101 * sum(sums) / 3, 2 * 40)  # or the difference of two neighbours
        run.do(1)
    sampled = sum(counts.sampled for _, counts in run.log)
    assert 0 < sum(run.moved) < sampled


def test_a_step_without_continued_responses_moves_nothing() -> None:
    run = Run(configured({"tokens": LONGEST}), replicas=3).do(6)
    assert run.moved == [0] * 6
