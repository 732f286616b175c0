"""State of a run besides the models: named objects with ``state_dict`` and ``load_state_dict``, and the random generators.

States are trees of dicts (with string keys), lists, strings, numbers, booleans, None and tensors. Tensors are saved to a safetensors
file, everything else to JSON, so loading executes no code. Tuples are loaded as lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vapo_mcore.errors import CheckpointError
from vapo_mcore.megatron.host import HAS_CUDA, megatron_scope

_TENSOR = "__tensor__"
PARTS = "open_responses"
"""Folder of the parts of a checkpoint's state."""


@dataclass(frozen=True)
class Part:
    """State that only some ranks have, one file each: the tokens of the open responses of one rollout replica (``replica``)."""

    replica: int
    data: bytes

    @property
    def file_name(self) -> str:
        return part_name(self.replica)

    @classmethod
    def of(cls, replica: int, tensors: Mapping[str, Tensor]) -> Part:
        return cls(replica, save_tensors(dict(tensors)))


def part_name(replica: int) -> str:
    return f"replica_{replica:05d}.safetensors"


class Stateful(Protocol):
    """An object whose state, plain values and tensors equal on all ranks, can be registered."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class StateRegistry:
    """The objects saved in a checkpoint, by name. Loading requires a state for exactly the registered objects."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def register(self, name: str, thing: Stateful) -> None:
        assert name not in self._objects, f"{name} is registered already"
        self._objects[name] = thing

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._objects.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load all states. Raises CheckpointError naming missing and unexpected ones before anything is loaded."""
        missing, surplus = sorted(self._objects.keys() - state.keys()), sorted(state.keys() - self._objects.keys())
        if missing or surplus:
            parts = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("surplus", surplus)) if names]
            raise CheckpointError(f"the checkpoint's state does not match this configuration; {'; '.join(parts)}")
        for name, thing in self._objects.items():
            thing.load_state_dict(state[name])


def decode_part(data: bytes) -> dict[str, Tensor]:
    """Read the data of a ``Part``. Raises CheckpointError if it is damaged."""
    try:
        return load_tensors(data)
    except Exception as error:
        raise CheckpointError(f"the open responses of the checkpoint are damaged: {error}") from error


def encode(state: Any) -> tuple[bytes, bytes]:
    """Serialise a state as (JSON, safetensors)."""
    tensors: dict[str, Tensor] = {}

    def strip(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach().cpu().contiguous().clone()
            return {_TENSOR: path}
        if isinstance(value, Mapping):
            assert all(isinstance(key, str) for key in value), f"{path}: keys of a state are strings"
            return {key: strip(inner, f"{path}/{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [strip(inner, f"{path}/{number}") for number, inner in enumerate(value)]
        assert value is None or isinstance(value, str | int | float | bool), f"{path}: a state cannot hold a {type(value).__name__}"
        return value

    text = json.dumps(strip(state, ""))  # NaN and inf as Python's json writes them
    return text.encode(), save_tensors(tensors or {"_": torch.zeros(0)})


def decode(text: bytes, tensors: bytes) -> Any:
    """Deserialise the output of :func:`encode`. Raises CheckpointError if it is damaged."""
    try:
        found = load_tensors(tensors)

        def restore(value: Any) -> Any:
            if isinstance(value, dict):
                return found[value[_TENSOR]] if value.keys() == {_TENSOR} else {key: restore(inner) for key, inner in value.items()}
            return [restore(inner) for inner in value] if isinstance(value, list) else value

        return restore(json.loads(text))
    except Exception as error:
        raise CheckpointError(f"the state of the checkpoint is damaged: {error}") from error


def random_state() -> bytes:
    """Return the state of all random generators of this process (Python, NumPy, torch, CUDA, Megatron) as a safetensors file."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937"
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor(np.asarray(keys).astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if HAS_CUDA:
        tensors["cuda"] = torch.cuda.get_rng_state()
    tensors |= {f"megatron/{name}": state.clone() for name, state in _tracker().get_states().items()}
    return save_tensors(tensors)


def restore_random_state(data: bytes) -> None:
    """Restore all generators from :func:`random_state`; CUDA's only if both machines have CUDA."""
    try:
        found = load_tensors(data)
        gauss = found["python_gauss"].tolist()
        random.setstate((3, tuple(found["python"].tolist()), gauss[0] if gauss else None))
        position, has_gauss = found["numpy_position"].tolist()
        np.random.set_state(("MT19937", found["numpy"].numpy().astype(np.uint32), position, has_gauss, float(found["numpy_gauss"])))
        torch.set_rng_state(found["torch"])
        if HAS_CUDA and "cuda" in found:
            torch.cuda.set_rng_state(found["cuda"])
        states = {name.removeprefix("megatron/"): state for name, state in found.items() if name.startswith("megatron/")}
        known = _tracker().get_states()
        if all(name in known and known[name].shape == state.shape for name, state in states.items()):
            _tracker().set_states(states)
    except Exception as error:
        raise CheckpointError(f"the saved random state is damaged: {error}") from error


def _tracker() -> Any:
    with megatron_scope():
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        return get_cuda_rng_tracker()
