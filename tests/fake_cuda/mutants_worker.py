"""Seeded defects of the CUDA path: ``mutants_worker.py FILE`` writes name -> what the fake device said (null: it missed the defect)."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["FAKE_CUDA_DEVICES"] = "2"
from tests import fake_cuda

fake_cuda.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.fake_cuda import order, runtime  # noqa: E402
from tests.fake_cuda.models import TokenLoss, build, microbatches  # noqa: E402
from vapo_mcore.checkpoint import state  # noqa: E402
from vapo_mcore.config.schema import ParallelConfig  # noqa: E402
from vapo_mcore.data.thd import ThdLayout  # noqa: E402
from vapo_mcore.megatron import engine, offload  # noqa: E402
from vapo_mcore.megatron.parallel import initialize_parallel  # noqa: E402

LENGTHS = [[9, 5], [3]]
MUTANTS: dict[str, Callable[[], Any]] = {}


def mutant(function: Callable[[], Any]) -> Callable[[], Any]:
    MUTANTS[function.__name__] = function
    return function


PARALLEL: Any = None
POLICY: Any = None
"""Of the process of one mutant: each has one of its own, forked before the device is used."""


def step(loss: Any = None) -> Any:
    return POLICY.train_step(microbatches(PARALLEL, LENGTHS), loss or TokenLoss())


@contextmanager
def moving(*models: Any) -> Iterator[offload.Residency]:
    residency = offload.Residency(enabled=True)
    for model in models:
        residency.add(model)
    yield residency
    for name in list(residency.offloaders):
        residency.enter(f"{name}_update")  # type: ignore[arg-type]
        residency.remove(name)


@mutant
def nothing_seeded() -> None:
    step()
    with moving(POLICY) as residency:
        residency.enter("policy_update")
        step()
        residency.mark_changed("policy")
    with mock.patch.object(runtime.Cudart, "page_lockable_bytes", 1000):
        try:
            offload.HostPool().buffer(("x", 0), torch.zeros(4096, device=PARALLEL.device))
        except MemoryError:  # whoever caught it may go on: its error is fetched
            torch.zeros(1, device=PARALLEL.device)
        else:
            raise AssertionError("more was page-locked than can be")


@mutant
def loss_adds_a_host_tensor() -> None:
    class Loss(TokenLoss):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            return (outputs["logprobs"] * torch.ones(outputs["logprobs"].shape[0])).sum(), {}

    step(Loss())


@mutant
def statistic_on_the_host() -> None:
    class Loss(TokenLoss):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            return super().__call__(outputs, batch)[0], {"x": torch.tensor(1.0)}

    step(Loss())


@mutant
def layout_index_on_the_host() -> None:
    real = ThdLayout._build_indices

    def build_indices(self: Any, *args: Any) -> None:
        real(self, *args)
        self._real_sources = self._real_sources.cpu()

    with mock.patch.object(ThdLayout, "_build_indices", build_indices):
        step()


@mutant
def numpy_of_a_device_tensor() -> None:
    POLICY.forward(microbatches(PARALLEL, LENGTHS))["logprobs"][0].numpy()


@mutant
def collective_of_a_host_tensor() -> None:
    assert POLICY.optimizer is not None
    with mock.patch.object(POLICY.optimizer, "_device", torch.device("cpu")):
        step()


@mutant
def collective_not_waited_for() -> None:
    real = dist.all_reduce
    with mock.patch.object(engine.dist, "all_reduce", lambda *args, **kwargs: real(*args, **{**kwargs, "async_op": True})):
        step()


@mutant
def host_generator_on_the_device() -> None:
    torch.rand(3, device=PARALLEL.device, generator=torch.Generator().manual_seed(1))


@mutant
def host_generator_in_place() -> None:
    torch.zeros(3, device=PARALLEL.device).normal_(generator=torch.Generator().manual_seed(1))


@mutant
def random_state_of_the_host_restored_on_the_device() -> None:
    with mock.patch.object(torch.cuda, "get_rng_state", torch.get_rng_state):
        saved = state.random_state()
    state.restore_random_state(saved)


@mutant
def microbatch_on_another_device() -> None:
    with mock.patch.object(torch.Tensor, "to", lambda self, device, **kwargs: self.cuda(1)):
        microbatches(PARALLEL, LENGTHS)


@mutant
def forward_of_an_offloaded_model() -> None:
    with moving(POLICY):
        POLICY.forward(microbatches(PARALLEL, LENGTHS))


@mutant
def host_copy_read_before_synchronising() -> None:
    with moving(POLICY) as residency, mock.patch.object(offload, "_synchronize"):
        residency.enter("policy_update")
        residency.mark_changed("policy")
        residency.enter("generate")
        next(iter(residency.pool._buffers.values())).sum()


@mutant
def host_copy_overwritten_during_upload() -> None:
    with moving(POLICY) as residency, mock.patch.object(offload, "_synchronize"):
        residency.enter("logprobs")
        for buffer in residency.pool._buffers.values():
            buffer.add_(0)


@mutant
def parameters_loaded_on_an_unordered_stream() -> None:
    with moving(POLICY) as residency, mock.patch.object(offload, "_synchronize"):
        with torch.cuda.stream(torch.cuda.Stream()):
            residency.enter("logprobs")
        POLICY.forward(microbatches(PARALLEL, LENGTHS))


@mutant
def memory_freed_while_another_stream_uses_it() -> None:
    tensor = torch.ones(8, device=PARALLEL.device)
    with torch.cuda.stream(side := torch.cuda.Stream()):
        side.wait_stream(torch.cuda.default_stream())
        tensor.add_(1)
    del tensor


@mutant
def page_locked_memory_not_unregistered() -> None:
    pool = offload.HostPool()
    pool.buffer(("x", 0), torch.zeros(4096, device=PARALLEL.device))
    with mock.patch.object(torch.cuda.cudart(), "cudaHostUnregister", return_value=0):
        pool.release("x")
    gc.collect()


@mutant
def page_locked_twice_and_the_error_not_fetched() -> None:
    buffer = torch.empty(4096)
    for _ in range(2):
        torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    try:
        torch.zeros(1, device=PARALLEL.device)
    finally:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


@mutant
def frozen_parameters_stay() -> str | None:
    real = offload.ModelOffloader.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._frozen, self._frozen_bytes = [], []

    before = torch.cuda.memory_allocated()
    with mock.patch.object(offload.ModelOffloader, "__init__", init):
        critic = build("critic", PARALLEL, head_only=True)
        residency = offload.Residency(enabled=True)
        residency.add(critic)
    left = torch.cuda.memory_allocated() - before
    return f"{left} bytes left" if left > 100_000 else None


@mutant
def item_of_every_microbatch() -> str | None:
    class Loss(TokenLoss):
        def __call__(self, outputs: Any, batch: Any) -> Any:
            total, stats = super().__call__(outputs, batch)
            float(total.detach())
            return total, stats

    counts = []
    for loss in (TokenLoss(), Loss()):
        step(loss)  # the first step makes the optimizer's state
        with fake_cuda.counted_syncs() as syncs:
            step(loss)
        counts.append(sum(syncs.values()))
    return f"{counts[1] - counts[0]} more" if counts[1] > counts[0] else None


@mutant
def gradients_read_by_the_cpu_optimizer_before_they_arrive() -> None:
    model = build("policy", PARALLEL, cpu_offload=True)
    with mock.patch.object(order.Event, "synchronize"):
        model.train_step(microbatches(PARALLEL, LENGTHS), TokenLoss())


@mutant
def device_used_in_a_forked_child() -> str | None:
    child = os.fork()
    if child == 0:
        try:
            torch.zeros(1, device=PARALLEL.device)
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    return "the child raised" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3 else None


def run(function: Callable[[], Any]) -> str | None:
    """What the fake device says to one mutant, in this process."""
    global PARALLEL, POLICY
    PARALLEL = initialize_parallel(ParallelConfig())
    POLICY = build("policy", PARALLEL)
    try:
        said = function()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
        said = f"{type(error).__name__}: {error}"
    gc.collect()
    return said or "; ".join(fake_cuda.FAULTS) or None


def main() -> None:
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    found: dict[str, str | None] = {}
    for name, function in MUTANTS.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        child = os.fork()
        if child == 0:
            file.write_text(json.dumps(run(function)))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
        found[name] = json.loads(file.read_text())
    file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
