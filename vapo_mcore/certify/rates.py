"""Compare measured rates with those that ``plan`` assumes, and derive the ``--rate`` options that make plan predict the measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from vapo_mcore.certify.record import Measurement, informs, warns
from vapo_mcore.certify.tolerances import BY_NAME
from vapo_mcore.config.architecture import ModelArchitecture
from vapo_mcore.config.schema import Config
from vapo_mcore.planning.devices import Device
from vapo_mcore.planning.memory import vllm_memory
from vapo_mcore.planning.timing import StepTimer
from vapo_mcore.planning.workload import Workload

SLOWER = BY_NAME["rates/slower"].float32
"""Factor below plan's assumption from which a rate of a GPU is a warning: assumptions are rough, a fault costs more."""


@dataclass(frozen=True)
class PassWork:
    """Micro-batches of one data-parallel rank, all alike: ``lengths`` of the sequences in each, in tokens, and their number."""

    lengths: tuple[int, ...]
    microbatches: int

    def workload(self, data_parallel_size: int) -> Workload:
        """As a step of plan's, with the length that gives the attention of these sequences."""
        local = sum(self.lengths) * self.microbatches
        mean = round(sum(length**2 for length in self.lengths) / sum(self.lengths))
        count = len(self.lengths) * self.microbatches
        return Workload(count * data_parallel_size, mean, 0, local * data_parallel_size, local, self.microbatches, 1)


@dataclass(frozen=True)
class GenerationWork:
    """Responses of all replicas: their number, their tokens, the longest one's, and the length of each prompt."""

    responses: int
    tokens: int
    longest: int
    prompt_length: int


class Assumed:
    """What plan assumes of a recipe's passes and generation on a device."""

    def __init__(self, config: Config, architecture: ModelArchitecture, device: Device) -> None:
        self.config, self.architecture, self.device = config, architecture, device

    def on(self, **rates: float) -> Assumed:
        """Return a copy with other rates."""
        return Assumed(self.config, self.architecture, replace(self.device, **rates))  # type: ignore[arg-type]

    def timer(self, work: Workload, config: Config | None = None) -> StepTimer:
        return StepTimer(config or self.config, self.architecture, None, work, self.device)

    def pass_seconds(self, work: PassWork, *, training: bool, reduced_bytes: float = 0.0) -> tuple[float, float]:
        """Seconds of matrix products, and of communication with ``reduced_bytes`` that a rank sends to reduce its gradients."""
        cost = self.timer(work.workload(self.config.parallel.data_parallel_size)).model_pass("policy", training=training, times=1)
        return cost.compute, cost.exchange + reduced_bytes / self.device.node_rate

    def efficiency(self, work: PassWork, seconds: float, *, training: bool, reduced_bytes: float = 0.0) -> float | None:
        """Return the fraction of peak at which plan's formula gives ``seconds``; None if communication alone takes as long."""
        compute, exchange = self.pass_seconds(work, training=training, reduced_bytes=reduced_bytes)
        if seconds <= exchange:
            return None
        return (self.device.train_efficiency if training else self.device.forward_efficiency) * compute / (seconds - exchange)

    def utilisation(self, work: PassWork, seconds: float, *, training: bool) -> float:
        """Operations of the model, without recomputation, as a fraction of the peak of all devices."""
        timer = self.timer(work.workload(self.config.parallel.data_parallel_size))
        return timer.model_operations("policy", training=training) / seconds / timer.peak / self.config.parallel.world_size

    def generation_seconds(self, work: GenerationWork) -> float:
        rollout = self.config.rollout.model_copy(update={"max_response_length": work.longest})
        config = self.config.model_copy(update={"rollout": rollout})
        step = Workload(work.responses, 0, work.prompt_length, 0, 0, 1, 1)
        vllm = vllm_memory(self.config, self.architecture, self.device)
        return self.timer(step, config).generation_seconds(vllm, work.responses, work.tokens / work.responses)

    def decode_rates(self, work: GenerationWork, seconds: float) -> dict[str, float]:
        """Rates of decoding at which plan's formula gives ``seconds``, all slower or faster by the same factor; empty where none do.

        One measurement does not tell an engine step's fixed time from the time to read memory.
        """
        device = self.device

        def scaled(factor: float) -> dict[str, float]:
            rates = {"decode_overhead": device.decode_overhead * factor, "memory_efficiency": device.memory_efficiency / factor}
            if self.config.rollout_tensor_parallel_size > 1:
                rates["layer_latency"] = device.layer_latency * factor
            return rates

        factor = solve(lambda factor: self.on(**scaled(factor)).generation_seconds(work), seconds)
        return {} if factor is None else scaled(factor)

    def sync_seconds(self, parameter_bytes: float) -> float:
        """``parameter_bytes``: of the policy's fullest rank."""
        vllm = vllm_memory(self.config, self.architecture, self.device)
        return self.timer(Workload(0, 0, 0, 0, 0, 1, 1)).sync_seconds(parameter_bytes, vllm)


def solve(function: Callable[[float], float], value: float) -> float | None:
    """Find the factor between 1e-4 and 1e4 at which an increasing function takes a value, or None."""
    low, high = math.log(1e-4), math.log(1e4)
    if not function(math.exp(low)) < value < function(math.exp(high)):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(math.exp(middle)) < value else (low, middle)
    return math.exp((low + high) / 2)


def compare_with_plan(
    what: str, value: float, unit: str, assumed: float | None, *, gpu: bool, seconds: bool = False, also: str = ""
) -> Measurement:
    """Compare a rate (or ``seconds``, of which less is better) with plan's: a warning for a GPU that is far slower, else information.

    ``assumed`` None: plan does not know the device.
    """
    shown = f"{number(value)} {unit}{also}"
    if assumed is None:
        return informs(what, f"{shown}; plan does not know this device", value)
    speed = assumed / value if seconds else value / assumed
    shown += f"; plan assumes {number(assumed)} {unit}, measured is {speed:.2g} times as fast"
    if gpu and speed * SLOWER < 1:
        remedy = (
            "compare with the usual rate of this device: clocks and power limits, other processes on the machine, links (`vapo-mcore "
            "doctor`), the kernels of this installation; if it is the usual one, give plan the --rate options below"
        )
        return replace(warns(what, shown, f"at most {SLOWER:g} times slower than plan assumes", remedy), value=value)
    return informs(what, shown, value)


def number(value: float) -> str:
    """Three digits, without an exponent from 0.001 to a million millions."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def options(rates: dict[str, float]) -> str:
    """``--rate`` options for ``vapo-mcore plan``."""
    return " ".join(f"--rate {name}={value:.4g}" for name, value in rates.items())
