"""Open responses of fixed-horizon rollouts: which ones there are, which replica continues each, and which ones train.

A response is sampled in segments, one a step, of at most ``rollout.horizon.tokens`` tokens. Every rank has the same table of responses;
the tokens of a response are only on the ranks of the replica that samples it. Everything here is a function of the table, the step and
what the engines sampled; there is no communication. The caller carries tokens between replicas (``leaving``, ``arrive``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_mcore.config.schema import GROUP_ESTIMATORS, Config
from vapo_mcore.data.prompts import Prompt, split_evenly
from vapo_mcore.errors import CheckpointError
from vapo_mcore.experience.balance import balanced
from vapo_mcore.rollout.base import Generation, GenerationRequest, Trajectory, TrajectoryEnd, Turn
from vapo_mcore.rollout.multi_turn import Dialogue, Episode, MultiTurn, sampled_by_model
from vapo_mcore.rollout.seeds import sampling_seed
from vapo_mcore.rollout.stopping import StopTexts

Key = tuple[int, int]
"""Key of a response: number of its prompt, counted over the run in the order of drawing, and sample index."""

Tokens = tuple["array[int]", "array[float]"]
"""Token ids (int64) and log-probs (float32) of a response, environment included; lists would take about 100 bytes per token."""


@dataclass(frozen=True)
class OpenResponse:
    """A response that has not trained yet.

    Attributes:
        prompt_number: number of its prompt, counted over the run in the order of drawing.
        seed: seed of its first segment, which environment and verifier use too.
        replica: the engine replica that samples it and holds its tokens.
        segments: (rollout that sampled it, sampled tokens) of each segment.
        finish_reason: None while it is open.
        dialogue: its turns; None without an environment and before the first segment.
        cut_values: (tokens so far, the critic's value there) at each cut; only with ``train: segments``.
    """

    prompt_number: int
    prompt: Prompt
    sample_index: int
    seed: int
    replica: int
    segments: tuple[tuple[int, int], ...] = ()
    finish_reason: TrajectoryEnd | None = None
    cut_values: tuple[tuple[int, float], ...] = ()
    dialogue: Dialogue | None = None

    @property
    def key(self) -> Key:
        return self.prompt_number, self.sample_index

    @property
    def length(self) -> int:
        """Tokens sampled so far."""
        return sum(tokens for _, tokens in self.segments)

    @property
    def size(self) -> int:
        """Tokens so far, those of the environment included."""
        return self.length + (0 if self.dialogue is None else self.dialogue.observed)

    @property
    def prefilled(self) -> int:
        """Tokens that the engine has read or sampled so far, without the prompt and an observation at the end."""
        return self.size - (0 if self.dialogue is None else self.dialogue.behind_turns)


class End(NamedTuple):
    """Result of a step for one response: number of sampled tokens, and why the response has ended (None: it was cut)."""

    sampled: int
    finish_reason: TrajectoryEnd | None
    dialogue: Dialogue | None = None


@dataclass(frozen=True)
class Segment:
    """Tokens that a step added to a response: sampled ones and, with log-prob 0, those of the environment."""

    token_ids: list[int]
    logprobs: list[float]
    end: End


Ends = Mapping[Key, End]


@dataclass(frozen=True)
class HorizonCounts:
    """Counts of a step: responses that were open, ended, were cut, and those that have ended but wait for their group.

    ``sampled``: tokens sampled; ``reprefilled``: tokens of prompts and earlier segments that were prefilled again; ``cut_values``:
    (row among those that train, tokens before the cut, the critic's value there) of the responses that have ended.
    """

    open: int
    finished: int
    cut: int
    waiting: int
    sampled: int
    reprefilled: int
    cut_values: tuple[tuple[int, int, float], ...] = ()


class OpenResponses:
    """The table of responses, and the tokens of those that this rank's replica samples.

    A step calls ``opened``, ``leaving``, ``arrive``, ``requests`` and ``segments`` (with an environment ``episodes`` and ``played``),
    ``settled`` and, when nothing can fail any more, ``commit``. The state before the step can be restored with ``load_state_dict`` until
    the next ``commit``.
    """

    def __init__(
        self,
        config: Config,
        *,
        replica: int,
        replicas: int,
        stop_texts: StopTexts | None = None,
        prompts: Mapping[str, Prompt] | None = None,
    ) -> None:
        """``prompts``: those of the data by name without epoch, among which a resumed run finds its open prompts."""
        assert config.rollout.horizon is not None
        self.settings = config.rollout.horizon
        self.longest = config.rollout.max_response_length
        self.samples = config.batch.responses_per_prompt
        self.in_flight = self.settings.in_flight or config.batch.responses_per_step
        # A custom estimator may read groups.
        self.by_group = config.algorithm.advantage.estimator in (*GROUP_ESTIMATORS, "custom")
        self.with_turns = config.rollout.environment is not None
        self.run_seed = config.seed
        self.replica, self.replicas = replica, replicas
        self.stop_texts = stop_texts
        self.prompts = {} if prompts is None else prompts
        self.table: tuple[OpenResponse, ...] = ()  # by key
        self.drawn = 0  # prompts, over the run
        self._tokens: dict[Key, Tokens] = {}  # of this replica's responses
        self._before: dict[Key, Tokens] = {}  # before the last commit
        self._saved_at: dict[Key, int] = {}  # of a state just loaded: the replica that saved the tokens

    @property
    def vacancies(self) -> int:
        """Number of prompts whose responses can be opened."""
        return max(0, self.in_flight - self.unfinished) // self.samples

    @property
    def unfinished(self) -> int:
        """Number of responses that have not ended."""
        return sum(response.finish_reason is None for response in self.table)

    def opened(self, prompts: Sequence[Prompt], step: int) -> tuple[OpenResponse, ...]:
        """Return the table of ``step``: all responses to ``prompts`` opened, and the open ones balanced over the replicas.

        New responses are dealt to the replicas that have the fewest, in contiguous parts, so that most responses to a prompt share a
        replica's prefix cache. Then replicas swap responses until they have about equal work. Without continued responses nothing is
        swapped: a step without a horizon does not either.
        """
        fresh = [
            OpenResponse(
                self.drawn + number, prompt, index, sampling_seed(self.run_seed, step, prompt.prompt_id, index), replica=self.replica
            )
            for number, prompt in enumerate(prompts)
            for index in range(self.samples)
        ]
        loads = [0] * self.replicas
        for response in self.table:
            loads[response.replica] += response.finish_reason is None
        shares = [len(part) for part in split_evenly(sum(loads) + len(fresh), self.replicas)]
        places = [replica for replica in range(self.replicas) for _ in range(shares[replica] - loads[replica])]
        return self._balanced((*self.table, *(replace(response, replica=place) for response, place in zip(fresh, places, strict=False))))

    def _balanced(self, table: tuple[OpenResponse, ...]) -> tuple[OpenResponse, ...]:
        open_ones = [number for number, response in enumerate(table) if response.finish_reason is None]
        if self.replicas == 1 or not any(table[number].segments for number in open_ones):
            return table
        places = [table[number].replica for number in open_ones]
        found = dict(zip(open_ones, balanced(places, [self._work(table[number]) for number in open_ones], self.replicas), strict=True))
        return tuple(replace(response, replica=found.get(number, response.replica)) for number, response in enumerate(table))

    def _work(self, response: OpenResponse) -> int:
        """Return twice the cached tokens that the longest possible next segment reads, on which decoding time depends."""
        tokens = self._most_tokens(response)
        return tokens * (2 * (len(response.prompt.token_ids) + response.size) + tokens)

    def _most_tokens(self, response: OpenResponse) -> int:
        """Return the limit of the next segment's sampled tokens."""
        remaining = self.longest - response.length
        last = self.settings.max_segments is not None and len(response.segments) + 1 >= self.settings.max_segments
        return remaining if last else min(self.settings.tokens, remaining)

    def moved_tokens(self, table: Sequence[OpenResponse]) -> int:
        """Return the number of tokens that ``table`` places on another replica than the one that holds them; the same on all ranks."""
        before = {response.key: response.replica for response in self.table}
        return sum(response.size for response in table if before.get(response.key, response.replica) != response.replica)

    def leaving(self, table: Sequence[OpenResponse]) -> dict[Key, Tokens]:
        """Return the tokens that this replica holds and ``table`` places on another one."""
        return {
            response.key: self._tokens[response.key]
            for response in table
            if response.replica != self.replica and response.key in self._tokens
        }

    def arrive(self, table: Sequence[OpenResponse], tokens: Mapping[Key, Tokens]) -> None:
        """Take the tokens that ``table`` places on this replica. Those that leave are kept until the commit, for a step that fails."""
        mine = {response.key for response in table if response.replica == self.replica}
        self._tokens = self._tokens | {key: found for key, found in tokens.items() if key in mine}

    def requests(self, table: Sequence[OpenResponse], step: int) -> list[GenerationRequest]:
        """Return this replica's requests for the next segments of the open responses, by key."""
        return [self._request(response, step) for response in self._mine(table)]

    def _request(self, response: OpenResponse, step: int) -> GenerationRequest:
        prompt = response.prompt
        return GenerationRequest(
            prompt.prompt_id,
            response.sample_index,
            [*prompt.token_ids, *self._tokens[response.key][0]] if response.segments else prompt.token_ids,
            self._seed(response, step),
            max_tokens=self._most_tokens(response),
        )

    def _seed(self, response: OpenResponse, step: int) -> int:
        """Return the seed of the next segment."""
        number = len(response.segments)
        return sampling_seed(self.run_seed, step, response.prompt.prompt_id, response.sample_index, number) if number else response.seed

    def episodes(self, table: Sequence[OpenResponse], step: int, multi_turn: MultiTurn) -> tuple[list[Episode], list[Prompt]]:
        """Return this replica's open responses to be played by ``multi_turn`` up to the horizon, by key, and their prompts."""
        mine = self._mine(table)
        return [self._episode(response, step, multi_turn) for response in mine], [response.prompt for response in mine]

    def _episode(self, response: OpenResponse, step: int, multi_turn: MultiTurn) -> Episode:
        prompt = response.prompt
        request = GenerationRequest(prompt.prompt_id, response.sample_index, prompt.token_ids, response.seed)
        seed, limit = self._seed(response, step), response.length + self._most_tokens(response)
        if response.dialogue is None:
            return Episode(request, seed, limit)
        ids, logprobs = self._tokens[response.key]
        return multi_turn.resumed(request, seed, limit, ids.tolist(), logprobs.tolist(), response.dialogue)

    def _mine(self, table: Sequence[OpenResponse]) -> list[OpenResponse]:
        return [response for response in table if response.replica == self.replica and response.finish_reason is None]

    def segments(self, table: Sequence[OpenResponse], generations: Sequence[Generation]) -> dict[Key, Segment]:
        """Return what this replica sampled; ``generations`` answer ``requests``."""
        return {
            response.key: self._segment(response, generation) for response, generation in zip(self._mine(table), generations, strict=True)
        }

    def _segment(self, response: OpenResponse, generation: Generation) -> Segment:
        ids, logprobs = generation.token_ids, generation.logprobs
        finish: TrajectoryEnd | None = generation.finish_reason
        if response.segments and self.stop_texts is not None:
            # The engine sees only its own tokens; a stop text may have begun before the cut.
            end = self.stop_texts.end_over_cut(self._tokens[response.key][0], ids)
            if end is not None:
                ids, logprobs, finish = ids[:end], logprobs[:end], "stop"
        if finish == "length" and len(ids) == self._most_tokens(response) < self.longest - response.length:
            finish = None
        return Segment(list(ids), list(logprobs), End(len(ids), finish))

    def played(self, table: Sequence[OpenResponse], episodes: Sequence[Episode]) -> dict[Key, Segment]:
        """Return what this replica's ``episodes`` added to its responses."""
        found = {}
        for response, episode in zip(self._mine(table), episodes, strict=True):
            end = End(episode.tokens_sampled - response.length, episode.finish_reason, episode.dialogue())
            found[response.key] = Segment(episode.token_ids[response.size :], episode.logprobs[response.size :], end)
        return found

    def settled(
        self, table: Sequence[OpenResponse], ends: Ends, step: int
    ) -> tuple[tuple[OpenResponse, ...], list[OpenResponse], HorizonCounts]:
        """Return (the table after the step, the responses that train in it, counts).

        ``ends``: of all replicas. Without groups a response trains when it ends, with a group estimator when all of its group have ended.
        With ``train: segments`` those that were cut train too; they come last. Each of the two parts is ordered by key.
        """
        advanced = []
        for response in table:
            if response.finish_reason is None:
                end = ends[response.key]
                segments = (*response.segments, (step, end.sampled))
                response = replace(response, segments=segments, finish_reason=end.finish_reason, dialogue=end.dialogue)
            advanced.append(response)
        unfinished = {response.prompt_number for response in advanced if response.finish_reason is None}
        trained = [
            response
            for response in advanced
            if response.finish_reason is not None and not (self.by_group and response.prompt_number in unfinished)
        ]
        keys = {response.key for response in trained}
        remaining = tuple(response for response in advanced if response.key not in keys)
        sampled = [response for response in table if response.finish_reason is None]
        still_open = [response for response in advanced if response.finish_reason is None]
        cut = len(still_open)
        counts = HorizonCounts(
            open=len(sampled),
            finished=len(sampled) - cut,
            cut=cut,
            waiting=sum(response.finish_reason is not None for response in remaining),
            sampled=sum(ends[response.key].sampled for response in sampled),
            reprefilled=sum(len(response.prompt.token_ids) + response.prefilled for response in sampled if response.segments),
            cut_values=tuple((row, *cut) for row, response in enumerate(trained) for cut in response.cut_values),
        )
        return remaining, trained + (still_open if self.settings.train == "segments" else []), counts

    def trajectory(self, response: OpenResponse, segments: Mapping[Key, Segment], step: int) -> Trajectory:
        """Return a response of this replica with all its tokens; ``segments``: of this step."""
        ids, logprobs = self._joined(response.key, segments)
        request = GenerationRequest(response.prompt.prompt_id, response.sample_index, response.prompt.token_ids, response.seed)
        dialogue = response.dialogue or Dialogue((Turn(0, len(ids)),), 0, False, 0, None)
        return Trajectory(
            request,
            ids.tolist(),
            logprobs.tolist(),
            sampled_by_model(dialogue.turns, len(ids)),
            response.finish_reason or "cut",
            dialogue.turns,
            dialogue.observations_cut,
            dialogue.error,
            segments=tuple((tokens, step - rollout) for rollout, tokens in response.segments),
        )

    def _joined(self, key: Key, segments: Mapping[Key, Segment]) -> Tokens:
        ids, logprobs = self._tokens.get(key, (array("q"), array("f")))
        segment = segments.get(key)
        return (ids, logprobs) if segment is None else (ids + array("q", segment.token_ids), logprobs + array("f", segment.logprobs))

    def commit(self, remaining: Sequence[OpenResponse], segments: Mapping[Key, Segment], drawn: int) -> None:
        """Make the step's result the state. ``drawn``: number of prompts opened in it."""
        self._before = self._tokens
        mine = [response.key for response in remaining if response.replica == self.replica]
        self._tokens = {key: self._joined(key, segments) for key in mine}
        self.table = tuple(remaining)
        self.drawn += drawn

    def keep_cut_values(self, values: Mapping[tuple[str, int], float]) -> None:
        """Keep the critic's values of the states in which the step cut responses, by prompt id and sample index, until these end."""
        table = []
        for response in self.table:
            value = values.get((response.prompt.prompt_id, response.sample_index))
            if value is not None:
                response = replace(response, cut_values=(*response.cut_values, (response.length, value)))
            table.append(response)
        self.table = tuple(table)

    def sampled_tokens(self, table: Sequence[OpenResponse], ends: Ends) -> list[list[int]]:
        """Return for each replica how many tokens the step sampled of its responses, in their order."""
        tokens: list[list[int]] = [[] for _ in range(self.replicas)]
        for response in table:
            if response.finish_reason is None:
                tokens[response.replica].append(ends[response.key].sampled)
        return tokens

    # ------------------------------------------------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the table as plain values, equal on all ranks; the tokens are in ``part``."""
        rows = []
        for response in self.table:
            row = asdict(replace(response, prompt=None, dialogue=None))  # type: ignore[arg-type]
            rows.append(
                row
                | {
                    "prompt": response.prompt.prompt_id,
                    "segments": [list(segment) for segment in response.segments],
                    "cut_values": [list(cut) for cut in response.cut_values],
                    "dialogue": None if response.dialogue is None else response.dialogue.to_json(),
                }
            )
        return {"responses": rows, "drawn": self.drawn, "replicas": self.replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the table. The tokens must still be here, as before the last step, or follow by ``load_parts``.

        With another number of replicas, open responses are dealt evenly. Raises CheckpointError for prompts that the data lacks, and for
        responses that these settings cannot continue.
        """
        missing = sorted({row["prompt"] for row in state["responses"] if self._find(row["prompt"]) is None})
        if missing:
            raise CheckpointError(
                f"the checkpoint has open responses to prompts that data.train lacks ({', '.join(map(repr, missing[:3]))}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}); resume with the run's data, or drop them with "
                "--restart-data"
            )
        table = []
        for row in state["responses"]:
            segments = tuple((int(rollout), int(tokens)) for rollout, tokens in row["segments"])
            # Checkpoints of earlier versions have no values at cuts, and no turns.
            cuts = tuple((int(tokens), float(value)) for tokens, value in row.get("cut_values", ()))
            dialogue = None if row.get("dialogue") is None else Dialogue.from_json(row["dialogue"])
            prompt = self._find(row["prompt"])
            table.append(OpenResponse(**{**row, "prompt": prompt, "segments": segments, "cut_values": cuts, "dialogue": dialogue}))
        self._require_continuable(table)
        self.drawn = state["drawn"]
        self._saved_at = {response.key: response.replica for response in table}
        if state["replicas"] != self.replicas:
            table = _dealt(table, self.replicas)
        self.table = tuple(table)
        kept = self._before | self._tokens
        self._tokens = {
            response.key: (kept[response.key][0][: response.size], kept[response.key][1][: response.size])
            for response in self.table
            if response.replica == self.replica and response.key in kept
        }

    def _require_continuable(self, table: Sequence[OpenResponse]) -> None:
        begun = [response for response in table if response.finish_reason is None and response.segments]
        others = sum((response.dialogue is not None) != self.with_turns for response in begun)
        if others:
            had, have = ("without", "with") if self.with_turns else ("with", "without")
            raise CheckpointError(
                f"the checkpoint has {others} open responses that were sampled {had} rollout.environment, which a run {have} it cannot "
                "continue; resume with the run's rollout.environment, or drop them with --restart-data"
            )
        full = [response.length for response in begun if response.length >= self.longest]
        if full:
            raise CheckpointError(
                f"the checkpoint has {len(full)} open responses of up to {max(full)} tokens, to which rollout.max_response_length = "
                f"{self.longest} leaves none; resume with a limit above {max(full)}, or drop them with --restart-data"
            )

    def _find(self, name: str) -> Prompt | None:
        known = {response.prompt.prompt_id: response.prompt for response in self.table}
        prompt = known.get(name) or self.prompts.get(name.rpartition("#")[0])
        return None if prompt is None else replace(prompt, prompt_id=name)

    def part(self) -> dict[str, Tensor]:
        """Return the tokens of this replica's responses: ``keys`` int64 [n, 2], ``lengths`` int64 [n], ``tokens``, ``logprobs``."""
        keys = sorted(response.key for response in self.table if response.replica == self.replica)
        ids, logprobs = array("q"), array("f")
        for key in keys:
            ids += self._tokens[key][0]
            logprobs += self._tokens[key][1]
        return {
            "keys": torch.tensor(keys, dtype=torch.int64).reshape(len(keys), 2),
            "lengths": torch.tensor([len(self._tokens[key][0]) for key in keys], dtype=torch.int64),
            "tokens": torch.frombuffer(ids, dtype=torch.int64) if ids else torch.empty(0, dtype=torch.int64),
            "logprobs": torch.frombuffer(logprobs, dtype=torch.float32) if logprobs else torch.empty(0),
        }

    def parts_needed(self) -> list[int]:
        """Return the replicas of the saved run that hold tokens of this replica's responses; call it after ``load_state_dict``."""
        return sorted({self._saved_at[response.key] for response in self.table if response.replica == self.replica})

    def load_parts(self, parts: Iterable[Mapping[str, Tensor]]) -> None:
        """Load the tokens that ``parts_needed`` named. Raises CheckpointError if they do not match the table."""
        found: dict[Key, Tokens] = {}
        for part in parts:
            sizes = part["lengths"].tolist()
            columns = zip(part["keys"].tolist(), part["tokens"].split(sizes), part["logprobs"].split(sizes), strict=True)
            found |= {
                (prompt, sample): (array("q", ids.numpy().tobytes()), array("f", logprobs.numpy().tobytes()))
                for (prompt, sample), ids, logprobs in columns
            }
        mine = [response for response in self.table if response.replica == self.replica]
        wrong = [response for response in mine if response.key not in found or len(found[response.key][0]) != response.size]
        if wrong:
            raise CheckpointError(
                f"the checkpoint is damaged: it has no tokens, or too many or few, of {len(wrong)} open responses, such as sample "
                f"{wrong[0].sample_index} of {wrong[0].prompt.prompt_id!r}"
            )
        self._tokens = {response.key: found[response.key] for response in mine}
        self._before = {}


def _dealt(table: Sequence[OpenResponse], replicas: int) -> list[OpenResponse]:
    """Deal the responses to ``replicas`` in contiguous parts: as many open ones to each, and as many of those that wait."""
    placed: dict[Key, int] = {}
    for is_open in (True, False):
        chosen = [response.key for response in table if (response.finish_reason is None) == is_open]
        for replica, part in enumerate(split_evenly(len(chosen), replicas)):
            placed |= {chosen[number]: replica for number in part}
    return [replace(response, replica=placed[response.key]) for response in table]
