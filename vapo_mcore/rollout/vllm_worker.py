"""vLLM's CPU worker with shared-memory names unique to each run. vLLM imports it by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vapo_mcore.rollout.quiet import stderr_without
from vapo_mcore.rollout.vllm_engine import RUN_KEY

NUMA_NOTICE = b"Warning: NUMA binding: Using MEMBIND policy"
"""In the line that vLLM's native code prints in every process when it binds memory to the NUMA node of the process's cores."""


class RunScopedCPUWorker(CPUWorker):
    """CPU worker whose ``/dev/shm`` segments, used for tensor parallelism, have names unique to the run.

    vLLM names the segments after its init method, which under torchrun is always ``env://``: a second run on the machine, or one after a
    killed run, would find them in use and fail. Because the process group already exists, the init method only names the segments, and
    the run's key can be added to it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with stderr_without(NUMA_NOTICE):
            super().__init__(*arguments, **named)

    def init_device(self) -> None:
        self.distributed_init_method = f"env://:{self.vllm_config.additional_config[RUN_KEY]}"
        super().init_device()
