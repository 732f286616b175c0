"""Checksums change with any change of bits, order, shape or type, and do not depend on how a tensor lies in memory."""

from __future__ import annotations

import pytest
import torch

from vapo_mcore.weights import checksums
from vapo_mcore.weights.checksums import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (64, 33), (0, 4)])
def test_equal_bits_equal_checksum(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    inside = torch.cat([torch.zeros(1, dtype=dtype), tensor.reshape(-1)])[1:].view(shape)  # not aligned to 8 bytes
    assert tensor_checksum(inside) == tensor_checksum(tensor)
    if tensor.dim() == 2:
        assert tensor_checksum(tensor.t().contiguous().t()) == tensor_checksum(tensor)


def test_every_small_change_shows() -> None:
    base = torch.randn(50, 7, generator=torch.Generator().manual_seed(2))
    seen = {tensor_checksum(base)}
    changed = [
        base.flip(0),
        base.flip(1),
        base.roll(1, 0),
        base.roll(1, 1),
        base.t(),
        base.reshape(7, 50),
        base.reshape(-1),
        base.bfloat16(),
        -base,
    ]
    changed += [base.view(torch.int32).bitwise_xor(bit).view(torch.float32) for bit in (1, 1 << 20)]
    for first in range(0, 50, 7):
        for second in range(first + 1, 50, 5):
            swapped = base.clone()
            swapped[[first, second]] = base[[second, first]]
            changed.append(swapped)
    for position in range(base.numel()):
        one_bit = base.clone()
        one_bit.view(-1).view(torch.int32)[position] ^= 1
        changed.append(one_bit)
    for tensor in changed:
        checksum = tensor_checksum(tensor)
        assert checksum not in seen
        seen.add(checksum)


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1001, generator=torch.Generator().manual_seed(3))
    whole = tensor_checksum(tensor)
    monkeypatch.setitem(checksums._PIECE_WORDS, "cpu", 13)
    assert tensor_checksum(tensor) == whole


def test_splitmix_finaliser_by_hand() -> None:
    """One word at position 0: the result is the finaliser of splitmix64 with Python's own integers."""
    word = 0x0123456789ABCDEF
    mask = (1 << 64) - 1
    z = (0x9E3779B97F4A7C15 + word) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    assert tensor_checksum(torch.tensor([word])) == f"int64:1:{z:016x}"


def test_a_model_can_be_offloaded_after_its_large_tensors_were_summed() -> None:
    """A tensor large enough for the compiled loop, inside a storage that is emptied and filled again."""
    storage = torch.randn(checksums._COMPILED_WORDS * 2 + 10, generator=torch.Generator().manual_seed(4))
    inside = storage[10:]
    assert inside.numel() * 4 // 8 >= checksums._COMPILED_WORDS
    total = int(checksums._sum_in_pieces(inside.view(torch.int64)).item()) % (1 << 64)
    assert tensor_checksum(inside) == f"float32:{inside.numel()}:{total:016x}"
    kept, bytes_of_storage = storage.clone(), storage.untyped_storage().nbytes()
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(bytes_of_storage)
    storage.copy_(kept)
    assert tensor_checksum(inside) == f"float32:{inside.numel()}:{total:016x}"
