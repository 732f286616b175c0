"""Model folder: config, tokenizer, chat template and stop tokens belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.record import Measurement, fails, holds, not_applicable, warns
from vapo_mcore.collectives import fail_together
from vapo_mcore.data.chat_template import ControlTokens, render
from vapo_mcore.errors import VapoError
from vapo_mcore.rollout.stopping import stop_ids

QUESTION, ANSWER = "What is 2 + 3?", "It is 5."


def run(bench: Bench) -> list[Measurement]:
    """Compare what the folder's files say of each other; the engine's own stop ids, where it can be built."""
    with fail_together():
        tokenizer, config = bench.tokenizer, bench.config
        ids = stop_ids(config, tokenizer)
        found = [_vocabulary(bench), _declared_eos(bench, ids)]
        found += _prompts(bench)
    stopping = _engine_stop_ids(bench)
    found.append(_same_stop_ids(ids, stopping))
    if not (config.data.chat_template and tokenizer.chat_template):
        found.append(not_applicable("chat template", "data.chat_template is off: prompts are plain text"))
        return found
    with fail_together():
        found += _template(bench, stopping if isinstance(stopping, list) else list(ids))
    return found


def _vocabulary(bench: Bench) -> Measurement:
    """Check that the tokenizer's ids lie in the model's vocabulary, and that ids of the model alone are excluded from every softmax."""
    size, what = bench.architecture.vocab_size, "vocabulary"
    tolerance = "each id of the tokenizer has a row of the embedding"
    beyond = {number: text for text, number in bench.tokenizer.get_vocab().items() if number >= size}
    if beyond:
        first = ", ".join(f"{beyond[number]!r} ({number})" for number in sorted(beyond)[:4])
        shown = f"the model has {size:,} rows, {len(beyond)} tokens of the tokenizer have higher ids: {first}"
        remedy = (
            "take the tokenizer of the model, or give the model as many rows as its tokenizer has ids: a text with such a token ends a run"
        )
        return fails(what, shown, tolerance, remedy, len(beyond))
    unknown = len(bench.unknown_token_ids)
    return holds(what, f"{size:,} rows, of which {unknown:,} have no token and are excluded from sampling and softmax", tolerance, unknown)


def _declared_eos(bench: Bench, ids: tuple[int, ...]) -> Measurement:
    """Check that the end-of-sequence ids of config.json and generation_config.json are stop ids of the run."""
    declared: dict[str, list[int]] = {}
    for name in ("config.json", "generation_config.json"):
        path = Path(bench.config.model.path) / name
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        if value is not None:
            declared[name] = value if isinstance(value, list) else [value]
    own = bench.tokenizer.eos_token_id
    if own is not None:
        declared["tokenizer"] = [own]
    missing = {name: sorted(set(values) - set(ids)) for name, values in declared.items() if set(values) - set(ids)}
    shown = "; ".join(f"{name}: {values}" for name, values in declared.items()) or "none declared"
    tolerance = "every declared end-of-sequence id ends a response"
    if missing:
        listed = "; ".join(f"{name}: {_names(bench.tokenizer, values)}" for name, values in missing.items())
        return warns(
            "end-of-sequence ids", f"not among the stop ids {list(ids)}: {listed}", tolerance, "add them to rollout.stop_token_ids"
        )
    return holds("end-of-sequence ids", f"{shown}; stop ids {list(ids)}", tolerance)


def _engine_stop_ids(bench: Bench) -> list[int] | str:
    """Return the stop ids that the engine received, or why there is no engine."""
    try:
        return sorted(int(token) for token in bench.engine.settings()["stop_token_ids"])
    except VapoError as error:
        return str(error)


def _same_stop_ids(ids: tuple[int, ...], engine: list[int] | str) -> Measurement:
    what, tolerance = "stop ids of the engine", "those of the recipe: folder, tokenizer, template and rollout.stop_token_ids together"
    if isinstance(engine, str):
        return not_applicable(what, f"the rollout engine cannot be built: {engine}")
    if engine != sorted(ids):
        return fails(
            what, f"the engine stops at {engine}, the recipe at {sorted(ids)}", tolerance, "start the engine with the recipe's ids"
        )
    return holds(what, str(engine), tolerance)


def _prompts(bench: Bench) -> list[Measurement]:
    """Check that no prompt begins with two BOS tokens, one from the template and one from the tokenizer."""
    what, bos = "special tokens in prompts", bench.tokenizer.bos_token_id
    try:
        prompts = bench.prompts.items
    except VapoError as error:
        return [fails(what, f"the data cannot be read: {error}", remedy="run `vapo-mcore data check` on the recipe")]
    doubled = [prompt.prompt_id for prompt in prompts if bos is not None and prompt.token_ids[:2] == [bos, bos]]
    control = ControlTokens.of(bench.tokenizer, chat_template=bool(bench.config.data.chat_template), kwargs=_kwargs(bench))
    counts = [sum(control.count(prompt.token_ids).values()) for prompt in prompts]
    shown = f"{len(prompts):,} prompts with {min(counts)} to {max(counts)} special tokens each"
    if doubled:
        reason = f"{len(doubled)} prompts begin with two beginning-of-sequence tokens, the first is {doubled[0]}"
        remedy = "let the template or the tokenizer write it, not both (data.chat_template, tokenizer_config.json: add_bos_token)"
        return [fails(what, reason, "one at most", remedy)]
    return [holds(what, shown, "at most one beginning-of-sequence token", float(max(counts)))]


def _kwargs(bench: Bench) -> dict[str, Any]:
    return bench.config.data.chat_template_kwargs if bench.config.data.chat_template else {}


def _template(bench: Bench, stopping: list[int]) -> list[Measurement]:
    """Render a question with and without its answer and compare the two texts and their tokens."""
    tokenizer, kwargs = bench.tokenizer, _kwargs(bench)
    question = [{"role": "user", "content": QUESTION}]
    whole = render(tokenizer, [*question, {"role": "assistant", "content": ANSWER}], kwargs, add_generation_prompt=False)
    prompt = render(tokenizer, question, kwargs)
    before, middle, after = whole.rpartition(ANSWER)
    if not middle or QUESTION not in before:
        remedy = "look at what the template writes (data.chat_template)"
        return [fails("rendered conversation", "the template does not write question and answer as they are", remedy=remedy)]
    return [
        _generation_prompt(prompt, before),
        _end_of_turn(tokenizer, whole, before, after, stopping),
        _round_trip(tokenizer, whole),
    ]


def _generation_prompt(prompt: str, before: str) -> Measurement:
    """Check that a prompt ends with the text that precedes an answer in a conversation, as in the data the model saw."""
    what, tolerance = "generation prompt", "the same text as before the answer in a rendered conversation"
    if prompt == before:
        return holds(what, f"{prompt[-24:]!r} before an answer, in prompts and conversations", tolerance)
    at = next((n for n, (one, other) in enumerate(zip(prompt, before, strict=False)) if one != other), min(len(prompt), len(before)))
    shown = f"from character {at} on the prompt has {prompt[at:]!r}, a conversation {before[at:]!r} before the answer"
    remedy = "make the template's generation prompt what it writes before an assistant's text"
    if not prompt.startswith(before) and not before.startswith(prompt):
        return fails(what, shown, tolerance, remedy)
    if not (prompt[at:] + before[at:]).strip():
        return fails(what, f"off by whitespace: {shown}", tolerance, remedy)
    return warns(what, shown, tolerance, "right for templates that open or drop a thinking part; else: " + remedy)


def _end_of_turn(tokenizer: Any, whole: str, before: str, after: str, stopping: list[int]) -> Measurement:
    """Check that the token after an answer in a rendered conversation stops generation."""
    what, tolerance = "end of a turn", "the token that the template writes after an answer ends a response"
    if not after.strip():
        return warns(what, "the template writes nothing after an answer", tolerance, "the model must learn to end by itself: check eos")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    end = len(before) + len(ANSWER)
    following = [
        token for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True) if start >= end and stop > start
    ]
    token = next((token for token in following if tokenizer.decode([token]).strip()), None)
    if token is None:
        return warns(what, f"no single token was found for {after!r}", tolerance, "check with `vapo-mcore data check` how prompts look")
    if token in stopping:
        return holds(what, f"{_names(tokenizer, [token])} stops generation", tolerance)
    shown = f"the template ends an answer with {_names(tokenizer, [token])}, which is not among the stop ids {_names(tokenizer, stopping)}"
    return fails(what, shown, tolerance, f"add {token} to rollout.stop_token_ids, or to eos_token_id of generation_config.json")


def _round_trip(tokenizer: Any, whole: str) -> Measurement:
    """Encoding and decoding give the conversation's text back."""
    what, tolerance = "round trip of a conversation", "the same text after encoding and decoding"
    again = tokenizer.decode(tokenizer(whole, add_special_tokens=False)["input_ids"])
    if again == whole:
        return holds(what, f"{len(whole)} characters come back", tolerance)
    remedy = "graders and later turns see the decoded text: take the model's own tokenizer files"
    if "".join(again.split()) == "".join(whole.split()):
        return warns(what, f"whitespace differs: {again!r}", tolerance, remedy)
    return fails(what, f"{whole!r} comes back as {again!r}", tolerance, remedy)


def _names(tokenizer: Any, token_ids: list[int]) -> str:
    return ", ".join(f"{name!r} ({token})" for name, token in zip(tokenizer.convert_ids_to_tokens(token_ids), token_ids, strict=True))
