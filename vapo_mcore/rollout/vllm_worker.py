"""vLLM's CPU worker with shared-memory names of its own for every run. Imported by vLLM, by name."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vapo_mcore.rollout.vllm_engine import RUN_KEY


class RunScopedCPUWorker(CPUWorker):
    """Tensor parallelism on CPU goes through ``/dev/shm`` segments that vLLM names after its init method alone.

    Launched by torchrun that is always ``env://``: a second run on the machine, or one after a killed run, would find the segments
    taken and fail. The process group exists before vLLM starts, so the init method names the segments and does nothing else;
    here it carries the run's key.
    """

    def init_device(self) -> None:
        self.distributed_init_method = f"env://:{self.vllm_config.additional_config[RUN_KEY]}"
        super().init_device()
