"""Prompt datasets: read, check, apply the chat template, tokenize, and draw prompts in a resumable order.

Order. Each source is read in epochs; an epoch is a permutation of its prompts seeded by (seed, source, epoch), or file order without
``data.shuffle``. Sources are interleaved evenly in proportion to ``weight x number of prompts``: with equal weights all finish an epoch
at about the same time, and a source of weight 2 is read twice as often. A batch may be larger than the data.

Names. A drawn prompt is named ``<source>/<id>#<epoch>``. The name is unique in the run, even if a prompt occurs twice in a batch;
sampling seeds and advantage groups depend on it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from vapo_mcore.config.schema import DataConfig
from vapo_mcore.data.chat_template import ControlTokens, render
from vapo_mcore.data.faults import Faults
from vapo_mcore.data.sources import Messages, Problem, check_files, read_source
from vapo_mcore.errors import DataError, VapoError

__all__ = ["Prompt", "PromptDataset", "check_files", "check_prompts", "load_prompts", "overlaps", "prompt_key", "split_evenly"]

_TOKENIZE_AT_ONCE = 1024


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer's interface that is used here."""

    chat_template: Any
    added_tokens_decoder: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> Any: ...

    def apply_chat_template(self, conversation: Messages, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt with everything needed to grade its responses.

    Attributes:
        prompt_id: ``<source>/<id or row number>``, followed by ``#<epoch>`` if drawn for training.
        token_ids: input of the engine, template included.
        text: the text that was tokenized.
        ground_truth: the answer as text (numbers are converted).
        source: name of the source.
        verifier: name of the verifier that grades responses.
        metadata: the other fields of the row; for reasoning-gym the input of the task's scorer.
        subsets: field -> value, by which evaluations are split.
    """

    prompt_id: str
    token_ids: list[int]
    text: str
    ground_truth: str
    source: str
    verifier: str
    metadata: dict[str, Any]
    subsets: dict[str, str] = field(default_factory=dict)


def prompt_key(prompt: str | Messages) -> bytes:
    """Return a digest that is equal for prompts with the same text, ignoring case, whitespace and system messages."""
    parts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt if message["role"] != "system"]
    text = "\0".join(" ".join(part.split()).casefold() for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def overlaps(train: PromptDataset, held_out: PromptDataset) -> list[str]:
    """Return one sentence for each pair of evaluation set and training source with common prompts (see :func:`prompt_key`)."""
    sentences = []
    for name, keys in held_out.keys.items():
        for other, others in train.keys.items():
            common = len(keys & others)
            if common:
                what = f"{common} of the {len(keys)} distinct prompts of the evaluation set {name!r}"
                sentences.append(f"{what} are in the training source {other!r}")
    return sentences


def encode_prompts(
    problems: Sequence[Problem], data: DataConfig, tokenizer: Tokenizer, faults: Faults
) -> Iterator[tuple[Problem, str, list[int]]]:
    """Yield each problem with its rendered text and token ids.

    Adds to ``faults``: messages that the template rejects, control tokens in the text, empty prompts, and with
    ``overlong_prompts: refuse`` overlong ones. Skips rows without text. Rows with another fault have no tokens, except overlong ones,
    whose length callers report.
    """
    writer = _PromptWriter(data, tokenizer)
    for start in range(0, len(problems), _TOKENIZE_AT_ONCE):
        texts = [(problem, writer.text(problem, faults)) for problem in problems[start : start + _TOKENIZE_AT_ONCE]]
        chunk = [(problem, text) for problem, text in texts if text is not None]
        # A chat template writes the special tokens itself; plain text gets the tokenizer's default ones.
        encoded = tokenizer([text for _, text in chunk], add_special_tokens=not data.chat_template, verbose=False) if chunk else {}
        for (problem, text), found in zip(chunk, encoded.get("input_ids", []), strict=True):
            if not found:
                faults.add(problem.file, problem.row, None, "the prompt has no tokens")
            token_ids = writer.without_control_tokens(problem, list(found), faults)
            if len(token_ids) > data.max_prompt_length and data.overlong_prompts == "refuse":
                faults.add(problem.file, problem.row, None, overlong_reason(len(token_ids), data.max_prompt_length))
            yield problem, text, token_ids


def overlong_reason(tokens: int, limit: int) -> str:
    """Return the fault of a prompt with ``tokens`` tokens."""
    return f"the prompt has {tokens} tokens, more than data.max_prompt_length = {limit}; raise that, or set data.overlong_prompts: drop"


class _PromptWriter:
    """Renders problems with the chat template or as plain text, and handles control tokens in them.

    The expected number of control tokens for a sequence of roles is that of a prompt whose messages are all "x"; any further ones come
    from the row's text.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.kwargs = data.chat_template_kwargs if data.chat_template else {}
        self.control = ControlTokens.of(tokenizer, chat_template=bool(data.chat_template), kwargs=self.kwargs)
        self._expected: dict[tuple[str, ...], tuple[Counter[int], bool]] = {}

    def text(self, problem: Problem, faults: Faults) -> str | None:
        """Return the text to tokenize, or None after adding a fault."""
        from jinja2 import TemplateError

        try:
            return self._write(problem.prompt)
        except TemplateError as error:
            faults.add(problem.file, problem.row, None, f"the chat template rejects the messages: {error}")
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:  # raised by expressions of a template
            faults.add(problem.file, problem.row, None, f"the chat template fails: {type(error).__name__}: {error}")
        return None

    def _write(self, prompt: str | Messages) -> str:
        data = self.data
        if not data.chat_template:
            assert isinstance(prompt, str)
            return prompt + data.prompt_suffix
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + data.prompt_suffix}
        if data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        return render(self.tokenizer, messages, self.kwargs)

    def without_control_tokens(self, problem: Problem, token_ids: list[int], faults: Faults) -> list[int]:
        """Return the prompt's tokens without control tokens from the row's text; empty after adding a fault."""
        present = self.control.count(token_ids)
        if not present:
            return token_ids
        expected, can_be_plain = self._expectation(problem.prompt)
        surplus = present - expected
        if not surplus:
            return token_ids
        names = self.control.names(surplus)
        if self.data.control_tokens == "refuse":
            reason = f"the text has control tokens of the model: {names}; remove them, or set data.control_tokens: plain"
        elif not can_be_plain:
            reason = f"the text has control tokens of the model: {names}; with this tokenizer they cannot be written as plain text"
        else:
            plain = self._encode_plain(problem.prompt)
            if not self.control.count(plain) - expected:
                return plain
            reason = f"the text has control tokens of the model: {names}; they cannot be written as plain text"
        faults.add(problem.file, problem.row, None, reason)
        return []

    def _expectation(self, prompt: str | Messages) -> tuple[Counter[int], bool]:
        """Return the control tokens expected for the prompt's roles, and whether encoding it piecewise gives the same tokens."""
        roles = ("user",) if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
        if roles not in self._expected:
            neutral: str | Messages = "x" if isinstance(prompt, str) else [{"role": role, "content": "x"} for role in roles]
            whole = self._encode(self._write(neutral))
            self._expected[roles] = self.control.count(whole), self._encode_plain(neutral) == whole
        return self._expected[roles]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer([text], add_special_tokens=not self.data.chat_template, verbose=False)["input_ids"][0])

    def _encode_plain(self, prompt: str | Messages) -> list[int]:
        """Encode the prompt, treating control tokens in its messages as ordinary text."""
        restore: dict[str, str] = {}

        def hidden(text: str) -> str:
            changed, found = self.control.hide(text)
            restore.update(found)
            return changed

        quiet = hidden(prompt) if isinstance(prompt, str) else [{**m, "content": hidden(m["content"])} for m in prompt]
        ids = self.control.encode_pieces(self._write(quiet), restore)
        if self.data.chat_template:
            return ids
        before, after = self._added
        return [*before, *ids, *after]

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after plain text."""
        whole, alone = self._encode("x"), self.control.encode_plain("x")
        starts = [start for start in range(len(whole) - len(alone) + 1) if whole[start : start + len(alone)] == alone]
        return (whole[: starts[0]], whole[starts[0] + len(alone) :]) if starts else ([], [])


class PromptDataset:
    """All prompts of one split, drawn in a seeded, resumable order.

    Args:
        data: the ``data`` section of the configuration.
        split: which of its source lists to read.
        tokenizer: the model's tokenizer; with ``data.chat_template`` it must have a chat template.
        seed: seed of the order (the run's seed).
        collected: receives the faults, for the caller to raise; None: raise them here.

    Raises:
        DataError: all faults of the rows in one error: malformed rows, control tokens in the text, prompts longer than
            ``data.max_prompt_length`` under ``overlong_prompts: refuse``, a source without any prompt left.
    """

    def __init__(
        self, data: DataConfig, split: Literal["train", "eval"], tokenizer: Tokenizer, *, seed: int, collected: Faults | None = None
    ) -> None:
        self._data, self._split, self._seed = data, split, seed
        if data.chat_template and not tokenizer.chat_template:
            raise DataError(
                "data.chat_template is true, but the model's tokenizer has no chat template; set data.chat_template: false, or add "
                "the template to the model folder (chat_template.jinja)"
            )
        faults = Faults() if collected is None else collected
        sources = data.train if split == "train" else data.eval
        self._prompts: dict[str, list[Prompt]] = {}
        self.dropped: dict[str, int] = {}
        self.repeated: dict[str, int] = {}
        self.keys: dict[str, set[bytes]] = {}
        self.key_of: dict[str, bytes] = {}  # evaluation prompts: prompt id -> key
        seen: set[bytes] = set()
        for source in sources:
            problems = read_source(source, data, faults)
            keys = [prompt_key(problem.prompt) for problem in problems]
            self.keys[source.name] = set(keys) if data.eval else set()
            if split == "eval":
                self.key_of |= {problem.problem_id: key for problem, key in zip(problems, keys, strict=True)}
            if data.deduplicate and split == "train":
                # Keep the first problem of each key; keys of earlier sources are in ``seen``.
                firsts = {key: problem for key, problem in zip(reversed(keys), reversed(problems), strict=True) if key not in seen}
                kept = {problem.problem_id for problem in firsts.values()}
                self.repeated[source.name] = len(problems) - len(kept)
                problems = [problem for problem in problems if problem.problem_id in kept]
                seen.update(keys)
            self._prompts[source.name] = self._tokenize(source.name, problems, tokenizer, faults)
            if problems and not self._prompts[source.name] and data.overlong_prompts == "drop":
                reason = f"all {len(problems)} prompts are longer than data.max_prompt_length = {data.max_prompt_length} tokens"
                faults.add(f"data.{split}, source {source.name!r}", None, None, reason)
        if collected is None:
            faults.raise_if_any()
        self._weight = {source.name: source.weight * len(self._prompts[source.name]) for source in sources}
        self._drawn = dict.fromkeys(self._prompts, 0)
        self._order: dict[str, tuple[int, Sequence[int]]] = {}

    def _tokenize(self, name: str, problems: list[Problem], tokenizer: Tokenizer, faults: Faults) -> list[Prompt]:
        """Return the prompts of one source; drops and counts overlong ones."""
        prompts: list[Prompt] = []
        self.dropped[name] = 0
        for problem, text, token_ids in encode_prompts(problems, self._data, tokenizer, faults):
            if len(token_ids) > self._data.max_prompt_length:
                self.dropped[name] += 1  # with overlong_prompts: refuse, encode_prompts has added a fault
            elif token_ids:
                verdict = (problem.ground_truth, problem.source, problem.verifier, problem.metadata, problem.subsets)
                prompts.append(Prompt(problem.problem_id, token_ids, text, *verdict))
        return prompts

    def __len__(self) -> int:
        return sum(len(prompts) for prompts in self._prompts.values())

    @property
    def items(self) -> list[Prompt]:
        """Return each prompt once, by source and file order, with ids without the epoch."""
        return [prompt for prompts in self._prompts.values() for prompt in prompts]

    @property
    def summary(self) -> str:
        """Return a log line: the number of prompts per source, and how many were dropped and why."""
        parts = []
        for name, prompts in self._prompts.items():
            dropped = self.dropped[name]
            limit = self._data.max_prompt_length
            notes = [f"{dropped} dropped, longer than {limit} tokens"] if dropped else []
            notes += [f"{self.repeated[name]} dropped, repeat an earlier prompt"] if self.repeated.get(name) else []
            parts.append(f"{name} {len(prompts)}" + (f" ({'; '.join(notes)})" if notes else ""))
        return f"data.{self._split}: {len(self)} prompts: {', '.join(parts)}"

    @property
    def split(self) -> str:
        return self._split

    @property
    def fingerprint(self) -> str:
        """Return a digest of all prompts and their sources; equal data has equal digests."""
        return hashlib.sha256(repr(sorted(self._fingerprints.items())).encode()).hexdigest()

    def next_batch(self, n: int) -> list[Prompt]:
        """Draw the next ``n`` prompts, across epoch boundaries if needed. Returns the same prompts on every rank."""
        batch = []
        for _ in range(n):
            # Draw from the source that is furthest behind its share; ties go to the first.
            name = min(self._drawn, key=lambda source: (self._drawn[source] + 1) / self._weight[source])
            epoch, position = divmod(self._drawn[name], len(self._prompts[name]))
            self._drawn[name] += 1
            prompt = self._prompts[name][self._epoch_order(name, epoch)[position]]
            batch.append(replace(prompt, prompt_id=f"{prompt.prompt_id}#{epoch}"))
        return batch

    def _epoch_order(self, name: str, epoch: int) -> Sequence[int]:
        if not self._data.shuffle:
            return range(len(self._prompts[name]))
        if name not in self._order or self._order[name][0] != epoch:
            generator = np.random.default_rng((self._seed, zlib.crc32(name.encode()), epoch))
            self._order[name] = (epoch, generator.permutation(len(self._prompts[name])).tolist())
        return self._order[name][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order, as JSON-serialisable values."""
        sources = {name: {"drawn": drawn, "fingerprint": self._fingerprints[name]} for name, drawn in self._drawn.items()}
        return {"seed": self._seed, "shuffle": self._data.shuffle, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of ``state``.

        Raises:
            DataError: the seed, ``data.shuffle``, the sources or their prompts differ from those of the state.
        """
        faults = []
        for key, value in (("seed", self._seed), ("data.shuffle", self._data.shuffle)):
            saved = state[key.removeprefix("data.")]
            if saved != value:
                faults.append(f"{key} was {saved}, is now {value}")
        saved_sources = state["sources"]
        if saved_sources.keys() != self._prompts.keys():
            faults.append(f"the sources were {', '.join(sorted(saved_sources))}, are now {', '.join(sorted(self._prompts))}")
        for name in saved_sources.keys() & self._prompts.keys():
            if saved_sources[name]["fingerprint"] != self._fingerprints[name]:
                faults.append(f"the prompts of source {name!r} have changed")
        if faults:
            raise DataError(f"the order of data.{self._split} cannot be continued: {'; '.join(sorted(faults))}")
        self._drawn = {name: saved_sources[name]["drawn"] for name in self._prompts}

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Return a digest of each source's prompts, to detect that a resumed run has different data."""
        digests = {}
        for name, prompts in self._prompts.items():
            digest = hashlib.sha256()
            for prompt in prompts:
                digest.update(repr((prompt.prompt_id, prompt.token_ids, prompt.ground_truth, prompt.verifier)).encode())
            digests[name] = digest.hexdigest()
        return digests


def load_prompts(
    data: DataConfig, tokenizer: Tokenizer, *, seed: int, splits: Sequence[Literal["train", "eval"]] = ("train", "eval")
) -> dict[str, PromptDataset]:
    """Load the datasets of the splits that have sources. Raises one DataError with the faults of all of them."""
    faults = Faults()
    given = [split for split in splits if (data.train if split == "train" else data.eval)]
    datasets: dict[str, PromptDataset] = {split: PromptDataset(data, split, tokenizer, seed=seed, collected=faults) for split in given}
    faults.raise_if_any()
    return datasets


def check_prompts(
    data: DataConfig, load: Callable[[], Tokenizer], *, splits: Sequence[Literal["train", "eval"]] = ("train", "eval")
) -> None:
    """Check the prompts before a run starts its processes. Raises one DataError with all faults of their rows.

    Importing a tokenizer takes seconds. If all rows pass the checks that need none, the run checks the rest after it has started. If some
    fail, the tokenizer is loaded so that the same error also lists overlong prompts and control tokens.
    """
    try:
        check_files(data, splits)
        return
    except DataError as error:
        found = error
    try:
        tokenizer = load()
    except VapoError:
        raise found from None
    load_prompts(data, tokenizer, seed=0, splits=splits)


def split_evenly(total: int, parts: int) -> list[range]:
    """Split 0 .. total - 1 into consecutive ranges whose lengths differ by at most one, longer ones first: 9 over 4 is 3, 2, 2, 2."""
    base, longer = divmod(total, parts)
    starts = [part * base + min(part, longer) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
