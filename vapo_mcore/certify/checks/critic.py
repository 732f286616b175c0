"""Critic: its head survives export and loading, transformers computes the same values, head-only training leaves the trunk alone, and
values depend neither on packing nor on padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vapo_mcore.algorithm.histogram import expected_values
from vapo_mcore.certify.bench import Bench
from vapo_mcore.certify.memory import release_free_memory
from vapo_mcore.certify.record import Measurement, NotApplicable, fails, holds, not_applicable
from vapo_mcore.certify.tolerances import BY_NAME, judge
from vapo_mcore.checkpoint_files import model_folder
from vapo_mcore.collectives import all_gather_objects, broadcast_object
from vapo_mcore.config.architecture import ValueBins
from vapo_mcore.data.microbatch import MicroBatch
from vapo_mcore.megatron.engine import MegatronModel
from vapo_mcore.megatron.losses import CriticLoss
from vapo_mcore.megatron.model import ValueHead
from vapo_mcore.megatron.roles import build_critic
from vapo_mcore.weights.checksums import tensor_checksum
from vapo_mcore.weights.export import Exporter, save_hf
from vapo_mcore.weights.families import HEAD_PREFIX
from vapo_mcore.weights.loader import load_hf_into

SAME = BY_NAME["critic/head_cosine"].float32
"""Cosine from which two directions of the hidden space are the same one; those of random directions are near 0."""


def run(bench: Bench) -> list[Measurement]:
    """Measure on a copy of the critic whose head is trained for one step: a new head may be zero, and zeros agree with everything."""
    if not bench.config.uses_critic:
        raise NotApplicable(f"the estimator {bench.config.algorithm.advantage.estimator} has no critic")
    found = [_head(bench)]
    copy = _copy(bench)
    before = _values(copy, bench.microbatches(bench.sequences, parallel=copy.parallel))
    found.append(_train_head(bench, copy))
    values = _values(copy, bench.microbatches(bench.sequences, parallel=copy.parallel))
    found.append(_towards_returns(copy, before, values))
    found += _export(bench, copy, values)
    found += _packing(bench, copy, values)
    del copy
    release_free_memory()
    return found


def _exported(bench: Bench, model: MegatronModel) -> dict[str, Tensor]:
    """Head and output layer as Hugging Face tensors, float32 on the host. A collective."""
    exporter = Exporter(model.chunks, model.architecture, model.parallel, role=model.role)  # type: ignore[arg-type]
    wanted = (HEAD_PREFIX, "lm_head.", "model.embed_tokens.")
    return {name: tensor.float().cpu().clone() for bucket in exporter.buckets() for name, tensor in bucket if name.startswith(wanted)}


def _head(bench: Bench) -> Measurement:
    """Check that the value head is not a row of the policy's output layer, and that a head configured as zero is zero."""
    what, tolerance = "value head", f"cosine with each row of the policy's output layer below {SAME}; zero where head_init says so"
    with bench.on_device("values") as models:
        assert models.critic is not None
        head = {name: tensor for name, tensor in _exported(bench, models.critic).items() if name.startswith(HEAD_PREFIX)}
    with bench.on_device("sync") as models:
        policy = _exported(bench, models.policy)
    weight = head.get(f"{HEAD_PREFIX}weight", head.get(f"{HEAD_PREFIX}out.weight"))  # [1 or bins, hidden]; the second: a head of two layers
    assert weight is not None, f"the exported critic has no head: {sorted(head)}"
    rows = policy["lm_head.weight"] if "lm_head.weight" in policy else policy["model.embed_tokens.weight"]
    norm = float(weight.norm())
    cosines = (normalize(rows) @ normalize(weight).T).abs().amax(1)
    row, cosine = int(cosines.argmax()), float(cosines.max())
    config = bench.config.critic
    if norm > 0 and cosine >= SAME:
        remedy = "the critic was given the policy's head; initialise it (critic.head_init) or load a critic's own"
        return fails(what, f"the value head is row {row} of the policy's output layer (cosine {cosine:.4f})", tolerance, remedy, cosine)
    if config.init == "policy" and config.head_init == "zero" and norm > 0:
        remedy = "something has filled the head after it was made"
        return fails(what, f"norm {norm:.3g}, although critic.head_init = zero", tolerance, remedy, norm)
    return holds(what, f"norm {norm:.3g}, largest cosine with an output row {cosine if norm else 0:.2f}", tolerance, norm)


def _copy(bench: Bench) -> MegatronModel:
    """Build a critic with the same weights that trains its head only."""
    with bench.on_device("values") as models:
        critic = models.critic
        assert critic is not None

        @torch.no_grad()
        def fill(chunks: list[Any]) -> None:
            for new, old in zip(chunks, critic.chunks, strict=True):
                own = dict(old.named_parameters())
                for name, parameter in new.named_parameters():
                    parameter.copy_(own[name])

        return build_critic(bench.config, critic.architecture, critic.parallel, fill, bench.config.critic.optimizer, head_only=True)


def _checksums(model: MegatronModel, *, head: bool) -> dict[str, str]:
    own = {
        id(parameter)
        for chunk in model.chunks
        for module in chunk.modules()
        if isinstance(module, ValueHead)
        for parameter in module.parameters()
    }
    return {
        f"{number}.{name}": tensor_checksum(parameter)
        for number, chunk in enumerate(model.chunks)
        for name, parameter in chunk.named_parameters()
        if (id(parameter) in own) == head
    }


def _train_head(bench: Bench, critic: MegatronModel) -> Measurement:
    """Make one update towards returns of 1 and check that the head changes and no bit of the trunk does."""
    what, tolerance = "head-only training", "the head changes, the trunk keeps every bit"
    before = _checksums(critic, head=False), _checksums(critic, head=True)
    total = sum(map(len, bench.sequences))
    batches = []
    for microbatch in bench.microbatches(bench.sequences, parallel=critic.parallel):
        ones = torch.ones_like(microbatch.tensors["tokens"], dtype=torch.float32)
        mask = ones.bool()
        mask[microbatch.layout.cu_seqlens[:-1]] = False
        batches.append(microbatch.with_tensors(response_mask=mask, returns=ones, value_weights=ones / total))
    result = critic.train_step(batches, CriticLoss(None, critic.architecture.value_bins))
    after = _checksums(critic, head=False), _checksums(critic, head=True)
    moved = sorted({name for part in all_gather_objects([n for n in after[0] if before[0][n] != after[0][n]]) for name in part})
    head_moved = any(all_gather_objects(before[1] != after[1]))
    remedy = "look at which parameters the optimizer holds (critic.value_pretraining.head_only)"
    if moved:
        return fails(what, f"{len(moved)} tensors of the trunk changed, the first is {moved[0]}", tolerance, remedy)
    if not head_moved:
        return fails(
            what, f"the head did not change (gradient norm {result.grad_norm:.3g}, {result.skipped or 'not skipped'})", tolerance, remedy
        )
    return holds(what, f"the head changed (gradient norm {result.grad_norm:.3g}), {len(before[0])} tensors of the trunk did not", tolerance)


def _towards_returns(critic: MegatronModel, before: dict[int, Tensor], after: dict[int, Tensor]) -> Measurement:
    """The update had returns of 1. To first order it moves values v by dv with sum (1 - v) dv > 0; of a linear head that is exact."""
    what, tolerance = "values after head-only training", "closer to the returns: sum of (return - value) x change above 0"
    if critic.architecture.value_bins is not None or critic.architecture.mlp_value_head:
        return not_applicable(what, "only a linear head of one output must move all values towards their returns in one update")
    moved = sum(float(((1 - before[number].double()) * (after[number].double() - before[number].double()))[:-1].sum()) for number in before)
    shown = f"{moved:.3g}"
    if moved > 0:
        return holds(what, shown, tolerance, moved)
    remedy = (
        "the critic's loss or its optimizer moves values away from their returns: look at the sign of the loss and at the returns' places"
    )
    return fails(what, shown, tolerance, remedy, moved)


def _values(critic: MegatronModel, microbatches: Sequence[MicroBatch]) -> dict[int, Tensor]:
    """Sequence number -> float32 [tokens] raw outputs at its tokens but the last, then at the last."""
    found = critic.forward(microbatches, outputs=("values", "bootstrap_values"))
    values: dict[int, Tensor] = {}
    for microbatch, packed, last in zip(microbatches, found["values"], found["bootstrap_values"], strict=True):
        parts = packed.split(microbatch.layout.lengths_list) if microbatch.layout.num_sequences else ()
        for number, part, end in zip(microbatch.rows.tolist(), parts, last.tolist(), strict=True):
            values[number] = torch.cat([part[1:].cpu(), torch.tensor([end])])
    return values


def _gap(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    """Return the largest difference, relative to the root mean square of the values."""
    scale = float(torch.cat(list(one.values())).double().square().mean().sqrt())
    largest = max(float((one[number].double() - other[number].double()).abs().max()) for number in one)
    return largest / scale if scale > 0 else (0.0 if largest == 0 else float("inf"))


def _export(bench: Bench, critic: MegatronModel, values: dict[int, Tensor]) -> list[Measurement]:
    """Write the critic as a Hugging Face folder, load it again, and have transformers compute the values of the same folder."""
    folder = bench.scratch / "critic"
    origin = model_folder(bench.config.critic.path or bench.config.model.path, "critic")
    save_hf(Exporter(critic.chunks, critic.architecture, critic.parallel, role="critic"), origin, folder)
    again = MegatronModel(
        "critic",
        critic.architecture,
        bench.config.model,
        critic.parallel,
        load_weights=lambda chunks: load_hf_into(chunks, folder, critic.architecture, critic.parallel, role="critic"),
    )
    reloaded = _values(again, bench.microbatches(bench.sequences, parallel=critic.parallel))
    different = sum(int((values[number] != reloaded[number]).sum()) for number in values)
    what, tolerance = "value head round trip", "equal bits after export and loading"
    remedy = "export and loader do not agree on the critic's tensors: look at score.* in the exported folder"
    shown = f"{different} of {sum(map(len, values.values()))} values differ"
    found = [fails(what, shown, tolerance, remedy, different) if different else holds(what, shown, tolerance, 0.0)]
    if critic.architecture.mlp_value_head:
        return [*found, not_applicable("values against transformers", "transformers has no token classifier with a head of two layers")]
    theirs, rounding = _against_transformers(bench, folder, critic.architecture.value_bins, values)
    remedy = "the critic computes other values than transformers: is its output the value head's (one number a token)?"
    suffix = f" of their rms (transformers' own rounding in {bench.dtype}: {rounding:.3g})" if rounding else " of their rms"
    factor = 3 * rounding / BY_NAME["critic/export"].limit(bench.dtype)
    judged = judge("values against transformers", theirs, "critic/export", bench.dtype, remedy=remedy, factor=factor, suffix=suffix)
    return [*found, judged]


@torch.no_grad()
def _against_transformers(bench: Bench, folder: Path, bins: ValueBins | None, values: dict[int, Tensor]) -> tuple[float, float]:
    """Return how far ``values`` are from transformers in float32, and how far its own run in ``model.dtype`` is. A collective."""
    gaps = None
    if bench.parallel.rank == 0:
        from transformers import AutoModelForTokenClassification

        model = AutoModelForTokenClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        ).eval()

        def computed() -> dict[int, Tensor]:
            logits = {number: model(torch.tensor([ids])).logits[0].float() for number, ids in enumerate(bench.sequences)}
            return {number: found[:, 0] if bins is None else expected_values(found, bins) for number, found in logits.items()}

        exact = computed()
        rounding = 0.0
        if bench.dtype != "float32":
            model = model.to(bench.torch_dtype)
            rounding = _gap(exact, computed())
        gaps = _gap(exact, values), rounding
    gaps = broadcast_object(gaps)
    assert gaps is not None, "rank 0 has compared"
    return gaps


def _packing(bench: Bench, critic: MegatronModel, alone: dict[int, Tensor]) -> list[Measurement]:
    """Compare values of sequences alone with those of one pack in reverse order, and of sequences with trailing pads."""
    packs = [list(range(len(bench.sequences)))[::-1]]
    packed = _values(critic, bench.microbatches(bench.sequences, packs, critic.parallel))
    multiple = 8 * critic.parallel.context_parallel_size * critic.parallel.tensor_model_parallel_size
    longest = max(map(len, bench.sequences)) + 2 * multiple
    size = -(-longest // multiple) * multiple
    padded = [
        replace(batch, layout=batch.layout.with_padding(size)) for batch in bench.microbatches(bench.sequences, parallel=critic.parallel)
    ]
    remedy = "a sequence sees its neighbours or its pads: look at the attention's bounds of packed sequences (model.attention)"
    return [
        judge(f"values {how}", _gap(alone, other), "critic/packing", bench.dtype, remedy=remedy, suffix=" of their rms")
        for how, other in (("alone and packed", packed), ("with and without pads", _values(critic, padded)))
    ]
