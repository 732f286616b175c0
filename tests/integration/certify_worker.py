"""Certificates of a sound setup and of ones with a planted defect, in two processes: certify_worker.py FOLDER [CASE ...]. The cases and
what each must find are in test_certify.py, which reads the certificates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.certify_setup import END_OF_TURN, certify_config
from tests.process_groups import release_groups
from vapo_mcore.algorithm import importance
from vapo_mcore.certify import bench as bench_module
from vapo_mcore.certify.checks import rates as rates_check
from vapo_mcore.certify.checks import resume as resume_check
from vapo_mcore.certify.runner import CertifyOptions, certify
from vapo_mcore.checkpoint import resume as resume_module
from vapo_mcore.errors import RolloutError
from vapo_mcore.megatron import engine as engine_module
from vapo_mcore.megatron import losses
from vapo_mcore.megatron.offload import ModelOffloader
from vapo_mcore.megatron.parallel import initialize_parallel
from vapo_mcore.rollout import transformers_engine
from vapo_mcore.rollout.stopping import stop_ids
from vapo_mcore.rollout.transformers_engine import TransformersEngine
from vapo_mcore.trainer import main as main_module
from vapo_mcore.trainer import models as models_module


@contextmanager
def loaded(spoil: Callable[[str, list[Any]], None]) -> Iterator[None]:
    """``spoil(role, chunks)`` is called after a model's weights are loaded."""
    original = models_module.load_hf_into

    def spoiling(chunks: Any, *arguments: Any, role: str, **more: Any) -> Any:
        report = original(chunks, *arguments, role=role, **more)
        with torch.no_grad():
            spoil(role, chunks)
        return report

    with mock.patch.object(models_module, "load_hf_into", spoiling):
        yield


def swapped_rows(role: str, chunks: list[Any]) -> None:
    """The rows of layer 1's first query head and first key head (32 rows each; two query heads stand before the key) change places."""
    if role == "policy":
        weight = chunks[0].decoder.layers[1].self_attention.linear_qkv.weight
        queries = weight[:32].clone()
        weight[:32] = weight[64:96]
        weight[64:96] = queries


def swapped_gate(role: str, chunks: list[Any]) -> None:
    """The gate and the up projection of layer 1 change places."""
    if role == "policy":
        weight = chunks[0].decoder.layers[1].mlp.linear_fc1.weight
        weight.copy_(weight.roll(len(weight) // 2, 0))


def interleaved_rope(role: str, chunks: list[Any]) -> None:
    """Pairs of neighbours are rotated in the place of the two halves."""
    if role == "policy":
        chunks[0].config.rotary_interleaved = True


def head_of_the_policy(folder: Path) -> Callable[[str, list[Any]], None]:
    row = load_file(folder / "model" / "model.safetensors")["lm_head.weight"][17]

    def spoil(role: str, chunks: list[Any]) -> None:
        if role == "critic":
            chunks[0].output_layer.weight.copy_(row[None])

    return spoil


@contextmanager
def stale_layer(*, readable: bool) -> Iterator[None]:
    """Layer 1 of the engine keeps the weights of the first sync; ``readable``: whether the engine can compare its values."""
    original = TransformersEngine._load_weights
    kept: dict[str, Tensor] = {}

    def load(self: Any, weights: Any) -> None:
        def replaced() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                first = kept.setdefault(name, tensor.clone())
                yield name, first if "layers.1." in name else tensor

        original(self, replaced())

    holds = nullcontext() if readable else mock.patch.object(TransformersEngine, "_holds", return_value=None)
    with mock.patch.object(TransformersEngine, "_load_weights", load), holds:
        yield


@contextmanager
def scaled_norm(*, readable: bool) -> Iterator[None]:
    """The engine gets the first norm of layer 1 times 1.01; ``readable``: whether it can compare its values."""
    original = TransformersEngine._load_weights

    def load(self: Any, weights: Any) -> None:
        scaled = "model.layers.1.input_layernorm.weight"
        original(self, ((name, tensor * 1.01 if name == scaled else tensor) for name, tensor in weights))

    holds = nullcontext() if readable else mock.patch.object(TransformersEngine, "_holds", return_value=None)
    with mock.patch.object(TransformersEngine, "_load_weights", load), holds:
        yield


@contextmanager
def stale_head() -> Iterator[None]:
    """The output layer of a tied model keeps the first weights; the embedding, which checksums and values see, follows each sync."""
    original = TransformersEngine._load_weights
    kept: list[Tensor] = []

    def load(self: Any, weights: Any) -> None:
        original(self, weights)
        if not kept:
            kept.append(self.model.lm_head.weight.detach().clone())
            self.model.lm_head.forward = lambda hidden: torch.nn.functional.linear(hidden, kept[0])

    with mock.patch.object(TransformersEngine, "_load_weights", load):
        yield


def without_temperature() -> AbstractContextManager[Any]:
    original = transformers_engine.draw

    def draw(logits: Tensor, uniforms: Tensor, sampling: Any) -> tuple[Tensor, Tensor]:
        sampled, _ = original(logits, uniforms, sampling)
        return sampled, logits.float().log_softmax(-1).gather(-1, sampled[:, None])[:, 0]

    return mock.patch.object(transformers_engine, "draw", draw)


def without_end_of_turn() -> AbstractContextManager[Any]:
    return mock.patch.object(main_module, "stop_ids", lambda *given: tuple(token for token in stop_ids(*given) if token != END_OF_TURN))


def frozen_ratio() -> AbstractContextManager[Any]:
    """The loss sees its own log-probs as the old policy's."""
    original = losses.policy_loss_terms

    def terms(logprobs: Tensor, old_logprobs: Tensor, *more: Any, **settings: Any) -> Any:
        return original(logprobs, logprobs.detach(), *more, **settings)

    return mock.patch.object(losses, "policy_loss_terms", terms)


def flipped_advantages() -> AbstractContextManager[Any]:
    """The policy loss takes advantages with the other sign."""
    original = losses.policy_loss_terms

    def terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *more: Any, **settings: Any) -> Any:
        return original(logprobs, old_logprobs, -advantages, *more, **settings)

    return mock.patch.object(losses, "policy_loss_terms", terms)


def ascent() -> AbstractContextManager[Any]:
    """The critic's loss has the other sign."""
    original = losses.value_loss_terms

    def terms(*given: Any, **settings: Any) -> Any:
        found, indicators = original(*given, **settings)
        return -found, indicators

    return mock.patch.object(losses, "value_loss_terms", terms)


def frozen_weights() -> AbstractContextManager[Any]:
    return mock.patch.object(importance, "importance_weights", lambda *given, **settings: given[2].float())


def ignored_weights() -> AbstractContextManager[Any]:
    """The loss takes importance weights and does not use them."""
    original = losses.policy_loss_terms
    return mock.patch.object(
        losses, "policy_loss_terms", lambda *given, **settings: original(*given, **{**settings, "importance_weights": None})
    )


def shifted_positions() -> AbstractContextManager[Any]:
    """The rotary embedding of the second context-parallel rank is that of one position earlier."""
    from megatron.core.models.common.embeddings import rope_utils

    original = rope_utils._get_thd_freqs_on_this_cp_rank

    def shifted(rank: int, *more: Any, **settings: Any) -> Tensor:
        found = original(rank, *more, **settings)
        return found.roll(1, 0) if rank == 1 else found

    return mock.patch.object(rope_utils, "_get_thd_freqs_on_this_cp_rank", shifted)


def bias_not_loaded() -> AbstractContextManager[Any]:
    """Loading a checkpoint leaves the critic's head without its bias."""
    original = resume_module.load_models

    def load(config: Any, models: Any, *more: Any, **settings: Any) -> None:
        original(config, models, *more, **settings)
        with torch.no_grad(), models.residency.all_resident():
            models.critic.chunks[0].output_layer.bias.zero_()

    return mock.patch.object(resume_check, "load_models", load)


def gradients_times_context() -> AbstractContextManager[Any]:
    """Gradients are summed over context parallelism once too often."""
    original = engine_module._finalize_gradients

    from megatron.core import parallel_state  # which vapo_mcore.megatron.host makes importable without CUDA

    def summed(chunks: list[Any], *arguments: Any, **more: Any) -> None:
        original(chunks, *arguments, **more)
        for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
            buffer.grad_data.mul_(parallel_state.get_context_parallel_world_size())

    return mock.patch.object(engine_module, "_finalize_gradients", summed)


def left_out_rank() -> AbstractContextManager[Any]:
    """A data-parallel rank's gradients are counted for all ranks', in the place of their sum."""
    original = engine_module._finalize_gradients

    def own(chunks: list[Any], *arguments: Any, **more: Any) -> None:
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        gradients = [buffer.grad_data.clone() for buffer in buffers]
        original(chunks, *arguments, **more)
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer.grad_data.copy_(gradient * buffer.data_parallel_group.size())

    return mock.patch.object(engine_module, "_finalize_gradients", own)


def stale_copy() -> AbstractContextManager[Any]:
    """Once there is a copy of the optimizer's state on the host, an update does not replace it."""

    def mark_changed(self: ModelOffloader) -> None:
        self._on_host -= self.resident - {"optimizer"}

    return mock.patch.object(ModelOffloader, "mark_changed", mark_changed)


def lost_moments() -> AbstractContextManager[Any]:
    """The host's copy of one tensor of the optimizer is zeros."""
    original = ModelOffloader._offload_optimizer

    def offload(self: ModelOffloader) -> None:
        original(self)
        self.pool._buffers[self._offloaded_state[-1][0]].zero_()

    return mock.patch.object(ModelOffloader, "_offload_optimizer", offload)


@contextmanager
def moments_not_loaded() -> Iterator[None]:
    """Loading a checkpoint leaves the optimizer's moments as they are."""
    original = resume_module.load_optimizer

    def moments(model: Any) -> dict[tuple[int, int, str], Tensor]:
        return {
            (number, index, key): value
            for number, optimizer in enumerate(model.optimizer.megatron.chained_optimizers)
            for index, state in enumerate(optimizer.optimizer.state.values())
            for key, value in state.items()
            if isinstance(value, Tensor) and value.ndim > 0
        }

    def load(model: Any, *arguments: Any, **more: Any) -> None:
        before = {name: tensor.clone() for name, tensor in moments(model).items()}
        original(model, *arguments, **more)
        for name, tensor in moments(model).items():
            tensor.copy_(before[name])

    with mock.patch.object(resume_module, "load_optimizer", load):
        yield


def slow_gpu() -> AbstractContextManager[Any]:
    """A fake CUDA device, as slow as this machine's CPU, has the name of a GPU that plan knows."""
    return mock.patch.object(rates_check, "device_name", return_value="h100")


def without_engine() -> AbstractContextManager[Any]:
    return mock.patch.object(bench_module, "build_engine", side_effect=RolloutError("rollout.engine: no such engine here"))


@dataclass(frozen=True)
class Case:
    """``checks`` to run on the setup with ``settings``, inside ``defect`` (a function of the folder)."""

    checks: Sequence[str]
    settings: Sequence[str] = ()
    defect: Callable[[Path], AbstractContextManager[Any]] = lambda _: nullcontext()
    against: str | None = None


CORRECTION = "algorithm.policy_loss.importance_correction.kind"
OWN_CHECKS = "tests.integration.certify_checks"
CASES: Mapping[str, Case] = {
    "clean": Case(("folder", "trainer", "engine", "invariance", "offload", "resume", "critic", "graders", f"{OWN_CHECKS}:holding")),
    "pipelined": Case(
        ("folder", "trainer", "engine", "invariance", "offload", "critic", "resume"), ("parallel.pipeline_model_parallel_size=2",)
    ),
    "fast": Case((f"{OWN_CHECKS}:alone", "folder", "trainer", "critic", "graders")),
    "rates": Case(("rates",)),
    "one_rank": Case(("invariance", "rates"), ("parallel.world_size=1",)),
    "swapped_rows": Case(("trainer",), defect=lambda _: loaded(swapped_rows), against="clean"),
    "gate": Case(("trainer",), ("model.dtype=bfloat16",), defect=lambda _: loaded(swapped_gate)),
    "positions": Case(("trainer",), ("parallel.context_parallel_size=2",), lambda _: shifted_positions()),
    "rope": Case(("trainer",), defect=lambda _: loaded(interleaved_rope)),
    "stale_layer": Case(("engine",), defect=lambda _: stale_layer(readable=True)),
    "stale_unreadable": Case(("engine",), defect=lambda _: stale_layer(readable=False)),
    "scaled_norm": Case(("engine",), defect=lambda _: scaled_norm(readable=True)),
    "scaled_unreadable": Case(("engine",), defect=lambda _: scaled_norm(readable=False)),
    "tied_head": Case(("engine",), ("model.path={folder}/tied/model",), lambda _: stale_head()),
    "temperature": Case(("engine",), ("rollout.temperature=0.8",), lambda _: without_temperature()),
    "slight_temperature": Case(("engine",), ("model.dtype=bfloat16", "rollout.temperature=0.95"), lambda _: without_temperature()),
    "frozen_ratio": Case(("invariance",), defect=lambda _: frozen_ratio()),
    "flipped_advantages": Case(("invariance",), defect=lambda _: flipped_advantages()),
    "frozen_weight": Case(("invariance",), (f"{CORRECTION}=token_truncate",), lambda _: frozen_weights()),
    "weight_ignored": Case(("invariance",), (f"{CORRECTION}=sequence_product_mask",), lambda _: ignored_weights()),
    "corrected": Case(("invariance",), (f"{CORRECTION}=sequence_mask",)),
    "context": Case(("invariance",), defect=lambda _: gradients_times_context()),
    "left_out_rank": Case(("invariance",), defect=lambda _: left_out_rank()),
    "stale_copy": Case(("offload",), ("model.offload=true",), lambda _: stale_copy()),
    "moments": Case(("offload",), defect=lambda _: lost_moments()),
    "not_restored": Case(("resume",), defect=lambda _: moments_not_loaded()),
    "value_bias": Case(("resume",), defect=lambda _: bias_not_loaded()),
    "template": Case(("folder",), ("data.chat_template={folder}/off_by_one.jinja",)),
    "stop_ids": Case(("folder",), defect=lambda _: without_end_of_turn()),
    "critic_head": Case(("critic",), defect=lambda folder: loaded(head_of_the_policy(folder))),
    "categorical_critic": Case(("critic",), ("critic.categorical.low=-1.5", "critic.categorical.high=1.5", "critic.categorical.bins=31")),
    "mlp_critic": Case(("critic",), ("critic.head=mlp",)),
    "critic_layout": Case(("invariance", "offload", "resume", "critic"), ("critic.parallel.tensor_model_parallel_size=2",)),
    "ascent": Case(("critic",), defect=lambda _: ascent()),
    "misfit": Case(("machine",), ("rollout.engine=vllm", "rollout.vllm.kv_cache_gib=100000")),
    "grader": Case(("graders",), ("data.train.0.verifier=tests.integration.certify_checks:everything_right",)),
    "slow_gpu": Case(("rates",), ("parallel.world_size=1",), lambda _: slow_gpu()),
    "no_engine": Case(("folder", "engine", "rates"), defect=lambda _: without_engine()),
    "no_data": Case(("folder", "engine", "resume", "graders"), ("data.train.0.path={folder}/empty.jsonl",)),
    "no_critic": Case(("critic", f"{OWN_CHECKS}:raising", f"{OWN_CHECKS}:empty"), ("algorithm.advantage.estimator=dr_grpo",)),
}

if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    for name, case in CASES.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        config = certify_config(FOLDER, name, *(setting.replace("{folder}", str(FOLDER)) for setting in case.settings))
        against = None if case.against is None else str(FOLDER / case.against / "certificate.json")
        with case.defect(FOLDER):
            certify(config, initialize_parallel(config.parallel), CertifyOptions(tuple(case.checks), against, str(FOLDER / name)))
        release_groups()
        if dist.get_rank() == 0:
            print(f"case {name} ok", flush=True)
    dist.destroy_process_group()
