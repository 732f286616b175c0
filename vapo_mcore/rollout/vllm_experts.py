"""Get the experts that vLLM chose: enable their return, record them where vLLM does not, and check the result.

With ``enable_return_routed_experts`` vLLM 0.32 returns the experts of every token that it fed to the model, but its platforms of the
source tree do so only in the second version of the model runner, which runs on GPUs alone. Everything that differs is here:

- On a GPU vLLM records, and keeps the choices of cached prefixes beside its prefix cache. Only the first rank of a replica has them;
  vLLM's scheduler, which ``external_launcher`` runs on every rank, would miss them on the others, so there it does not request them.
- On CPU (first version of the model runner) ``CpuRecorder`` takes the place of vLLM's connector: vLLM's routers call it with the experts of
  each layer, its scheduler asks it for those of a finished request, and its output processor returns them as on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vapo_mcore.config.architecture import ExpertChoices
from vapo_mcore.errors import RolloutError

ARGUMENTS = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
"""Arguments of ``vllm.LLM`` on a GPU. vLLM keeps choices beside its prefix cache and refuses to record them without one."""


def record_experts(llm: Any, shape: ExpertChoices, *, leads: bool, on_gpu: bool) -> None:
    """Make vLLM return choices of experts on the rank that ``leads`` a replica. Call it on all ranks, after the engine is built."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert hasattr(scheduler, "aux_output_connector"), "this version of vLLM returns experts in another way"
    if on_gpu:
        assert scheduler.aux_output_connector is not None, "vLLM was not started with ARGUMENTS"
        if not leads:
            scheduler.aux_output_connector.take_output = _nothing
    elif leads:
        assert scheduler.aux_output_connector is None, "vLLM's CPU backend has a connector: CpuRecorder is not needed any more"
        scheduler.aux_output_connector = llm.collective_rpc(_install, args=(shape,))[0]


def experts_of(completion: Any, tokens: int, shape: ExpertChoices) -> Tensor:
    """Return the experts of a request with ``tokens`` fed tokens: uint8 or int16 [tokens, layers, topk].

    Raises RolloutError with both counts unless vLLM returned exactly these tokens, layers and experts.
    """
    found = completion.routed_experts
    if found is None:
        raise RolloutError("vLLM returned no experts of a response, although it was started to (model.router.replay: engine)")
    # uint16 of more than 256 experts: torch computes with int16
    return torch.from_numpy(np.ascontiguousarray(found).astype(np.uint8 if shape.itemsize == 1 else np.int16))[:tokens]


def _nothing(request: Any, output: Any) -> None:
    """Stand for the scheduler connector's ``take_output`` on ranks without choices."""


def _install(worker: Any, shape: ExpertChoices) -> CpuRecorder:
    return CpuRecorder(worker.model_runner, shape)


class CpuRecorder:
    """Records the experts of every token in vLLM's CPU model runner, and hands them to vLLM's scheduler.

    A token's experts are written to the place of its key and value in the cache, so that a request whose prefix is cached finds those
    that made its keys and values, whichever request computed them. A preempted request keeps the experts with which it was sampled.
    """

    def __init__(self, runner: Any, shape: ExpertChoices) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        (group,) = runner.kv_cache_config.kv_cache_groups  # attention alone
        self.runner, self.block = runner, group.kv_cache_spec.block_size
        self.layers: dict[int, Tensor] = {}  # experts [tokens, topk] of the current step, by layer
        slots = runner.kv_cache_config.num_blocks * self.block
        self.slots = np.zeros((slots, shape.layers, shape.topk), dtype=np.uint8 if shape.itemsize == 1 else np.uint16)
        self.requests: dict[str, list[np.ndarray[Any, Any]]] = {}
        for module in runner.model.modules():
            if isinstance(module, MoERunner):
                if not isinstance(module.router, BaseRouter) or module._quant_method.is_monolithic:
                    raise RolloutError(f"vLLM's layer {module.layer_name} does not show its choices of experts")
                module.router.set_capture_fn(partial(self._capture, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._recorded

    def _capture(self, layer: int, experts: Tensor) -> None:
        self.layers[layer] = experts

    def _recorded(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        """Run a step of the engine and keep its choices."""
        self.layers.clear()
        result = self._execute(scheduled, *arguments, **named)
        if self.layers:
            self._keep(scheduled.num_scheduled_tokens)
        return result

    def _keep(self, counts: dict[str, int]) -> None:
        """Write the choices of a step to the slots of its tokens, then add them to those of its requests. ``counts``: tokens by request."""
        numbers = sorted(self.layers)
        experts = torch.stack([self.layers[number] for number in numbers], dim=1).numpy()
        ids = self.runner.input_batch.req_ids
        ends = np.cumsum([counts[name] for name in ids])
        starts = {name: int(self.runner.requests[name].num_computed_tokens) for name in ids}
        for name, end in zip(ids, ends, strict=True):
            places = self._places(name, starts[name], starts[name] + counts[name])
            self.slots[places[:, None], numbers] = experts[end - counts[name] : end]
        for name in ids:
            parts = self.requests.setdefault(name, [])
            first, last = sum(map(len, parts)), starts[name] + counts[name]
            if first < last:
                parts.append(self.slots[self._places(name, first, last)])

    def _places(self, name: str, start: int, end: int) -> np.ndarray[Any, Any]:
        """Return the slots of a request's tokens ``start`` to ``end``."""
        positions = np.arange(start, end)
        blocks = np.asarray(self.runner.requests[name].block_ids[0])
        return blocks[positions // self.block] * self.block + positions % self.block

    # ------------------------------------------- what vLLM's scheduler calls

    def build_connector_meta(self, scheduled: Any, requests: Any) -> None:
        """Return nothing for the worker, which is in this process."""

    def take_output(self, request: Any, output: Any) -> np.ndarray[Any, Any] | None:
        """Return the experts of all tokens of a finished request but the last sampled one, which was not fed to the model."""
        if not request.is_finished():
            return None
        return np.concatenate(self.requests[request.request_id])[: request.num_tokens - 1]

    def request_finished(self, request: Any) -> None:
        """Forget a finished request; vLLM calls this also for preempted ones."""
        if request.is_finished():
            self.requests.pop(request.request_id, None)

    def reset(self) -> None:
        """Do nothing when the prefix cache is reset: slots are written before they are read."""
