"""Worker of ranks: every layout of one world size against the float64 answers and the single process. Prints one JSON line a case.

    worker.py WORKDIR

WORKDIR holds the models; a world of one writes the reference files that the other world sizes compare with.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import problem
import torch
import torch.distributed as dist
from cases import BF16, Case, bfloat16_cases, layout_cases, replay_cases
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.process_groups import release_groups
from vapo_mcore.algorithm.histogram import histogram_value_terms
from vapo_mcore.algorithm.losses import policy_loss_terms, positive_nll_terms, value_loss_terms
from vapo_mcore.algorithm.objectives import Sequences, gspo_terms
from vapo_mcore.config.architecture import ValueBins, read_architecture
from vapo_mcore.config.schema import OptimizerConfig, ParallelConfig
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.data.thd import ThdLayout
from vapo_mcore.megatron.engine import MegatronModel, StepResult, output_row_norms
from vapo_mcore.megatron.parallel import ParallelContext, critic_layout, initialize_parallel
from vapo_mcore.megatron.routing import RouterCoefs
from vapo_mcore.weights.export import Exporter
from vapo_mcore.weights.loader import load_hf_into

T = TypeVar("T")
LR = 1e-3
# eps well above the rounding noise of a gradient element (some 1e-9, where their root mean square is 2e-3): with AdamW's 1e-8 the
# update of an element whose gradient is nearly zero is its noise, scaled up to a full learning rate.
OPTIMIZER = OptimizerConfig(lr=LR, eps=1e-5, weight_decay=0.1, clip_grad=1.0, warmup_rollouts=0)


class PolicyTestLoss:
    """Surrogate + positive NLL - entropy bonus, from the package's per-token terms and prepared weights."""

    tensors = ("old_logprobs", "advantages", "loss_weight", "positive", "positive_weight", "token_weight")
    temperature = 1.0
    needs_entropy = True

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        terms, extra = self.surrogate(outputs, batch)
        nll = positive_nll_terms(outputs["logprobs"], batch["mask"], batch["positive"])
        loss = (terms * batch["loss_weight"]).sum() + problem.MU * (nll * batch["positive_weight"]).sum()
        loss = loss - problem.ENTROPY * (outputs["entropy"] * batch["token_weight"]).sum()
        return loss, {"approx_kl": (extra["approx_kl"] * batch["token_weight"]).sum()}

    def surrogate(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        read = (outputs["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"])
        return policy_loss_terms(*read, clip_low=problem.CLIP_LOW, clip_high=problem.CLIP_HIGH)


class SequenceTestLoss(PolicyTestLoss):
    """The same with GSPO's surrogate, whose ratio is of a sequence that may lie on several context-parallel ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def surrogate(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        read = (outputs["logprobs"], batch["old_logprobs"], batch["advantages"], batch["mask"])
        sequences = Sequences(batch["cu_seqlens"], self.group)
        return gspo_terms(*read, sequences, clip_low=problem.SEQUENCE_CLIP_LOW, clip_high=problem.SEQUENCE_CLIP_HIGH)


class ValueTestLoss:
    tensors: tuple[str, ...] = ("old_values", "returns", "token_weight")
    temperature = 1.0
    needs_entropy = False

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        terms, _ = value_loss_terms(outputs["values"], batch["old_values"], batch["returns"], batch["mask"], clip=problem.VALUE_CLIP)
        return (terms * batch["token_weight"]).sum(), {}


class HistogramTestLoss(ValueTestLoss):
    """Of a categorical head."""

    tensors = ("returns", "token_weight")

    def __init__(self, bins: ValueBins) -> None:
        self.bins = bins

    def __call__(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        terms = histogram_value_terms(outputs["value_logits"], batch["returns"], batch["mask"], self.bins)
        return (terms * batch["token_weight"]).sum(), {}


def token_tensors(model: str, aggregation: str, old_logprobs: list[Tensor]) -> dict[str, list[Tensor]]:
    batch = problem.make_batch(model)
    positives = sum(int(mask.sum()) for mask in batch["positive"])
    if aggregation == "gspo":
        batch["advantages"] = problem.sequence_advantages(batch)
    float_ = lambda parts: [part.float() for part in parts]  # noqa: E731
    return {
        **{name: batch[name] for name in ("tokens", "response_mask", "positive", "returns", "old_values", "advantages")},
        "old_logprobs": float_(old_logprobs),
        "loss_weight": float_(problem.per_token_weights(batch, aggregation)),
        "token_weight": float_(problem.per_token_weights(batch, "token")),
        "positive_weight": [mask.float() / positives for mask in batch["positive"]],
    }


def split_rows(case: Case, parallel: ParallelContext) -> list[list[int]]:
    """This DP rank's rows by micro-batch: uneven over ranks, in a shuffled order, with an empty micro-batch on some rank."""
    dp, rank = parallel.data_parallel_size, parallel.data_parallel_rank
    if case.parts_of_dp > 1:
        return [part for number in range(case.parts_of_dp) for part in split_between(case, parallel, case.parts_of_dp, number)]
    return split_between(case, parallel, dp, rank)


def split_between(case: Case, parallel: ParallelContext, dp: int, rank: int) -> list[list[int]]:
    rows = torch.randperm(len(problem.SHAPES), generator=torch.Generator().manual_seed(3)).tolist()
    count = case.microbatches
    count = -(-max(count, parallel.pipeline_model_parallel_size) // parallel.microbatch_group) * parallel.microbatch_group
    share = rows if dp == 1 else (rows[:7] if rank == 0 else rows[7 + (rank - 1) :: dp - 1])
    parts = [share[number::count] for number in range(count)]
    if rank == dp - 1 and count > 2:  # the last rank's last micro-batch is empty
        parts[0], parts[-1] = parts[0] + parts[-1], []
    return parts


def microbatches(case: Case, parallel: ParallelContext, tensors: dict[str, list[Tensor]]) -> tuple[list[list[int]], list[MicroBatch]]:
    parts = split_rows(case, parallel)
    result = []
    for rows in parts:
        layout = ThdLayout(
            [tensors["tokens"][row].numel() for row in rows],
            context_parallel_size=parallel.context_parallel_size,
            context_parallel_rank=parallel.context_parallel_rank,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
            device=parallel.device,
        )
        packed = {name: torch.cat([parts_[row] for row in rows]) if rows else parts_[0][:0] for name, parts_ in tensors.items()}
        on_device = {name: tensor.to(parallel.device) for name, tensor in packed.items()}
        result.append(MicroBatch(layout, torch.tensor(rows, dtype=torch.int64), on_device))
    return parts, result


BUILT: list[weakref.ref[Any]] = []
"""Models with their gradient buffers, which must be gone after a case."""


def build(role: str, case: Case, folder: Path, parallel: ParallelContext) -> MegatronModel:
    architecture = read_architecture(folder)

    def load(chunks: list[Any]) -> None:
        load_hf_into(chunks, folder, architecture, parallel, role=role, head_init="zero" if role == "critic" else None)  # type: ignore[arg-type]
        if role == "critic" and hasattr(chunks[-1], "output_layer"):
            weight, bias = problem.head_weights(architecture.hidden_size, architecture.value_outputs)
            with torch.no_grad():
                chunks[-1].output_layer.weight.copy_(weight)
                chunks[-1].output_layer.bias.copy_(bias)
                if architecture.mlp_value_head:
                    weight, bias = problem.dense_weights(architecture.hidden_size)
                    chunks[-1].output_layer.dense.weight.copy_(weight)
                    chunks[-1].output_layer.dense.bias.copy_(bias)

    model = SimpleNamespace(dtype=case.dtype, attention=case.attention, recompute=case.recompute)
    unknown = problem.unknown_ids(case.model)
    built = MegatronModel(role, architecture, model, parallel, load_weights=load, optimizer=OPTIMIZER, unknown_token_ids=unknown)  # type: ignore[arg-type]
    BUILT.extend(weakref.ref(chunk) for chunk in built.wrapped)
    return built


class GradientExporter(Exporter):
    """Exports float32 gradients in the parameters' places."""

    def _exchange_manifest(self) -> Any:
        self._parameters = {index: parameter.main_grad for index, parameter in self._parameters.items()}
        return super()._exchange_manifest()


def gradients(model: MegatronModel) -> dict[str, Tensor]:
    """HF name -> whole gradient: shards of the distributed optimizer, of TP and of PP put together."""
    for chunk in model.wrapped:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets if group.size() > 1 else ():
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    exporter = GradientExporter(model.chunks, model.architecture, model.parallel, role=model.role)  # type: ignore[arg-type]
    return {name: tensor.to("cpu", copy=True) for bucket in exporter.buckets() for name, tensor in bucket}


def two_updates(
    model: MegatronModel,
    batches: list[MicroBatch],
    loss: Any,
    look: Callable[[dict[str, float]], T],
    router_coefs: RouterCoefs | None = None,
) -> tuple[StepResult, T]:
    """Make two AdamW updates. Returns the first one's result, and what ``look`` returns between its passes and the optimizer's step.

    ``look`` gets the statistics of the passes and finds their gradients in the buffers.
    """
    original, seen = model.accumulate, []

    def accumulate(*arguments: Any) -> dict[str, float]:
        stats = original(*arguments)
        if not seen:
            seen.append(look(stats))
        return stats

    with mock.patch.object(model, "accumulate", accumulate):
        first, _ = (model.train_step(batches, loss, router_coefs=router_coefs) for _ in range(2))
    return first, seen[0]


def weights(exporter: Exporter) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for bucket in exporter.buckets() for name, tensor in bucket}


def worst(got: list[Tensor], expected: list[Tensor], rows: list[int]) -> float:
    return max((float((one.cpu().double() - expected[row].double()).abs().max()) for one, row in zip(got, rows, strict=True)), default=0.0)


def gradient_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative norm of a difference; gradients that are nearly zero count by an absolute bound (1e-7 of the total norm)."""
    assert set(got) == set(expected), sorted(set(got) ^ set(expected))
    floor = 1e-2 * torch.stack([tensor.double().norm() for tensor in expected.values()]).norm().item() / len(expected) ** 0.5
    return max(
        float((got[name].double() - value.double()).norm()) / max(float(value.double().norm()), floor) for name, value in expected.items()
    )


class Reference:
    """Right answers of one model, made by the world of one and read by the others."""

    def __init__(self, workdir: Path, model: str) -> None:
        self.folder, self.path = workdir / model, workdir / f"{model}.reference.safetensors"
        self.sizes = [sum(shape) for shape in problem.SHAPES]
        if dist.get_world_size() == 1 and not self.path.exists():
            save_file(self._make(), self.path)
        self.data = load_file(self.path)

    def _make(self) -> dict[str, Tensor]:
        batch = problem.make_batch(self.folder.name)
        oracle = problem.Oracle(self.folder, batch)
        logprobs, entropies = oracle.policy_outputs()
        values, last = oracle.values()
        old = [(logp.detach() + noise.double()) for logp, noise in zip(logprobs, batch["noise"], strict=True)]
        data = {
            "logprobs": torch.cat(logprobs),
            "entropy": torch.cat(entropies),
            "values": torch.cat(values),
            "last": last,
            "old": torch.cat(old),
        }
        for kind in ("token", "sequence", "fixed_length", "gspo"):
            loss = oracle.policy_loss(kind, old)
            data |= {f"policy.{kind}.grad.{name}": grad for name, grad in oracle.gradients(loss, critic=False).items()}
            data[f"policy.{kind}.loss"] = loss
        loss = oracle.value_loss()
        data |= {f"critic.token.grad.{name}": grad for name, grad in oracle.gradients(loss, critic=True).items()}
        data["critic.token.loss"] = loss
        return {name: tensor.detach().clone().contiguous() for name, tensor in data.items()}

    def by_row(self, name: str) -> list[Tensor]:
        return list(self.data[name].split(self.sizes))

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in self.data.items() if name.startswith(prefix)}


def check(case: Case, reference: Reference, workdir: Path) -> dict[str, float]:
    world = dist.get_world_size()
    degrees = {
        "world_size": world,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "context_parallel_size": case.cp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "sequence_parallel": case.sequence_parallel,
        "equal_microbatches": case.equal,
        "timeout_minutes": 5,
    }
    parallel = initialize_parallel(SimpleNamespace(**degrees))  # type: ignore[arg-type]
    layouts = {"policy": parallel, "critic": parallel if case.critic is None else critic_beside(parallel, case.critic)}
    with counted_shape_exchanges() as exchanges:
        if case.replay:
            import replay

            errors = replay.compare(case, parallel, reference.folder, workdir)
        else:
            errors = compare(case, layouts, reference, workdir)
    shown = any(pp > 1 and vpp is None and not case.equal for pp, vpp in case.pipelines)
    assert (len(exchanges) > 0) == shown, (case.name, len(exchanges))
    table = torch.tensor(list(errors.values()), dtype=torch.float64, device=parallel.device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(errors, table.tolist(), strict=True))


def critic_beside(policy: ParallelContext, degrees: dict[str, int]) -> ParallelContext:
    """The critic's layout, which is in no one's way: outside the scopes of the models Megatron has no layout at all."""
    from megatron.core import parallel_state

    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
    names |= {"vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
    settings = {names[name]: degree for name, degree in degrees.items()}
    config = SimpleNamespace(
        layouts_differ=True, critic_parallel=ParallelConfig(world_size=policy.world_size, timeout_minutes=5, **settings)
    )
    critic = critic_layout(config, policy)  # type: ignore[arg-type]
    assert critic_layout(config, policy) is critic  # type: ignore[arg-type]
    assert not parallel_state.model_parallel_is_initialized()
    with policy.scope():
        assert parallel_state.get_tensor_model_parallel_group() is policy.tensor_model_parallel_group
        with critic.scope():
            assert parallel_state.get_tensor_model_parallel_group() is critic.tensor_model_parallel_group
        assert parallel_state.get_tensor_model_parallel_group() is policy.tensor_model_parallel_group
    assert not parallel_state.model_parallel_is_initialized()
    return critic


@contextmanager
def counted_shape_exchanges() -> Iterator[list[None]]:
    """Megatron's exchanges of shapes between pipeline stages inside the block; each synchronises the device."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    original, found = P2PCommunicator._communicate_shapes, []

    def counting(*arguments: Any) -> Any:
        found.append(None)
        return original(*arguments)

    with mock.patch.object(P2PCommunicator, "_communicate_shapes", counting):
        yield found


def compare(case: Case, layouts: dict[str, ParallelContext], of_policy: Reference, workdir: Path) -> dict[str, float]:
    """Differences of this rank from the right answers."""
    world = dist.get_world_size()
    errors: dict[str, float] = {}
    references = {"policy": of_policy, "critic": of_policy if case.critic_model is None else Reference(workdir, case.critic_model)}
    models = {role: build(role, case, references[role].folder, parallel) for role, parallel in layouts.items()}
    for role, model in models.items():
        parallel, reference, name = layouts[role], references[role], references[role].folder.name
        parts, batches = microbatches(case, parallel, token_tensors(name, case.aggregation, reference.by_row("old")))
        rows = [row for part in parts for row in part]
        exporter = Exporter(model.chunks, model.architecture, parallel, role=role)  # type: ignore[arg-type]
        if role == "policy":
            outputs = model.forward(batches, outputs=("logprobs", "entropy"))
        else:
            outputs = model.forward(batches, outputs=("values", "bootstrap_values"))
            last = torch.cat(outputs.pop("bootstrap_values")).cpu()
            errors["bootstrap"] = float((last.double() - reference.data["last"][rows]).abs().max()) if rows else 0.0
        for output, tensors in outputs.items():
            sizes = [[reference.sizes[row] for row in part] for part in parts]
            got = [piece for tensor, size in zip(tensors, sizes, strict=True) for piece in tensor.split(size)]
            errors[output] = worst(got, reference.by_row(output), rows)
        kind = case.aggregation if role == "policy" else "token"
        group = parallel.context_parallel_group
        bins = model.architecture.value_bins
        loss: Any
        if role == "critic":
            loss = ValueTestLoss() if bins is None else HistogramTestLoss(bins)
        else:
            loss = SequenceTestLoss(group) if kind == "gspo" else PolicyTestLoss()
        unknown = list(problem.unknown_ids(name))
        if unknown and role == "policy":
            assert compare_norms(output_row_norms(model).cpu(), reference.folder)
        result, (stats, found) = two_updates(model, batches, loss, lambda stats, model=model: (stats, gradients(model)))
        expected = reference.data[f"{role}.{kind}.loss"].item()
        errors[f"{role}_loss"] = abs(float(stats["loss"]) - expected)
        expected_grads = reference.group(f"{role}.{kind}.grad.")
        errors[f"{role}_gradient"] = gradient_error(found, expected_grads)
        if unknown and role == "policy":
            head = found["lm_head.weight" if "lm_head.weight" in found else "model.embed_tokens.weight"]
            assert head[unknown].count_nonzero() == 0 and (head.norm(dim=-1) > 0).sum() == problem.VOCAB - len(unknown)
        if case.dtype == BF16 and (world == 1 or (world == 2 and parallel.data_parallel_size == 2)):
            errors[f"{role}_gradient_of_one_process"] = compare_gradients(found, workdir / f"{name}.{role}.{BF16}.safetensors")
        norm = torch.stack([grad.norm() for grad in expected_grads.values()]).norm().item()
        errors[f"{role}_grad_norm"] = abs(result.grad_norm - norm) / norm
        if case.dtype == "float32":
            path = workdir / f"{name}.{role}.{kind}.weights.safetensors"
            errors[f"{role}_weights_over_lr"] = compare_weights(weights(exporter), path)
    return errors


def compare_norms(norms: Tensor, folder: Path) -> bool:
    """Of the output layer's rows, on every rank, against the file's."""
    tensors = load_file(folder / "model.safetensors")
    weight = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return torch.allclose(norms, weight.norm(dim=-1))


def compare_weights(got: dict[str, Tensor], path: Path) -> float:
    """Largest difference to the single process after two updates, in learning rates; the single process writes the file."""
    if dist.get_world_size() == 1 and not path.exists():
        save_file(got, path)
    expected = load_file(path)
    assert set(got) == set(expected)
    return max(float((got[name] - value).abs().max()) for name, value in expected.items()) / LR


def compare_gradients(got: dict[str, Tensor], path: Path) -> float:
    """The same micro-batches on two data-parallel ranks and in one process: only the order of a float32 sum differs."""
    assert all(tensor.dtype == torch.float32 for tensor in got.values()), "gradients are accumulated and reduced in float32"
    if dist.get_world_size() == 1:
        save_file(got, path)
    return gradient_error(got, load_file(path))


def check_longest(workdir: Path, degrees: dict[str, int]) -> dict[str, float]:
    """Log-probs of a sequence as long as the model's max_position_embeddings, next to a short one, against float64."""
    folder, case = workdir / "qwen3", Case("qwen3", **degrees)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = dict(zip(names, (case.tp, case.pp, case.cp), strict=True))
    settings = {
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "sequence_parallel": None,
        "equal_microbatches": False,
        "timeout_minutes": 5,
    }
    parallel = initialize_parallel(SimpleNamespace(world_size=dist.get_world_size(), **sizes, **settings))  # type: ignore[arg-type]
    longest = read_architecture(folder).max_position_embeddings
    generator = torch.Generator().manual_seed(17)
    batch = {"tokens": [torch.randint(0, problem.VOCAB, (length,), generator=generator) for length in (longest, 3)]}
    layout = ThdLayout(
        [part.numel() for part in batch["tokens"]],
        context_parallel_size=parallel.context_parallel_size,
        context_parallel_rank=parallel.context_parallel_rank,
        tensor_parallel_size=parallel.tensor_model_parallel_size,
    )
    microbatch = MicroBatch(layout, torch.arange(2), {"tokens": torch.cat(batch["tokens"])})
    with torch.no_grad():
        expected, entropies = problem.Oracle(folder, batch).policy_outputs()
    found = build("policy", case, folder, parallel).forward([microbatch], outputs=("logprobs", "entropy"))
    return {
        "logprobs": float((found["logprobs"][0].double() - torch.cat(expected)).abs().max()),
        "entropy": float((found["entropy"][0].double() - torch.cat(entropies)).abs().max()),
    }


def say(case: str, errors: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, **{name: float(f"{value:.3g}") for name, value in errors.items()}}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    workdir = Path(sys.argv[1])
    from vapo_mcore.megatron.parallel import initialize_distributed

    initialize_distributed(5)
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    world = dist.get_world_size()
    for case in layout_cases(world) + bfloat16_cases(world) + replay_cases(world):
        if only in case.name:
            say(case.name, check(case, Reference(workdir, case.model), workdir))
            release_groups()
            assert [model() for model in BUILT if model() is not None] == [], f"{case.name}: models that nothing uses are still in memory"
            BUILT.clear()
    for degrees in {1: [{}], 2: [{"tp": 2}, {"pp": 2}, {"cp": 2}]}.get(world, []):
        name = f"longest-{'-'.join(degrees) or 'one'}"
        if only in name:
            say(name, check_longest(workdir, degrees))
            release_groups()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
