"""Router replay in any layout: choices of a first pass, routers changed, and an update by the old choices, against float64.

The reference is transformers in float64 whose routers take the choices of its own first pass (``problem.Oracle.watch_routers``). The update
has other micro-batches than the first pass, and the routers' losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import problem
import torch
import torch.distributed as dist
import worker
from safetensors.torch import load_file, save_file
from torch import Tensor

from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.rollout_batch import ENGINE_CHOICES
from vapo_mcore.megatron.engine import MegatronModel, choices_name
from vapo_mcore.megatron.parallel import ParallelContext
from vapo_mcore.megatron.router import Router
from vapo_mcore.megatron.routing import RouterCoefs, RoutingStatistics
from vapo_mcore.weights.export import Exporter

COEFS = RouterCoefs(balance=problem.BALANCE, z=problem.Z_LOSS)


def reference(folder: Path, workdir: Path) -> dict[str, Tensor]:
    """Right answers, made by the world of one."""
    path = workdir / f"{folder.name}.replay.reference.safetensors"
    if dist.get_world_size() == 1 and not path.exists():
        save_file({name: tensor.detach().clone().contiguous() for name, tensor in _make(folder).items()}, path)
    return load_file(path)


def _make(folder: Path) -> dict[str, Tensor]:
    batch = problem.make_batch(folder.name)
    oracle = problem.Oracle(folder, batch)
    oracle.watch_routers()
    logprobs, _ = oracle.policy_outputs()
    old = [logp.detach() + noise.double() for logp, noise in zip(logprobs, batch["noise"], strict=True)]
    chosen = oracle.choices()
    data = {"choices": torch.cat(chosen), "old": torch.cat(old)}
    oracle.perturb_routers()
    oracle.policy_outputs()
    data["changed"] = (torch.cat(oracle.choices()).sort(-1).values != data["choices"].sort(-1).values).any(-1).double().mean()
    oracle.forced = chosen
    for role in ("policy", "critic"):
        main = oracle.policy_loss("token", old) if role == "policy" else oracle.value_loss()
        balance, z_loss = oracle.router_losses()
        data |= {f"{role}.loss": main, f"{role}.balance": balance, f"{role}.z": z_loss}
        total = main + problem.BALANCE * balance + problem.Z_LOSS * z_loss
        data |= {f"{role}.grad.{name}": grad for name, grad in oracle.gradients(total, critic=role == "critic").items()}
    data["logprobs"], data["values"] = torch.cat(oracle.policy_outputs()[0]), torch.cat(oracle.values()[0])
    return data


def perturb(model: MegatronModel) -> None:
    """Change the routers, as an update would."""
    assert model.routing is not None
    assert model.optimizer is not None
    with torch.no_grad():
        for router in model.routing.routers:
            router.weight += problem.router_noise(router.layer_number - 1, router.weight)
    model.optimizer.megatron.reload_model_params()


@contextmanager
def routing_maps(model: MegatronModel) -> Iterator[dict[Router, list[Tensor]]]:
    """The maps [local tokens, experts] that reach the experts in passes with gradients, by router, in the order of the micro-batches."""
    assert model.routing is not None
    found: dict[Router, list[Tensor]] = {router: [] for router in model.routing.routers}

    def note(router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            found[router].append(output[1])

    hooks = [router.register_forward_hook(note) for router in found]
    yield found
    for hook in hooks:
        hook.remove()


def unlike(
    maps: dict[Router, list[Tensor]], batches: list[MicroBatch], choices: Tensor, sizes: list[int], parallel: ParallelContext
) -> int:
    """Count the (token, layer) pairs of this rank whose experts are others than ``choices`` [all tokens, layers, topk]."""
    wrong = 0
    for router, found in maps.items():
        assert len(found) == len(batches)
        for batch, got in zip(batches, found, strict=True):
            parts = choices[:, router.layer_number - 1].split(sizes)
            packed = torch.cat([parts[row] for row in batch.rows.tolist()]) if len(batch.rows) else choices[:0, 0]
            expected = torch.zeros(packed.shape[0], got.shape[1], dtype=torch.bool).scatter(1, packed, True).to(got.device)
            layout = batch.layout.with_padding(got.shape[0] * parallel.context_parallel_size * (parallel.tensor_model_parallel_size))
            expected, real = layout.shard(expected, False), layout.local_token_mask
            if parallel.sequence_parallel:
                expected, real = (
                    x.chunk(parallel.tensor_model_parallel_size)[parallel.tensor_model_parallel_rank] for x in (expected, real)
                )
            wrong += int(((got != expected).any(-1) & real).sum())
    return wrong


def compare(case: worker.Case, parallel: ParallelContext, folder: Path, workdir: Path) -> dict[str, float]:
    """Differences of this rank from the right answers."""
    expected = reference(folder, workdir)
    assert expected["changed"] > 0.1, "the choices must be others without replay"
    sizes = [sum(shape) for shape in problem.SHAPES]
    tensors = worker.token_tensors(case.model, "token", list(expected["old"].split(sizes)))
    _, first = worker.microbatches(case, parallel, tensors)
    _, second = worker.microbatches(replace(case, microbatches=case.microbatches + 2), parallel, tensors)
    errors: dict[str, float] = {}
    for role in ("policy", "critic"):
        model = worker.build(role, case, folder, parallel)
        assert model.routing is not None
        exporter = Exporter(model.chunks, model.architecture, parallel, role=role)  # type: ignore[arg-type]
        layers = [router.layer_number - 1 for router in model.routing.routers]
        name = choices_name(role)  # type: ignore[arg-type]
        choices = _by_row(first, model.forward(first, record_choices=True)[name], sizes)
        mine = expected["choices"][:, layers].split(sizes)
        differing = [(choices[row].long().sort(-1).values != mine[row].sort(-1).values).any(-1).sum() for row in choices]
        errors[f"{role}_choices"] = float(sum(differing))
        perturb(model)
        carrying = [batch.with_tensors(**{name: _packed(choices, batch).to(parallel.device)}) for batch in second]
        output = "logprobs" if role == "policy" else "values"
        found = _by_row(second, model.forward(carrying)[output], sizes)
        right = expected[output].split(sizes)
        errors[output] = max(float((tensor.double() - right[row]).abs().max()) for row, tensor in found.items())
        if role == "policy":
            errors |= _engine(model, second, choices, right, sizes)
        errors |= _update(case, model, carrying, second, expected, sizes)
        path = workdir / f"{case.model}.{role}.replay.weights.safetensors"
        errors[f"{role}_weights_over_lr"] = worker.compare_weights(worker.weights(exporter), path)
    return errors


def _engine(
    model: MegatronModel, batches: list[MicroBatch], choices: dict[int, Tensor], logprobs: tuple[Tensor, ...], sizes: list[int]
) -> dict[str, float]:
    """A pass by the engine's choices, which lack those of the last tokens: their log-probs, and what the pass records for its updates."""
    given = []
    for batch in batches:
        packed = _packed(choices, batch)
        packed[batch.layout.last_token_index.cpu()] = 0
        given.append(batch.with_tensors(**{ENGINE_CHOICES: packed.to(model.parallel.device)}))
    found = model.forward(given, record_choices=True)
    rows = _by_row(batches, found["logprobs"], sizes)
    wrong = 0
    for row, chosen in _by_row(batches, found[choices_name("policy")], sizes).items():
        wrong += int((chosen[:-1] != choices[row][:-1]).any(-1).sum())
        ordered = chosen[-1].long().sort(-1).values  # the trainer's own, different experts
        wrong += int((ordered[..., 1:] == ordered[..., :-1]).any(-1).sum())
    return {
        "policy_engine_logprobs": max((float((tensor.double() - logprobs[row]).abs().max()) for row, tensor in rows.items()), default=0.0),
        "policy_engine_routing": float(wrong),
    }


def _packed(choices: dict[int, Tensor], batch: MicroBatch) -> Tensor:
    """The choices of a micro-batch's rows, on the host: [tokens, layers of this rank, topk]."""
    return torch.cat([choices[row] for row in batch.rows.tolist()] or [next(iter(choices.values()))[:0]])


def _by_row(batches: list[MicroBatch], parts: list[Tensor], sizes: list[int]) -> dict[int, Tensor]:
    """Row -> its tokens' part of what a pass returned."""
    result: dict[int, Tensor] = {}
    for batch, part in zip(batches, parts, strict=True):
        rows = batch.rows.tolist()
        result |= dict(zip(rows, part.cpu().split([sizes[row] for row in rows]), strict=True)) if rows else {}
    return result


def _update(
    case: worker.Case,
    model: MegatronModel,
    carrying: list[MicroBatch],
    plain: list[MicroBatch],
    expected: dict[str, Tensor],
    sizes: list[int],
) -> dict[str, float]:
    role, parallel = model.role, model.parallel
    assert model.routing is not None
    loss: Any = worker.PolicyTestLoss() if role == "policy" else worker.ValueTestLoss()
    with routing_maps(model) as maps:
        model.accumulate(plain, loss)
    without = torch.tensor(float(unlike(maps, plain, expected["choices"], sizes, parallel)), device=parallel.device)
    dist.all_reduce(without)
    assert without > 0, "without replay the update is routed otherwise"
    model.routing.reset_statistics()
    routing = model.routing
    with routing_maps(model) as maps:

        def look(stats: dict[str, float]) -> tuple[int, float, RoutingStatistics, dict[str, Tensor]]:
            found = unlike(maps, carrying, expected["choices"], sizes, parallel), stats["loss"], routing.statistics()
            return *found, worker.gradients(model)

        result, (wrong, main, seen, found) = worker.two_updates(model, carrying, loss, look, COEFS)
    errors = {f"{role}_routing": float(wrong), f"{role}_loss": abs(main - expected[f"{role}.loss"].item())}
    tokens, layers = sum(sizes), expected["choices"].shape[1]
    load = torch.stack([torch.bincount(expected["choices"][:, layer].flatten(), minlength=4) for layer in range(layers)]).double()
    ours = seen.load[torch.argsort(_layers(model))]
    errors[f"{role}_load"] = float((ours - load).abs().max()) + abs(seen.tokens - tokens)
    errors[f"{role}_balance"] = abs(seen.balance - expected[f"{role}.balance"].item())
    errors[f"{role}_z"] = abs(seen.z - expected[f"{role}.z"].item()) / expected[f"{role}.z"].item()
    assert 0.05 < seen.changed / (tokens * layers) < 0.95
    grads = {name.removeprefix(f"{role}.grad."): grad for name, grad in expected.items() if name.startswith(f"{role}.grad.")}
    errors[f"{role}_gradient"] = worker.gradient_error(found, grads)
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm().item()
    errors[f"{role}_grad_norm"] = abs(result.grad_norm - norm) / norm
    return errors


def _layers(model: MegatronModel) -> Tensor:
    """Layer number of each row of the statistics."""
    assert model.routing is not None
    mine = torch.tensor([router.layer_number for router in model.routing.routers], device=model.parallel.device)
    parts = [torch.empty_like(mine) for _ in range(model.parallel.pipeline_model_parallel_size)]
    dist.all_gather(parts, mine, group=model.parallel.pipeline_model_parallel_group)
    return torch.cat(parts).cpu()
