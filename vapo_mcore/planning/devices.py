"""Memory sizes and rates of devices and their nodes that ``plan`` assumes; each can be overridden on the command line.

Sizes and peak rates come from data sheets (H100 SXM5 80 GB, H200 SXM 141 GB, eight per node with NVLink and one 400 Gbit/s adapter per
device). Efficiencies and residual memory are assumptions, to be replaced by measurements; nothing here has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from vapo_mcore.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Properties of a device: sizes in bytes, rates in bytes or operations per second.

    Attributes:
        memory: memory of one device; for ``cpu`` the memory of the node, shared by its processes.
        node_memory: host memory of a node.
        flops, flops_float32: dense peak in bfloat16 and in float32.
        train_efficiency, forward_efficiency: fraction of the peak reached by matrix products in training and in forward passes.
        memory_rate, memory_efficiency: bandwidth of the device memory, and the fraction reached when decoding.
        node_rate: bandwidth to other devices of the node, one direction; network_rate: to other nodes; host_rate: to host memory.
        host_update_rate: host-memory traffic of AdamW on the CPU, per process.
        decode_overhead: minimum seconds of an engine step besides reading memory; layer_latency: seconds of one small all-reduce.
        context_bytes: CUDA context and libraries. nccl_bytes: one communicator. cuda_graph_bytes: vLLM's CUDA graphs.
        process_host_bytes: host memory of a process without offloaded state.
        slack: fraction of activation memory lost to fragmentation.
    """

    name: str
    memory: float
    node_memory: float
    flops: float
    flops_float32: float
    train_efficiency: float
    forward_efficiency: float
    memory_rate: float
    memory_efficiency: float
    node_rate: float
    network_rate: float
    host_rate: float
    host_update_rate: float
    decode_overhead: float
    layer_latency: float
    context_bytes: float
    nccl_bytes: float
    cuda_graph_bytes: float
    process_host_bytes: float
    slack: float

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


_H100 = Device(
    name="h100",
    memory=79.6 * GIB,
    node_memory=2048 * GIB,
    flops=989e12,
    flops_float32=495e12,
    train_efficiency=0.45,
    forward_efficiency=0.50,
    memory_rate=3.35e12,
    memory_efficiency=0.65,
    node_rate=450e9 * 0.7,
    network_rate=50e9 * 0.8,
    host_rate=55e9 * 0.8,
    host_update_rate=20e9,
    decode_overhead=2e-3,
    layer_latency=10e-6,
    context_bytes=0.7 * GIB,
    nccl_bytes=0.15 * GIB,
    cuda_graph_bytes=1.5 * GIB,
    process_host_bytes=6 * GIB,
    slack=0.05,
)

DEVICES: dict[str, Device] = {
    "h100": _H100,
    "h200": replace(_H100, name="h200", memory=139.8 * GIB, memory_rate=4.8e12),
    # A process on a small machine; the bfloat16 rate is from the SmolLM2 run in docs/results.md (two threads).
    "cpu": Device(
        name="cpu",
        memory=16 * GIB,
        node_memory=16 * GIB,
        flops=400e9,
        flops_float32=60e9,
        train_efficiency=0.5,
        forward_efficiency=0.5,
        memory_rate=10e9,
        memory_efficiency=0.6,
        node_rate=2e9,
        network_rate=1e9,
        host_rate=10e9,
        host_update_rate=20e9,
        decode_overhead=15e-3,
        layer_latency=200e-6,
        context_bytes=0.0,
        nccl_bytes=0.0,
        cuda_graph_bytes=0.0,
        process_host_bytes=0.7 * GIB,
        slack=0.0,
    ),
}

_NUMBERS = tuple(field.name for field in fields(Device) if field.name != "name")


def choose_device(name: str, rates: Sequence[str]) -> Device:
    """Return the device's table with ``KEY=NUMBER`` overrides applied. Raises ConfigError naming invalid ones."""
    device = DEVICES[name]
    faults, changes = [], {}
    for setting in rates:
        key, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if key not in _NUMBERS:
            faults.append(f"--rate {setting}: unknown; known are {', '.join(_NUMBERS)}")
        elif not 0 <= value < float("inf") or (value == 0 and key in _DIVISORS):
            faults.append(f"--rate {setting}: {text!r} is not a {'positive number' if key in _DIVISORS else 'number from 0'}")
        else:
            changes[key] = value
    if faults:
        raise ConfigError("\n".join(faults))
    return replace(device, **changes)  # type: ignore[arg-type]


_DIVISORS = tuple(name for name in _NUMBERS if name.endswith(("_rate", "_efficiency", "flops", "flops_float32")) or "memory" in name)
