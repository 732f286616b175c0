"""Device-independent checksums of tensors, to compare both sides of a weight sync."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_PIECE_WORDS = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Words mixed at a time: fits a core's cache, and fills a GPU without much temporary memory."""
_COMPILED_WORDS = 1 << 15
"""From this many words on, CPU tensors are summed by a compiled loop, about ten times as fast; compilation takes about a second once."""
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MASK = (1 << 64) - 1


def tensor_checksum(tensor: Tensor) -> str:
    """Return the checksum ``"<dtype>:<shape>:<16 hex digits>"`` of the exact bits of a tensor.

    The digits are a 64-bit sum over the tensor's 8-byte words, each first mixed with its position (the finaliser of splitmix64;
    Steele, Lea and Flood 2014), so that a changed bit, a swap or a shift changes the result. Computed on the tensor's device: in one
    compiled pass on CPU, elsewhere in a few passes of integer arithmetic with bounded temporary memory. Detects errors, not forgery.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    words = raw[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    if raw.device.type == "cpu" and words.numel() >= _COMPILED_WORDS:
        total = torch.from_numpy(_compiled_sum()(_memory_of(words)))
    else:
        total = _sum_in_pieces(words)
    if whole < raw.numel():
        tail = raw.new_zeros(8)
        tail[: raw.numel() - whole] = raw[whole:]
        total += _mixed_sum(tail.view(torch.int64), words.numel())
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{shape}:{int(total.item()) & _MASK:016x}"


def _memory_of(words: Tensor) -> Any:
    """Return a numpy array of the memory of a contiguous int64 CPU tensor, which must outlive it.

    ``words.numpy()`` would make the whole storage not resizable, also if it holds a model's parameters, which offloading empties.
    """
    import numpy as np

    return np.ctypeslib.as_array((ctypes.c_int64 * words.numel()).from_address(words.data_ptr()))


def _sum_in_pieces(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    piece = _PIECE_WORDS["cpu" if words.device.type == "cpu" else "cuda"]
    for start in range(0, words.numel(), piece):
        total += _mixed_sum(words[start : start + piece], start)
    return total


def _mixed_sum(words: Tensor, start: int) -> Tensor:
    mixed = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_GOLDEN).add_(words)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed.bitwise_xor_(_logical_shift(mixed, shift)).mul_(multiplier)
    mixed.bitwise_xor_(_logical_shift(mixed, 31))
    return mixed.sum()


def _logical_shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@cache
def _compiled_sum() -> Callable[[Any], Any]:
    """Compile ``_sum_in_pieces`` for numpy arrays as one loop that releases the GIL."""
    import numpy as np
    from numba import njit

    golden, first, second = (np.uint64(number & _MASK) for number in (_GOLDEN, *_MULTIPLIERS))
    one, shifts = np.uint64(1), tuple(np.uint64(bits) for bits in (30, 27, 31))

    @njit("uint64(uint64[::1])", nogil=True)
    def mixed_sum(words):  # type: ignore[no-untyped-def]  # pragma: no cover - runs as machine code
        total = np.uint64(0)
        for index in range(words.size):
            mixed = words[index] + (np.uint64(index) + one) * golden
            mixed = (mixed ^ (mixed >> shifts[0])) * first
            mixed = (mixed ^ (mixed >> shifts[1])) * second
            total += mixed ^ (mixed >> shifts[2])
        return total

    return lambda words: np.asarray(mixed_sum(words.view(np.uint64)), dtype=np.uint64).view(np.int64)
