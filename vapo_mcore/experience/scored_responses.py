"""Read scored responses from disk, for training a critic without sampling: rollout dumps of runs, and JSONL files.

A dump has the sampled tokens. A JSONL row has ``prompt``, ``response`` and ``score``, as in the samples files of a run, and is tokenized
with the tokenizer of ``model.path``; ``docs/critic.md`` lists the other fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vapo_mcore.checkpoint_files import Stage
from vapo_mcore.config.schema import Config
from vapo_mcore.data.chat_template import chat_tokenizer, end_of_turn
from vapo_mcore.data.faults import Faults, kind_of, unicode_fault
from vapo_mcore.data.prompts import Prompt, prompt_key
from vapo_mcore.data.rollout_batch import RolloutBatch
from vapo_mcore.data.tokenizer import load_tokenizer, unknown_token_ids
from vapo_mcore.errors import DataError, VapoError
from vapo_mcore.experience.responses import Response, response_rows, step_rewards
from vapo_mcore.experience.sampling import Round
from vapo_mcore.experience.step_dump import load_step
from vapo_mcore.records.dumps import STEP_INFO, dumps_folder
from vapo_mcore.rewards.types import StepReward, Verdict
from vapo_mcore.rollout.base import GenerationRequest, Trajectory, TrajectoryEnd, Turn
from vapo_mcore.rollout.stopping import stop_ids

_SHOWN = 5


@dataclass(frozen=True)
class ScoredResponses:
    """Responses with their tokens, all on this process. ``batch.rows.reward`` is the raw score; ``keys``: ``prompt_key`` of each row."""

    batch: RolloutBatch
    keys: list[bytes]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def prompts(self) -> int:
        """Number of distinct prompts."""
        return len(set(self.keys))

    def select(self, index: Tensor) -> ScoredResponses:
        """Return the responses at ``index`` (int64), renumbered; prompts are grouped again."""
        keys = [self.keys[number] for number in index.tolist()]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        chosen = self.batch.select(index)
        rows = replace(chosen.rows, group=torch.tensor([numbers[key] for key in keys], dtype=torch.int64))
        return ScoredResponses(RolloutBatch(rows, chosen.cu_seqlens, chosen.tensors), keys)

    def round(self, rank: int, world_size: int) -> Round:
        """Return them as a sampled round in which rank r holds every ``world_size``-th response from the r-th."""
        holder = torch.arange(len(self)) % world_size
        return Round(self.batch.rows, holder, self.batch.select((holder == rank).nonzero().flatten()), {})


class ScoredReader:
    """Reads files with the tokenizer and the limits of a configuration. ``notes``: what could not be checked, for the user."""

    def __init__(self, config: Config, vocab_size: int) -> None:
        self.config = config
        self.tokenizer = chat_tokenizer(config.model.path, config.data)
        self.vocab_size = vocab_size
        self.known = torch.ones(vocab_size, dtype=torch.bool)
        self.known[list(unknown_token_ids(self.tokenizer, vocab_size))] = False
        self.notes: list[str] = []
        self.low, self.high = (0.0, 1.0) if config.reward.scale is None else config.reward.scale.source

    def read(self, paths: Sequence[str]) -> ScoredResponses:
        """Read JSONL files, dumps of single steps, and all dumps of run directories. Raises DataError with all faults of all files."""
        faults, parts = Faults(), []
        for path in paths:
            try:
                parts += list(self._read(Path(path), faults))
            except VapoError as error:
                faults.add(str(path), None, None, str(error))
        faults.raise_if_any()
        keys = [key for part in parts for key in self._keys(part)]
        if not keys:
            raise DataError(f"no responses in {', '.join(map(str, paths))}")
        merged = RolloutBatch.concat(list(_renumbered(parts)))
        return ScoredResponses(merged, keys).select(torch.arange(len(keys)))

    def _read(self, path: Path, faults: Faults) -> Iterator[RolloutBatch]:
        if path.is_file():
            yield self._read_lines(path, faults)
            return
        if not path.exists():
            raise DataError("does not exist")
        dumps = [path] if (path / STEP_INFO).is_file() else sorted(file.parent for file in dumps_folder(path).glob(f"[!.]*/{STEP_INFO}"))
        if not dumps:
            raise DataError(
                "is neither a JSONL file, nor the dump of a step, nor a run directory with dumps; run.dump_every_steps makes a run "
                "write them"
            )
        self._require_tokenizer(dumps[0].parent.parent)
        for dump in dumps:
            yield self._read_dump(dump, faults)

    def _read_dump(self, dump: Path, faults: Faults) -> RolloutBatch:
        stage, _, step = dump.name.rpartition("_")
        kind: Stage = "rl" if stage == "step" else "value_pretraining"
        batch = load_step(dump.parent.parent, kind, int(step), rank=0, world_size=1, known=self.known).sampled.local
        batch = batch.select(batch.local_rows(torch.arange(len(batch))))  # in the order of the rows, whichever rank held them
        batch = batch.select((~batch.rows.cut).nonzero().flatten())
        faults.rows[str(dump)] = len(batch)
        lengths = batch.lengths.tolist()
        for number, (score, graded, length) in enumerate(
            zip(batch.rows.score.tolist(), batch.rows.graded.tolist(), lengths, strict=True), 1
        ):
            if graded and (reason := self._score_fault(score)) is not None:
                faults.add(str(dump), number, "score", reason)
            if (reason := self._length_fault(length)) is not None:
                faults.add(str(dump), number, None, reason)
        return batch

    def _require_tokenizer(self, run: Path) -> None:
        """Raise DataError if the run of a dump had another vocabulary. Its model folder may be gone; token ids are checked in any case."""
        folder = _model_path(run)
        try:
            theirs = None if folder is None else load_tokenizer(folder)
        except VapoError:
            theirs = None
        if theirs is None:
            where = "config.yaml has no readable model.path" if folder is None else f"no tokenizer in {folder}"
            self.notes.append(f"{run}: {where}: not checked that its dumps were made with the tokenizer of model.path; only their ids were")
        elif theirs.get_vocab() != self.tokenizer.get_vocab():
            raise DataError(
                f"its run used another tokenizer, that of {folder}, than model.path = {self.config.model.path!r}: the same ids mean other "
                "text"
            )

    def _read_lines(self, path: Path, faults: Faults) -> RolloutBatch:
        name, responses, verdicts, logprobs = str(path), [], [], []
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                faults.rows[name] = faults.rows.get(name, 0) + 1
                found = self._row(line, _Place(faults, name, number))
                if found is not None:
                    responses.append(found[0])
                    verdicts.append(found[1])
                    logprobs.append(found[0].trajectory.logprobs)
        steps = [step_rewards(*pair, self.tokenizer) for pair in zip(responses, verdicts, strict=True)]
        rows = response_rows([0] * len(responses), responses, verdicts, steps)
        prompts = [response.prompt.token_ids for response in responses]
        return RolloutBatch.from_responses(rows, prompts, [response.trajectory.token_ids for response in responses], logprobs)

    def _row(self, line: str, place: _Place) -> tuple[Response, Verdict] | None:
        """Return the response of a JSONL row with its verdict, or None after adding its faults."""
        try:
            row = _parsed(line)
        except _Refused as refused:
            place.add(refused)
            return None
        verdict = None
        for check in (_require_text("prompt"), _require_text("response"), _require_one_turn, _require_finish_reason):
            try:
                check(row)
            except _Refused as refused:
                place.add(refused)
        try:
            verdict = self._verdict(row)
        except _Refused as refused:
            place.add(refused)
        if place.faulty or verdict is None:
            return None
        try:
            return self._response(row, place), verdict
        except _Refused as refused:
            place.add(refused)
            return None

    def _verdict(self, row: dict[str, Any]) -> Verdict:
        if row.get("error") is not None:  # as in samples files: no verdict, so the response is not trained on
            return Verdict(0.0, False, str(row["error"]), 0.0, cause="verifier")
        score, correct, steps = row.get("score"), row.get("correct"), row.get("step_rewards", [])
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise _Refused("score", f"must be a number, is {'missing' if score is None else kind_of(score)}")
        if (reason := self._score_fault(float(score))) is not None:
            raise _Refused("score", reason)
        if correct is not None and not isinstance(correct, bool):
            raise _Refused("correct", f"must be true or false, is {kind_of(correct)}")
        try:
            rewards = tuple(StepReward(int(end), float(reward)) for end, reward in steps)
            ends = [step.end for step in rewards]
            valid = ends == sorted(set(ends)) and all(1 <= end <= len(row.get("response") or "") for end in ends)
            if not valid or not all(math.isfinite(step.reward) for step in rewards):
                raise ValueError
        except (TypeError, ValueError):
            reason = f"must be a list of [end, reward] with rising ends inside the response, is {kind_of(steps)}"
            raise _Refused("step_rewards", reason) from None
        return Verdict(float(score), score >= self.high if correct is None else correct, None, 0.0, rewards)

    def _score_fault(self, score: float) -> str | None:
        if math.isfinite(score) and self.low <= score <= self.high:
            return None
        return f"{score:g} is not in [{self.low:g}, {self.high:g}], the range of scores (reward.scale.source, by default 0 to 1)"

    def _length_fault(self, tokens: int) -> str | None:
        limit = self.config.max_sequence_length
        if tokens <= limit:
            return None
        return (
            f"prompt and response have {tokens} tokens, more than data.max_prompt_length + rollout.max_response_length = {limit}; raise "
            "these"
        )

    def _encode(self, row: dict[str, Any], field: str, *, special: bool) -> list[int]:
        """Return the token ids of a text of the row: those of the row if it has them, else the tokenizer's."""
        text, given = row[field], row.get(f"{field}_ids")
        if given is None:
            ids: list[int] = list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        elif isinstance(given, list) and given and all(isinstance(token, int) and not isinstance(token, bool) for token in given):
            ids = given
        else:
            raise _Refused(f"{field}_ids", f"must be a list of token ids, is {kind_of(given)}")
        named = field if given is None else f"{field}_ids"
        unknown = [token for token in ids if not 0 <= token < self.vocab_size or not self.known[token]]
        if unknown:
            raise _Refused(named, f"{unknown[0]} is not an id of the tokenizer of model.path: made with another tokenizer")
        read = self.tokenizer.decode(ids)
        if _bare(text) not in (_bare(read), _bare(self.tokenizer.decode(ids, skip_special_tokens=True))):
            raise _Refused(
                named, f"the tokenizer of model.path reads {_cut(read)} where the text is {_cut(text)}: made with another tokenizer"
            )
        return ids

    def _end(self, text: str) -> list[int]:
        """Return the stop token that ends a finished response, or nothing if the text ends with one of ``rollout.stop``."""
        if any(text.endswith(stop) for stop in self.config.rollout.stop):
            return []
        data = self.config.data
        end = end_of_turn(self.tokenizer, data.chat_template_kwargs) if data.chat_template and self.tokenizer.chat_template else None
        if end is not None:
            return [end.token_id]
        if self.tokenizer.eos_token_id is not None:
            return [self.tokenizer.eos_token_id]
        return [stop_ids(self.config, self.tokenizer)[0]]

    def _response(self, row: dict[str, Any], place: _Place) -> Response:
        """Tokenize a row whose fields are valid."""
        prompt_ids = self._encode(row, "prompt", special=not self.config.data.chat_template)
        token_ids = self._encode(row, "response", special=False)
        finish: TrajectoryEnd = "length" if row.get("finish_reason") == "length" else "stop"
        if finish == "stop" and row.get("response_ids") is None:
            token_ids = token_ids + self._end(row["response"])
        size = len(token_ids)
        if (reason := self._length_fault(len(prompt_ids) + size)) is not None:
            raise _Refused(None, reason)
        name, index = str(row.get("prompt_id") or f"{Path(place.file).name}/{place.number}"), row.get("sample_index")
        prompt = Prompt(name, prompt_ids, row["prompt"], str(row.get("ground_truth", "")), str(row.get("source", "")), "", {})
        request = GenerationRequest(name, index if isinstance(index, int) else 0, prompt_ids, 0)
        trajectory = Trajectory(request, token_ids, [0.0] * size, [True] * size, finish, (Turn(0, size),))  # log-probs are not read
        return Response(prompt, trajectory, [row["response"]])

    def _keys(self, batch: RolloutBatch) -> Iterator[bytes]:
        """Yield the key of each row's prompt, from its tokens, so that dumps and JSONL rows of one prompt agree."""
        tokens, starts = batch["tokens"], batch.cu_seqlens.tolist()
        for start, length in zip(starts, batch.rows.prompt_length.tolist(), strict=False):
            yield prompt_key(self.tokenizer.decode(tokens[start : start + length].tolist(), skip_special_tokens=False))


class _Refused(Exception):
    """A row has a fault in ``field`` (None: the whole row)."""

    def __init__(self, field: str | None, reason: str) -> None:
        super().__init__(reason)
        self.field, self.reason = field, reason


@dataclass
class _Place:
    """One row of a file, for its faults."""

    faults: Faults
    file: str
    number: int
    faulty: bool = False

    def add(self, refused: _Refused) -> None:
        self.faulty = True
        self.faults.add(self.file, self.number, refused.field, refused.reason)


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _Refused(None, f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _Refused(None, f"must be an object, is {kind_of(row)}")
    return row


def _require_text(field: str) -> Callable[[dict[str, Any]], None]:
    def check(row: dict[str, Any]) -> None:
        value = row.get(field)
        if not isinstance(value, str) or not value:
            given = "is missing" if field not in row else f"is {kind_of(value)}" if value != "" else "is empty"
            raise _Refused(field, f"{given}; a scored response needs its text")
        if (reason := unicode_fault(value)) is not None:
            raise _Refused(field, reason)

    return check


def _require_one_turn(row: dict[str, Any]) -> None:
    if row.get("observations") or any(row.get("turn_rewards") or ()):
        raise _Refused("observations", "the response was written in turns, whose tokens the text does not give; use the run's dumps")


def _require_finish_reason(row: dict[str, Any]) -> None:
    reason = row.get("finish_reason", "stop")
    if reason not in ("stop", "length"):
        raise _Refused("finish_reason", f"must be 'stop' or 'length', is {kind_of(reason)}")


def _bare(text: str) -> str:
    """Return the text without whitespace, which some tokenizers add or drop at the start."""
    return "".join(text.split())


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _model_path(run: Path) -> str | None:
    """Return ``model.path`` of a run directory, or None if its configuration cannot be read."""
    import yaml

    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        return str(settings["model"]["path"])
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        return None


def _renumbered(parts: Sequence[RolloutBatch]) -> Iterator[RolloutBatch]:
    """Yield the parts with row ids that do not repeat and the tensors that training the critic reads."""
    first = 0
    for part in parts:
        names = ("tokens", "response_mask", "rollout_logprobs")
        tensors = {name: part[name] for name in names}
        yield RolloutBatch(part.rows, part.cu_seqlens, tensors, torch.arange(first, first + len(part)))
        first += len(part)


def split(data: ScoredResponses, fraction: float, seed: int) -> tuple[ScoredResponses, ScoredResponses]:
    """Split by prompt into (training, held-out) responses: the same prompts for the same ``seed``, at least one on each side.

    Raises DataError if there is only one prompt.
    """
    order = sorted(set(data.keys), key=lambda key: hashlib.sha256(f"held-out/{seed}/".encode() + key).digest())
    if len(order) < 2:
        raise DataError(f"all {len(data)} responses answer one prompt, so no prompt can be held out; give --held-out FILE")
    held = set(order[: min(max(1, round(fraction * len(order))), len(order) - 1)])
    apart = torch.tensor([key in held for key in data.keys], dtype=torch.bool)
    return data.select((~apart).nonzero().flatten()), data.select(apart.nonzero().flatten())


def require_disjoint(training: ScoredResponses, held_out: ScoredResponses) -> None:
    """Raise DataError if a held-out prompt is also a training prompt (compared by text, ignoring case and whitespace)."""
    trained = set(training.keys)
    names: dict[bytes, str] = {}
    for key, name in zip(held_out.keys, held_out.batch.rows.prompt_id, strict=True):
        if key in trained:
            names.setdefault(key, name)
    if names:
        shown = ", ".join(list(names.values())[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise DataError(
            f"--held-out: {len(names)} of its {held_out.prompts} prompts are training prompts ({shown}): the critic would be measured on "
            "its training data; remove them from --data or --held-out"
        )


def require_spread(data: ScoredResponses, what: str, trainable: Tensor) -> None:
    """Raise DataError if no ``trainable`` (bool [n]) response is left, or all have the same score: explained variance is undefined."""
    rows = data.batch.rows.select(trainable.nonzero().flatten())
    if len(rows) == 0:
        raise DataError(f"{what}: none of the {len(data)} responses has a score and carries a loss")
    if not any(rows.step_rewards) and float(rows.score.min()) == float(rows.score.max()):
        scores = f"all {len(rows)} scores are {float(rows.score[0]):g}"
        raise DataError(f"{what}: {scores}; a critic learns from responses of different scores")
