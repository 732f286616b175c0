"""The transformers engine against plain forward passes of the same model, unpadded and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_models import (
    EOS,
    MODELS,
    PROMPTS,
    UNKNOWN,
    VOCAB,
    change_weights,
    check_stop_texts,
    exclude_from_softmax,
    greedy_of,
    in_buckets,
    letter,
    letters,
    load_model,
    logits_of,
    logprobs_of,
    make_ids_likely,
    named_weights,
)
from vapo_mcore.rollout.base import Generation, GenerationRequest, Replica, SamplingConfig
from vapo_mcore.rollout.seeds import sampling_seed
from vapo_mcore.rollout.stopping import StopTexts
from vapo_mcore.rollout.token_sampling import draw, uniform_numbers
from vapo_mcore.rollout.transformers_engine import TransformersEngine

GetFolder = Callable[[str], Path]
ReadyEngine = Callable[[Path], tuple[TransformersEngine, Any]]


def sampling(temperature: float, max_tokens: int = 24, top_p: float = 1.0, top_k: int = -1) -> SamplingConfig:
    return SamplingConfig(temperature, top_p, top_k, max_tokens)


def requests(samples: int = 1) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"p{i}", j, prompt, sampling_seed(1, 2, f"p{i}", j)) for i, prompt in enumerate(PROMPTS) for j in range(samples)
    ]


def check_logprobs(model: Any, generations: list[Generation], temperature: float) -> None:
    for generation in generations:
        expected = logprobs_of(model, generation.request.prompt_token_ids, generation.token_ids, temperature)
        assert (torch.tensor(generation.logprobs).double() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_greedy(name: str, folder: GetFolder, ready_engine: ReadyEngine) -> None:
    engine, model = ready_engine(folder(name))
    generations = engine.generate(requests(), sampling(0.0))
    assert [g.request for g in generations] == requests()
    assert [g.token_ids for g in generations] == [greedy_of(model, prompt, 24) for prompt in PROMPTS]
    check_logprobs(model, generations, 1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_tokens_and_logprobs(temperature: float, folder: GetFolder, ready_engine: ReadyEngine) -> None:
    """Every token is the one that the request's uniform number picks from an unpadded forward pass; ends are as they should be."""
    engine, model = ready_engine(folder("qwen2"))
    how = sampling(temperature)
    generations = engine.generate(requests(3), how)
    check_logprobs(model, generations, temperature)
    for g in generations:
        logits = logits_of(model, g.request.prompt_token_ids, g.token_ids)
        tokens, _ = draw(logits, uniform_numbers([g.request.seed], how.max_tokens)[0, : len(g.token_ids)], how)
        assert g.token_ids == tokens.tolist()
        assert EOS not in g.token_ids[:-1]
        assert (g.token_ids[-1] == EOS) == (g.finish_reason == "stop")
        assert g.finish_reason == "stop" or len(g.token_ids) == how.max_tokens
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    assert len({tuple(g.token_ids) for g in generations}) == len(generations)


def test_texts_end_a_response(folder: GetFolder, ready_engine: ReadyEngine) -> None:
    engine, _ = ready_engine(folder("qwen2"))
    whole = engine.generate(requests(4), sampling(1.0))
    ids = next(g.token_ids for g in whole if len(g.token_ids) > 10)
    pairs = [(ids[4], ids[5]), (ids[7], ids[8])]
    engine._stop_texts = StopTexts(letters(), tuple(letter(one) + letter(other) for one, other in pairs))
    check_stop_texts(whole, engine.generate(requests(4), sampling(1.0)), pairs)


def test_excluded_ids_are_never_drawn(folder: GetFolder) -> None:
    """Their head rows are likely, with and without truncation of the distribution; the oracle has them at -inf."""
    path = folder("qwen2_tied")
    model, plain = load_model(path), load_model(path)
    engine = TransformersEngine(
        path, torch.float32, Replica.of_rank(0, 1, 1), max_model_len=64, device=torch.device("cpu"), unknown_token_ids=UNKNOWN
    )
    for changed in (model, plain):
        make_ids_likely(changed, UNKNOWN)
    weights = named_weights(plain)
    engine.wake_weights()
    engine.update_weights(in_buckets(weights), list(weights))
    engine.wake_kv_cache()
    exclude_from_softmax(model, UNKNOWN)
    generations = engine.generate(requests(4), sampling(1.0))
    check_logprobs(model, generations, 1.0)
    mass = [logits_of(plain, g.request.prompt_token_ids, g.token_ids).softmax(-1)[:, list(UNKNOWN)].sum(-1) for g in generations]
    assert torch.cat(mass).mean() > 0.03
    assert [g.token_ids for g in engine.generate(requests(), sampling(0.0))] == [greedy_of(model, prompt, 24) for prompt in PROMPTS]
    flat = engine.generate(requests(40), sampling(2.0))
    assert {token for g in flat for token in g.token_ids} == set(range(VOCAB)) - set(UNKNOWN)
    cut = engine.generate(requests(8), sampling(1.0, top_p=0.9, top_k=40))
    assert not {token for g in [*generations, *cut] for token in g.token_ids} & set(UNKNOWN)


def test_batching_does_not_matter(folder: GetFolder, ready_engine: ReadyEngine) -> None:
    engine, _ = ready_engine(folder("qwen3"))
    how, wanted = sampling(1.0, top_p=0.95, top_k=50), requests(2)
    together = [(g.token_ids, g.finish_reason) for g in engine.generate(wanted, how)]
    alone = [(g.token_ids, g.finish_reason) for request in wanted for g in engine.generate([request], how)]
    assert alone == together
    backwards = engine.generate(wanted[::-1], how)
    assert [(g.token_ids, g.finish_reason) for g in backwards[::-1]] == together
    engine._cached_tokens = 100  # a KV cache for three or four rows at a time
    assert [(g.token_ids, g.finish_reason) for g in engine.generate(wanted, how)] == together


def test_three_syncs_with_sleep_between(folder: GetFolder, ready_engine: ReadyEngine) -> None:
    engine, model = ready_engine(folder("qwen2_tied"))
    seen = []
    for step in range(3):
        generations = engine.generate(requests(), sampling(1.0))
        check_logprobs(model, generations, 1.0)
        seen.append([g.token_ids for g in generations])
        engine.sleep()
        assert sum(parameter.numel() for parameter in engine.model.parameters()) == 0
        change_weights(model, seed=step)
        weights = named_weights(model)
        engine.wake_weights()
        engine.update_weights(in_buckets(weights), list(weights))
        engine.wake_kv_cache()
    assert seen[0] != seen[1] != seen[2]


def test_weights_keep_the_models_type(folder: GetFolder, make_engine: Callable[..., TransformersEngine]) -> None:
    weights = named_weights(load_model(folder("qwen2")))
    engine = make_engine(folder("qwen2"), torch.bfloat16)
    engine.wake_weights()
    engine.update_weights(in_buckets(weights), list(weights))
    engine.wake_kv_cache()
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())
    reference = load_model(folder("qwen2"), torch.bfloat16)
    for generation in engine.generate(requests(), sampling(1.0)):
        expected = logprobs_of(reference, generation.request.prompt_token_ids, generation.token_ids)
        assert (torch.tensor(generation.logprobs).double() - expected).abs().mean() < 0.05


def test_building_leaves_the_random_state_alone(folder: GetFolder, ready_engine: ReadyEngine) -> None:
    path = folder("qwen2")
    before = torch.get_rng_state()
    engine, _ = ready_engine(path)
    engine.generate(requests(), sampling(1.0))
    assert torch.equal(torch.get_rng_state(), before)
