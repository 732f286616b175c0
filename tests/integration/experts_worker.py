"""Worker of test_engine_experts.py: ``experts_worker.py FOLDER REPORT`` on each of two ranks; vLLM's choices, and the trainer with them.

The cache of the engine is so small that prefixes are shared and requests are preempted. Right choices come from plain transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.process_groups import release_groups
from tests.rollout_models import in_buckets, load_model, named_weights
from vapo_mcore.config.architecture import read_architecture
from vapo_mcore.config.schema import RolloutConfig, VllmConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.errors import EngineFailure
from vapo_mcore.megatron.engine import MegatronModel, choices_name
from vapo_mcore.megatron.parallel import ParallelContext, initialize_distributed, initialize_parallel
from vapo_mcore.rollout.base import EngineState, Generation, GenerationRequest, SamplingConfig
from vapo_mcore.rollout.factory import build_rollout_engine
from vapo_mcore.weights.loader import load_hf_into

SAMPLING = SamplingConfig(1.0, 1.0, -1, 60, return_experts=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2_ep2": {"context_parallel_size": 2, "expert_model_parallel_size": 2},
}
NOISE = 2e-8
"""Scale of what tells the first three experts' routers apart, a few roundings of their weights: most choices depend on it. Mixing weights
come from the trainer's routers, so they differ from the engine's in proportion to it, and the log-probs with them."""


def requests() -> list[GenerationRequest]:
    """Eight responses to one prompt of more than a block of the cache, and four to each of two short prompts."""
    shared = torch.randint(3, 70, (135,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [shared, shared[:120], [4, 13, 5]]
    return [
        GenerationRequest(f"p{number}", i, ids, 10 * number + i)
        for number, ids in enumerate(prompts)
        for i in range(8 if number == 0 else 4)
    ]


def sync(engine: Any, model: Any) -> None:
    weights = named_weights(model)
    engine.wake_weights()
    engine.update_weights(in_buckets(weights), list(weights))
    engine.wake_kv_cache()


def choices_of(model: Any, ids: list[int]) -> Tensor:
    """Experts of transformers' own routers, sorted: int64 [tokens, layers, topk]."""
    found: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _gate, _inputs, output: found.append(output[0])) for gate in gates]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([logits.topk(gate.top_k).indices.sort(-1).values for logits, gate in zip(found, gates, strict=True)], dim=1)


def recorded_choices(engine: Any, model: Any, report: dict[str, Any]) -> None:
    """Every token's experts but the last one's, with prefixes from the cache and after preemptions, are transformers'."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request

    def preempt(request: Any, *arguments: Any, **named: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *arguments, **named)

    with mock.patch.object(scheduler, "_preempt_request", preempt):
        generations = engine.generate(requests(), SAMPLING)
    other = pairs = 0
    for g in generations:
        ids = [*g.request.prompt_token_ids, *g.token_ids]
        assert g.experts is not None and g.experts.dtype == torch.uint8
        right = choices_of(model, ids)[:-1]
        assert g.experts.shape == right.shape, (g.experts.shape, right.shape)
        other += int((g.experts.long().sort(-1).values != right).any(-1).sum())
        pairs += right.shape[0] * right.shape[1]
    settings = engine.settings()
    report |= {"preempted": len(preempted), "other": other, "pairs": pairs, "prefix_caching": settings["prefix_caching"]}
    report["recorder_holds"] = len(scheduler.aux_output_connector.requests)
    assert all(g.experts is None for g in engine.generate(requests()[:2], SamplingConfig(1.0, 1.0, -1, 4)))


def faulty_engines(engine: Any, model: Any, report: dict[str, Any]) -> None:
    """An engine that returns too few layers, tokens or nothing ends with the counts."""
    original = engine._generate

    def changed(change: Any) -> str:
        def generate(wanted: Any, how: Any) -> Any:
            return [change(g) for g in original(wanted, how)]

        with mock.patch.object(engine, "_generate", generate):
            try:
                engine.generate(requests()[-1:], SAMPLING)
            except EngineFailure as error:
                assert engine.state is EngineState.BROKEN
                engine._state = EngineState.READY  # nothing is wrong with vLLM: rebuilt once, below
                return str(error)
        raise AssertionError("a faulty engine was accepted")

    def with_experts(experts: Any) -> Any:
        return lambda g: Generation(g.request, g.token_ids, g.logprobs, g.finish_reason, experts(g.experts))

    report["no_experts"] = changed(with_experts(lambda found: None))
    report["few_layers"] = changed(with_experts(lambda found: found[:, :1]))
    report["few_tokens"] = changed(with_experts(lambda found: found[:-2]))
    report["zeros"] = changed(with_experts(lambda found: found * torch.tensor([[[1], [0]]], dtype=torch.uint8)))
    engine.rebuild()  # records again
    sync(engine, model)


def nearly_equal_routers(model: Any, seed: int) -> None:
    """Let three experts differ by ``NOISE`` alone: which of them are taken hangs on ``seed``, what they weigh does not."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        for expert in range(3):
            weight[expert] = weight[0]
        weight[:3] += NOISE * torch.randn(weight[:3].shape, generator=generator)


def trainer(folder: Path, parallel: ParallelContext) -> MegatronModel:
    """The policy with the engine's weights, but with routers that choose otherwise."""
    architecture = read_architecture(folder)

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, architecture, parallel, role="policy")

    settings: Any = SimpleNamespace(dtype="float32", attention="auto", recompute="none")
    return MegatronModel("policy", architecture, settings, parallel, load_weights=load)


def microbatches(generations: list[Generation], parallel: ParallelContext) -> list[tuple[list[int], MicroBatch]]:
    """This rank's rows in two micro-batches, with the choices as a rollout batch lays them out."""
    mine = list(range(parallel.data_parallel_rank, len(generations), parallel.data_parallel_size))
    result = []
    for rows in (mine[::2], mine[1::2]):
        ids = [[*generations[row].request.prompt_token_ids, *generations[row].token_ids] for row in rows]
        layout = ThdLayout(
            [len(each) for each in ids],
            context_parallel_size=parallel.context_parallel_size,
            context_parallel_rank=parallel.context_parallel_rank,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
        )
        tokens = torch.tensor([token for each in ids for token in each])
        result.append((rows, MicroBatch(layout, torch.tensor(rows), {"tokens": tokens})))
    return result


def compare(folder: Path, generations: list[Generation], parallel: ParallelContext) -> dict[str, float]:
    """Log-probs of the trainer with and without the engine's choices, and the routing of the pass with them and of one by its record."""
    model = trainer(folder, parallel)
    assert model.routing is not None
    with torch.no_grad():
        noise = torch.Generator().manual_seed(99)
        all_layers = [NOISE * torch.randn((3, 128), generator=noise) for _ in range(2)]
        for router in model.routing.routers:
            router.weight[:3] = router.weight[:3].mean(0, keepdim=True) + all_layers[router.layer_number - 1]
    parts = microbatches(generations, parallel)
    plain = [part for _, part in parts]
    given = []
    for rows, part in parts:
        empty = torch.zeros_like(generations[0].experts[:1])  # type: ignore[index]
        choices = torch.cat([each for row in rows for each in (generations[row].experts, empty)])  # type: ignore[misc]
        given.append(part.with_tensors(**{ENGINE_CHOICES: choices[:, model.routing.layers]}))
    mean, largest = _differences(generations, parts, model.forward(plain)["logprobs"])
    errors = {"without_mean": mean, "without_max": largest}
    model.routing.reset_statistics()
    found = model.forward(given, record_choices=True)
    seen = model.routing.statistics()
    errors["with_mean"], errors["with_max"] = _differences(generations, parts, found["logprobs"])
    errors["changed_frac"] = seen.changed / (seen.tokens * seen.load.shape[0])
    recorded = found[choices_name("policy")]
    wrong = own = 0
    for part, choices in zip(given, recorded, strict=True):
        last = torch.zeros(len(choices), dtype=torch.bool)
        last[part.layout.last_token_index] = True
        wrong += int((choices[~last] != part.tensors[ENGINE_CHOICES][~last]).sum())
        own += int((choices[last][..., 0] == choices[last][..., 1]).sum())  # zeros are no choice: the trainer made one
    again = model.forward(
        [part.with_tensors(**{choices_name("policy"): each}) for part, each in zip(plain, recorded, strict=True)], record_choices=True
    )
    errors["routing_of_the_next_pass"] = float(
        sum(int((a != b).sum()) for a, b in zip(recorded, again[choices_name("policy")], strict=True))
    )
    errors["logprobs_of_the_next_pass"] = max(float((a - b).abs().max()) for a, b in zip(found["logprobs"], again["logprobs"], strict=True))
    return errors | {"unlike_the_engine": float(wrong), "last_without_choice": float(own)}


def _differences(generations: list[Generation], parts: list[tuple[list[int], MicroBatch]], logprobs: list[Tensor]) -> tuple[float, float]:
    """Mean and largest |trainer - vLLM| log-prob of this rank's sampled tokens."""
    gaps = []
    for (rows, part), packed in zip(parts, logprobs, strict=True):
        for row, mine in zip(rows, packed.split(part.layout.lengths.tolist()), strict=True):
            g = generations[row]
            gaps.append((mine[len(g.request.prompt_token_ids) :].double() - torch.tensor(g.logprobs).double()).abs())
    return float(torch.cat(gaps).mean()), float(torch.cat(gaps).max())


def main() -> None:
    torch.set_num_threads(1)
    initialize_distributed(5)
    folder, report = Path(sys.argv[1]), {}
    shape = read_architecture(folder).expert_choices
    config = RolloutConfig(engine="vllm", max_response_length=60, vllm=VllmConfig(kv_cache_gib=0.0625, max_num_seqs=16, num_gpu_blocks=8))
    layout = {"rank": dist.get_rank(), "world_size": 2, "tensor_parallel_size": 1}
    engine = build_rollout_engine(config, folder, torch.float32, **layout, max_model_len=200, seed=7, expert_choices=shape)
    model = load_model(folder)
    sync(engine, model)
    recorded_choices(engine, model, report)
    print(json.dumps(report), flush=True)
    faulty_engines(engine, model, report)
    engine.sleep()
    nearly_equal_routers(model, seed=3)
    sync(engine, model)
    generations = engine.generate(requests(), SAMPLING)
    changed = folder / "changed"
    model.save_pretrained(changed)  # writes on rank 0 alone
    dist.barrier()
    for name, degrees in LAYOUTS.items():
        settings = {
            "world_size": 2,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,
            "sequence_parallel": None,
            "equal_microbatches": False,
            "timeout_minutes": 5,
        }
        errors = compare(changed, generations, initialize_parallel(SimpleNamespace(**settings | degrees)))  # type: ignore[arg-type]
        table = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        report[name] = dict(zip(errors, table.tolist(), strict=True))
        release_groups()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
