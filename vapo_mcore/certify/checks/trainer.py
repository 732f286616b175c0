"""Trainer against transformers: log-probs of the whole vocabulary on fixed texts, and hidden states layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.distances import Distance, chosen, distance
from vapo_mcore.certify.hidden_states import layer_gaps, trainer_layers, transformers_layers
from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.record import Measurement, fails, holds
from vapo_mcore.certify.tolerances import BY_NAME, judge
from vapo_mcore.collectives import broadcast_object
from vapo_mcore.config.schema import ModelConfig
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.trainer.models import fill_policy
from vapo_mcore.weights.export import Exporter

REMEDY = (
    "the trainer computes another model than transformers: compare the weights (`vapo-mcore convert verify`), then the first layer named "
    "here (order of rows in q and k, halves of the rotary embedding, norms, tied embeddings)"
)


def run(bench: Bench) -> list[Measurement]:
    """Compare in the run's dtype; if that is bfloat16, also in float32, to distinguish errors from rounding."""
    weights = _weights(bench)
    reference, states, rounding = _transformers(bench, weights)
    found = []
    if bench.dtype != "float32":
        found += _compare(bench, "float32", *_in_float32(bench), reference, states, 0.0)
    mine = bench.trainer_distributions()
    with bench.on_device("logprobs") as models:
        layers = trainer_layers(bench, models.policy, bench.sequences[0])
    bench.details["logprobs"] = chosen(mine, bench.sequences)
    found += _compare(bench, bench.dtype, mine, layers, reference, states, rounding)
    return found


def _weights(bench: Bench) -> dict[str, Tensor] | None:
    """Return the policy's weights for transformers on rank 0 if they differ from model.path (``policy.path``). A collective."""
    if bench.config.policy.path is None:
        return None
    found: dict[str, Tensor] = {}
    with bench.on_device("sync") as models:
        exporter = Exporter(models.policy.chunks, bench.architecture, bench.parallel, role="policy")
        for bucket in exporter.buckets():
            if bench.parallel.rank == 0:
                found.update({name: tensor.detach().float().cpu().clone() for name, tensor in bucket})
    return found


def _transformers(bench: Bench, weights: dict[str, Tensor] | None) -> tuple[list[Tensor] | None, dict[int, Tensor] | None, float]:
    """Log-probs and hidden states of transformers in float32 on rank 0, and how far its own run in ``model.dtype`` is from that (mean
    |dlogp|, on all ranks)."""
    reference: list[Tensor] | None = None
    states: dict[int, Tensor] | None = None
    rounding = 0.0
    if bench.parallel.rank == 0:
        model = load_transformers(bench.config.model.path, torch.float32, weights)
        reference = [_logprobs(bench, model, ids) for ids in bench.sequences]
        states = transformers_layers(model, bench.sequences[0])
        if bench.dtype != "float32":
            model = model.to(bench.torch_dtype)
            rounding = distance([_logprobs(bench, model, ids) for ids in bench.sequences], reference).mean
        del model
        release_free_memory()
    return reference, states, broadcast_object(rounding)


def load_transformers(folder: str, dtype: torch.dtype, weights: dict[str, Tensor] | None = None) -> Any:
    """Load a causal model of a folder on the CPU, with ``weights`` instead of the folder's if given."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa")
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def _logprobs(bench: Bench, model: Any, ids: list[int]) -> Tensor:
    logits = model(torch.tensor([ids])).logits[0, :-1].float()[:, : bench.architecture.vocab_size]
    excluded = torch.tensor(bench.unknown_token_ids, dtype=torch.int64)
    return logits.index_fill(1, excluded, -torch.inf).log_softmax(-1)


def _in_float32(bench: Bench) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Log-probs and hidden states of a second trainer of the same weights, in float32; it is gone afterwards."""
    config = bench.config
    settings: ModelConfig = config.model.model_copy(update={"dtype": "float32", "attention": "sdpa"})

    def load(chunks: list[Any]) -> None:
        fill_policy(chunks, config, bench.architecture, bench.parallel, lambda _: None)

    model = MegatronModel(
        "policy", bench.architecture, settings, bench.parallel, load_weights=load, unknown_token_ids=bench.unknown_token_ids
    )
    found = [part[:-1].cpu() for part in model.distributions(bench.microbatches(bench.sequences))[: len(bench.sequences)]]
    return found, trainer_layers(bench, model, bench.sequences[0])


def _compare(
    bench: Bench,
    dtype: str,
    mine: list[Tensor],
    layers: dict[int, Tensor],
    reference: list[Tensor] | None,
    states: dict[int, Tensor] | None,
    rounding: float,
) -> list[Measurement]:
    """Measurements in one dtype; ``rounding``: mean |dlogp| of transformers itself in that dtype."""
    apart: Distance = broadcast_object(distance(mine, reference) if reference is not None else None)  # type: ignore[assignment]
    gaps = layer_gaps(layers, states)
    bench.details[f"layers_{dtype}"] = [float(f"{gap:.4g}") for gap in gaps]
    worst = max(gaps)
    limit = BY_NAME["trainer/layer"].limit(dtype)
    bad = next((number for number, gap in enumerate(gaps) if not gap <= limit), None)
    suffix = f" (transformers' own rounding in {dtype}: {rounding:.3g})" if rounding else ""
    factor = 3 * rounding / BY_NAME["trainer/mean"].limit(dtype)
    positions = sum(len(part) for part in mine)
    remedy = REMEDY if bad is None else f"the first layer that differs is layer {bad}: {REMEDY}"
    found = [
        judge(f"mean |dlogp|, {dtype}", apart.mean, "trainer/mean", dtype, remedy=remedy, factor=factor, suffix=suffix),
        judge(
            f"max |dlogp|, {dtype}",
            apart.largest,
            "trainer/max",
            dtype,
            remedy=remedy,
            factor=factor,
            suffix=f" at text {apart.where[0]}, position {apart.where[1]}",
        ),
        judge(f"KL to transformers, {dtype}", apart.kl, "trainer/kl", dtype, remedy=remedy, factor=factor**2),
        judge(f"top-1 agreement, {dtype}", apart.top1, "trainer/top1", dtype, remedy=remedy, suffix=f" of {positions} positions"),
    ]
    shown = f"at most {worst:.3g} over {len(gaps)} layers" if bad is None else f"{gaps[bad]:.3g} after layer {bad}, the first that differs"
    what, tolerance = f"hidden states by layer, {dtype}", f"<= {limit:.3g} ({dtype})"
    found.append(holds(what, shown, tolerance, worst) if bad is None else fails(what, shown, tolerance, remedy, worst))
    if apart.support:
        found.append(fails(f"support, {dtype}", f"{apart.support} ids have a probability in one of the two only", "none", remedy))
    return found
