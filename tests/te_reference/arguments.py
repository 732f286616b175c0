"""What the references share: types, offsets, and what they refuse."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_TYPES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
_TOLIST = Tensor.tolist  # imported before a fake device replaces it: reading offsets is part of a kernel, the host does not wait for it


def dtype_of(dtype: Any) -> torch.dtype:
    """Return torch's type of one of the extension's."""
    return dtype if isinstance(dtype, torch.dtype) else _TYPES[dtype.name]


def peek(offsets: Tensor) -> list[int]:
    """Return the numbers of an int32 tensor on the device, as a kernel reads them."""
    assert offsets.dtype == torch.int32, f"offsets are {offsets.dtype}, the kernels read int32"
    with torch._C.DisableTorchFunction():
        return list(_TOLIST(offsets))


def half(cu_seqlens: Tensor, which: int) -> Tensor:
    """Return the indices of the first (0) or second (1) half of each sequence, on the device of ``cu_seqlens``."""
    offsets = peek(cu_seqlens)
    indices: list[int] = []
    for begin, end in pairwise(offsets):
        middle = (begin + end) // 2
        indices += range(begin, middle) if which == 0 else range(middle, end)
    return torch.tensor(indices, dtype=torch.int64, device=cu_seqlens.device)


def refuse(**arguments: Any) -> None:
    """Raise NotImplementedError for an argument that is given and has no reference."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: no reference")


def require_contiguous(name: str, *tensors: Tensor) -> None:
    """Raise AssertionError for tensors that are not contiguous, where the extension reads memory as if they were."""
    for number, x in enumerate(tensors):
        assert x.is_contiguous(), f"{name}: tensor {number} {tuple(x.shape)} has strides {x.stride()}"
