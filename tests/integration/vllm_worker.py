"""Worker of test_vllm_engine.py: ``vllm_worker.py FOLDER TP REPORT`` on each rank; every case runs on all ranks of one launch.

One engine per process lives through all cases, as in training; some token ids are excluded in all of them. Rank 0 writes what it
measured and what its replica sampled to REPORT as JSON. Right answers come from plain transformers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.rollout_models import (
    EOS,
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
from vapo_mcore.config.schema import RolloutConfig, VllmConfig
from vapo_mcore.errors import RolloutError
from vapo_mcore.rollout.base import EngineState, Generation, GenerationRequest, RolloutEngine, SamplingConfig
from vapo_mcore.rollout.factory import build_rollout_engine
from vapo_mcore.rollout.seeds import sampling_seed
from vapo_mcore.rollout.stopping import StopTexts
from vapo_mcore.rollout.token_sampling import processed_logprobs
from vapo_mcore.rollout.vllm_parameters import holds
from vapo_mcore.weights.checksums import tensor_checksum

MAX_TOKENS = 32


class Run:
    def __init__(self, folder: Path, tp: int) -> None:
        self.report: dict[str, Any] = {}
        self.model, self.plain = load_model(folder), load_model(folder)
        for model in (self.model, self.plain):
            make_ids_likely(model, UNKNOWN)
        exclude_from_softmax(self.model, UNKNOWN)
        config = RolloutConfig(engine="vllm", max_response_length=MAX_TOKENS, vllm=VllmConfig(kv_cache_gib=0.0625, max_num_seqs=64))
        states = torch.get_rng_state(), np.random.get_state()[1].tolist()
        start = time.perf_counter()
        self.engine: RolloutEngine = build_rollout_engine(
            config,
            folder,
            torch.float32,
            tensor_parallel_size=tp,
            max_model_len=192,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            seed=7,
            unknown_token_ids=UNKNOWN,
        )
        self.report["build_seconds"] = time.perf_counter() - start
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == np.random.get_state()[1].tolist()

    def sync(self, *, verify: bool = False) -> None:
        weights = named_weights(self.model)
        self.engine.wake_weights()
        report = self.engine.update_weights(in_buckets(weights), list(weights), checksum=tensor_checksum if verify else None)
        assert (report.names, report.bytes) == (len(weights), sum(t.numel() * t.element_size() for t in weights.values()))
        if verify:
            assert report.checksums == {name: tensor_checksum(tensor) for name, tensor in weights.items()}
        self.engine.wake_kv_cache()

    def requests(self, samples: int = 1) -> list[GenerationRequest]:
        """The same on all replicas, unlike in training, so that replicas and layouts can be compared."""
        return [
            GenerationRequest(f"p{i}", j, prompt, sampling_seed(1, 2, f"p{i}", j))
            for i, prompt in enumerate(PROMPTS)
            for j in range(samples)
        ]

    def sample(self, temperature: float, samples: int = 1, **changes: Any) -> list[Generation]:
        how = SamplingConfig(**({"temperature": temperature, "top_p": 1.0, "top_k": -1, "max_tokens": MAX_TOKENS} | changes))
        wanted = self.requests(samples)
        generations = self.engine.generate(wanted, how)
        assert [g.request for g in generations] == wanted
        return generations

    def mean_logprob_difference(self, generations: list[Generation], temperature: float) -> float:
        differences = [
            torch.tensor(g.logprobs).double() - logprobs_of(self.model, g.request.prompt_token_ids, g.token_ids, temperature)
            for g in generations
        ]
        flat = torch.cat(differences).abs()
        assert flat.numel() == sum(len(g.token_ids) for g in generations)
        return float(flat.mean())


def nothing_before_the_first_sync(run: Run) -> None:
    assert run.engine.state is EngineState.ASLEEP
    for allowed in ("wake_weights", None):
        try:
            run.engine.generate(run.requests(), SamplingConfig(1.0, 1.0, -1, 4))
        except RolloutError as error:
            assert "generate needs state READY" in str(error)
        else:
            raise AssertionError(f"generated in state {run.engine.state}")
        if allowed:
            run.engine.wake_weights()
    run.engine.sleep()


def cpu_seconds() -> float:
    """Of this process and of those it has started: unlike the clock, the same on a busy machine."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def greedy_equals_transformers(run: Run) -> None:
    run.sync(verify=True)
    start = cpu_seconds()
    generations = run.sample(0.0)
    run.report["first_generation_cpu_seconds"] = cpu_seconds() - start
    assert [g.token_ids for g in generations] == [greedy_of(run.model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    run.report["logprob_difference_greedy"] = run.mean_logprob_difference(generations, 1.0)


def sampled_logprobs_equal_transformers(run: Run) -> None:
    for temperature in (1.0, 0.5, 1.3):
        difference = run.mean_logprob_difference(run.sample(temperature, samples=4), temperature)
        run.report[f"logprob_difference_at_{temperature}"] = difference
        assert difference <= 1e-3


def distributions_equal_transformers(run: Run) -> None:
    """Whole distributions of prompts of two and more tokens; vLLM's model is left as it was."""
    before = run.sample(1.0)
    sequences = [prompt for prompt in PROMPTS if len(prompt) > 1] + [[4, 13]]
    found = run.engine.distributions(sequences)
    assert [tuple(part.shape) for part in found] == [(len(ids) - 1, VOCAB) for ids in sequences]
    for ids, part in zip(sequences, found, strict=True):
        expected = logits_of(run.model, ids[:1], ids[1:]).log_softmax(-1)
        assert torch.equal(part == -torch.inf, expected == -torch.inf)
        assert (part - expected).nan_to_num(0.0, 0.0, 0.0).abs().max() <= 1e-3
    assert run.sample(1.0) == before


def top_k_and_top_p_keep_to_their_tokens(run: Run) -> None:
    how = SamplingConfig(0.8, 0.7, 9, MAX_TOKENS)
    for g in run.sample(0.8, samples=2, top_p=0.7, top_k=9):
        with torch.no_grad():
            logits = run.model(torch.tensor([[*g.request.prompt_token_ids, *g.token_ids]])).logits[
                0, len(g.request.prompt_token_ids) - 1 : -1
            ]
        expected = processed_logprobs(logits, how).gather(-1, torch.tensor(g.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(g.logprobs)).abs().max() <= 1e-3


def ends_and_vocabulary(run: Run) -> None:
    generations = run.sample(1.0, samples=8)
    for g in generations:
        assert (g.token_ids[-1] == EOS) == (g.finish_reason == "stop")
        assert EOS not in g.token_ids[:-1]
        assert g.finish_reason == "stop" or len(g.token_ids) == MAX_TOKENS
        assert len(g.logprobs) == len(g.token_ids)
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    ids = {token for g in run.sample(2.0, samples=40) for token in g.token_ids}  # flat enough to hit every row there is
    assert ids == set(range(VOCAB)) - set(UNKNOWN)
    probabilities = [
        logits_of(run.plain, g.request.prompt_token_ids, g.token_ids).softmax(-1)[:, list(UNKNOWN)].sum(-1) for g in generations
    ]
    assert torch.cat(probabilities).mean() > 0.03  # what they would have had


def texts_end_a_response(run: Run) -> None:
    """vLLM itself stops there (it does not sample on, to be cut later), and what it sampled is what is returned."""
    whole = run.sample(1.0, samples=4)
    ids = next(g.token_ids for g in whole if len(g.token_ids) > 10)
    pairs = [(ids[4], ids[5]), (ids[7], ids[8])]
    engine: Any = run.engine
    engine._stop_texts = StopTexts(letters(), tuple(letter(one) + letter(other) for one, other in pairs))
    engine._give_tokenizer()
    sampled: list[int] = []
    generate = engine._llm.generate

    def counted(*arguments: Any, **options: Any) -> Any:
        outputs = generate(*arguments, **options)
        sampled.extend(len(output.outputs[0].token_ids) for output in outputs)
        return outputs

    engine._llm.generate = counted
    try:
        stopped = run.sample(1.0, samples=4)
    finally:
        del engine._llm.generate
        engine._stop_texts = None
        engine._give_tokenizer()
    check_stop_texts(whole, stopped, pairs)
    assert sampled == [len(g.token_ids) for g in stopped]


def seeds_decide(run: Run) -> None:
    """Repeated, reordered and split over calls: the same responses; neighbours differ."""
    wanted, how = run.requests(4), SamplingConfig(1.0, 1.0, -1, MAX_TOKENS)
    together = [g.token_ids for g in run.engine.generate(wanted, how)]
    assert [g.token_ids for g in run.engine.generate(wanted, how)] == together
    backwards = [g.token_ids for g in run.engine.generate(wanted[::-1], how)][::-1]
    split = [g.token_ids for part in (wanted[:5], wanted[5:6], wanted[6:]) for g in run.engine.generate(part, how)]
    run.report["equal_when_rebatched"] = float(np.mean([a == b == c for a, b, c in zip(together, backwards, split, strict=True)]))
    assert run.report["equal_when_rebatched"] >= 0.9
    assert len({tuple(ids) for ids in together}) == len(together)
    run.report["responses"] = together


def turns_reuse_what_earlier_ones_cached(run: Run) -> None:
    """A call that continues the one before reads its cached blocks (of 128 tokens on CPU); any other call begins with an empty cache."""
    engine: Any = run.engine
    generate, cached = engine._llm.generate, []

    def counted(*arguments: Any, **options: Any) -> Any:
        outputs = generate(*arguments, **options)
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    how = SamplingConfig(1.0, 1.0, -1, 16)
    turn = GenerationRequest("long", 0, [4 + number % 60 for number in range(150)], 5)
    engine._llm.generate = counted
    try:
        (first,) = engine.generate([turn], how)
        following = GenerationRequest("long", 0, [*turn.prompt_token_ids, *first.token_ids, 9, 10], 6)
        (reused,) = engine.generate([following], replace(how, continues=True))
        (fresh,) = engine.generate([following], how)
    finally:
        del engine._llm.generate
    assert cached == [0, 128, 0]
    assert reused.token_ids == fresh.token_ids
    assert torch.allclose(torch.tensor(reused.logprobs), torch.tensor(fresh.logprobs), atol=1e-4)


def random_state_is_left_alone(run: Run) -> None:
    before = torch.get_rng_state()
    run.sample(1.0)
    assert torch.equal(before, torch.get_rng_state())


def no_requests_for_this_replica(run: Run) -> None:
    """Replicas are independent: one may have work while another has none."""
    wanted = run.requests() if run.engine.replica_index == 0 else []
    assert len(run.engine.generate(wanted, SamplingConfig(1.0, 1.0, -1, 4))) == len(wanted)


def three_syncs_with_sleep_between(run: Run) -> None:
    seen = [[g.token_ids for g in run.sample(1.0)]]
    for step in range(3):
        run.engine.sleep()
        change_weights(run.model, seed=step)
        run.sync(verify=step == 2)
        generations = run.sample(0.0)
        assert [g.token_ids for g in generations] == [greedy_of(run.model, prompt, MAX_TOKENS) for prompt in PROMPTS]
        generations = run.sample(1.0)
        difference = run.mean_logprob_difference(generations, 1.0)
        assert difference <= 1e-3
        run.report[f"logprob_difference_after_sync_{step}"] = difference
        seen.append([g.token_ids for g in generations])
    assert all(a != b for a, b in pairwise(seen))
    report = run.engine.last_sync
    assert report is not None
    run.report["sync_seconds"], run.report["load_seconds"] = report.seconds, report.load_seconds


def wrong_names_are_refused(run: Run) -> None:
    run.engine.sleep()
    run.engine.wake_weights()
    weights = named_weights(run.model)
    lacking = {name: tensor for name, tensor in weights.items() if "k_proj" not in name} | {"lm_head.bias": torch.zeros(VOCAB)}
    for announced, message in ((list(lacking), "missing"), (list(weights), "model.layers.1.self_attn.k_proj.weight")):
        try:
            run.engine.update_weights(in_buckets(lacking), announced)
        except RolloutError as error:
            assert message in str(error) and "lm_head.bias" in str(error)
        else:
            raise AssertionError("a sync without k_proj was accepted")
        assert run.engine.state is EngineState.WEIGHTS_AWAKE
    run.engine.sleep()
    run.sync()
    assert [g.token_ids for g in run.sample(0.0)] == [greedy_of(run.model, prompt, MAX_TOKENS) for prompt in PROMPTS]


def calls_of_the_gpu_path_exist(run: Run) -> None:
    """What only a GPU can run is at least called as the installed vLLM wants it."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    assert "level" in signature(LLM.sleep).parameters and "tags" in signature(LLM.wake_up).parameters
    assert {"enable_sleep_mode", "gpu_memory_utilization", "num_gpu_blocks_override"} <= set(signature(EngineArgs).parameters)


def own_parameters_are_compared_value_by_value(run: Run) -> None:
    """What verifies a sync on a GPU, on vLLM's real modules: on CPU the engine's own are repacked, so a second model is filled, and left
    as loaded. Every HF tensor is found in the fused and sharded parameters; one changed number of it is, too."""
    assert run.engine.holds("model.norm.weight", named_weights(run.model)["model.norm.weight"]) is None
    model = vllm_model_as_loaded(run)
    weights = named_weights(run.model)
    model.load_weights(iter(weights.items()))
    tp = run.engine.replica.size  # type: ignore[attr-defined]
    for name, tensor in weights.items():
        assert holds(model, name, tensor), name
        found = 0
        for position in (0, tensor.numel() // 2 - 1, tensor.numel() - 1):
            changed = tensor.clone()
            changed.view(-1)[position] += 1.0
            found += not holds(model, name, changed)
        everywhere = torch.tensor(found)
        dist.all_reduce(everywhere, group=tp_group())
        assert everywhere >= 3, (name, found)  # each on the rank that has it, or on all that do
        assert tp > 1 or found == 3
    run.report["compared_parameters"] = len(weights)


def vllm_model_as_loaded(run: Run) -> Any:
    """A model of vLLM's own classes in the engine's configuration, before anything is done to its weights."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = deepcopy(run.engine._llm.llm_engine.vllm_config)  # type: ignore[attr-defined]
    config.compilation_config.static_forward_context = {}  # which knows the names of the engine's attention layers
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        return initialize_model(vllm_config=config)


def tp_group() -> Any:
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


CASES: list[Callable[[Run], None]] = [
    nothing_before_the_first_sync,
    greedy_equals_transformers,
    sampled_logprobs_equal_transformers,
    distributions_equal_transformers,
    top_k_and_top_p_keep_to_their_tokens,
    ends_and_vocabulary,
    texts_end_a_response,
    seeds_decide,
    turns_reuse_what_earlier_ones_cached,
    random_state_is_left_alone,
    no_requests_for_this_replica,
    three_syncs_with_sleep_between,
    wrong_names_are_refused,
    own_parameters_are_compared_value_by_value,
    calls_of_the_gpu_path_exist,
]

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    this_run = Run(Path(sys.argv[1]), int(sys.argv[2]))
    for case in CASES:
        started = time.perf_counter()
        case(this_run)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok ({time.perf_counter() - started:.2f} s)", flush=True)
    if dist.get_rank() == 0:
        Path(sys.argv[3]).write_text(json.dumps(this_run.report))
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    dist.destroy_process_group()
