"""The references against torch's operators and autograd in float64; without Transformer Engine and the fake device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.te_reference import attention, functions

LENGTHS = (6, 2, 9)
CAUSAL, ALL = (SimpleNamespace(name=f"NVTE_PADDING_{kind}MASK") for kind in ("CAUSAL_", ""))
LAYOUT = SimpleNamespace(name="NVTE_THD_THD_THD")
THD = SimpleNamespace(name="NVTE_THD")
FLOAT32 = SimpleNamespace(name="kFloat32")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def offsets(lengths: Any, factor: int = 1) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).mul(factor).int()


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_rmsnorm() -> None:
    x, weight, gradient = random(5, 16), random(16) + 1, random(5, 16, seed=1)
    inputs = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = F.rms_norm(inputs[0], (16,), inputs[1], eps=1e-3)
    of_x, of_weight = torch.autograd.grad(expected, inputs, gradient.double())
    out, mean, scale = functions.rmsnorm_fwd(x, weight, 1e-3, None, None, FLOAT32, 0, False)
    assert mean is None
    close(out, expected)
    for got, right in zip(functions.rmsnorm_bwd(gradient, x, scale, weight, 0, False), (of_x, of_weight), strict=True):
        close(got, right)
    with pytest.raises(AssertionError, match="has strides"):  # the kernel would read it as if it were contiguous
        functions.rmsnorm_fwd(random(16, 5).T, weight, 1e-3, None, None, FLOAT32, 0, False)


def gemm(a: Tensor, b: Tensor, layout: str, **options: Any) -> tuple[Tensor, Tensor | None]:
    workspace = torch.empty(8, dtype=torch.uint8)
    given = {"out": None, "bias": None, "grad": False, "accumulate": False} | options
    flags = layout[0] == "T", layout[1] == "T"
    arguments = (a, flags[0], b, flags[1], given["out"], None, FLOAT32, given["bias"], FLOAT32, False, None, given["grad"], workspace, 8)
    beta = 1.0 if given["accumulate"] else 0.0
    out, of_bias, _, _ = functions.generic_gemm(*arguments, given["accumulate"], False, alpha=1.0, beta=beta)
    return out, of_bias


def test_matrix_products_of_a_linear_layer() -> None:
    """Layouts "TN", "NN" and "NT", bias and its gradient, and accumulation into a main gradient, on [sequence, batch, hidden]."""
    x, weight, bias, gradient = random(4, 3, 8), random(6, 8), random(6), random(4, 3, 6)
    inputs = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.linear(*inputs)
    of_x, of_weight, of_bias = torch.autograd.grad(expected, inputs, gradient.double())
    close(gemm(weight, x, "TN", bias=bias)[0], expected)
    close(gemm(weight, gradient, "NN", grad=True)[0], of_x)
    main = random(6, 8, seed=9)
    before = main.clone()
    got, got_bias = gemm(x, gradient, "NT", grad=True, bias=bias, out=main, accumulate=True)
    assert got is main and got_bias is not None
    close(main, before + of_weight)
    close(got_bias, of_bias)


def grouped_gemm(a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, *, grad: bool, accumulate: bool = False) -> None:
    workspaces, none = [torch.empty(8, dtype=torch.uint8)] * 2, [torch.empty(0)] * len(a)
    single = layout != "NT"
    flags = (a, layout[0] == "T", b, layout[1] == "T", out, FLOAT32, [x.shape[0] for x in b], none, FLOAT32, single, none, grad)
    assert functions.te_general_grouped_gemm(*flags, workspaces, 8, accumulate, False, 0) is none


def test_matrix_products_of_experts() -> None:
    """Each expert's rows, in all three layouts, and experts without tokens, first, between and last."""
    rows = [0, 3, 0, 5, 0]
    weights = [random(6, 8, seed=number).requires_grad_() for number in range(5)]
    x, gradient = random(8, 8).requires_grad_(), random(8, 6)
    expected = torch.cat([F.linear(part, weight) for part, weight in zip(x.split(rows), weights, strict=True)])
    of_x, *of_weights = torch.autograd.grad(expected, [x, *weights], gradient, materialize_grads=True)
    plain, nan = [weight.detach() for weight in weights], float("nan")
    out, of_input = torch.full((8, 6), nan), torch.full((8, 8), nan)
    inputs, gradients = list(x.detach().split(rows)), list(gradient.split(rows))
    grouped_gemm(plain, inputs, [out], "TN", grad=False)
    close(out, expected)
    grouped_gemm(plain, gradients, [of_input], "NN", grad=True)
    close(of_input, of_x)
    got = [torch.full((6, 8), nan) for _ in rows]
    grouped_gemm(inputs, gradients, got, "NT", grad=True)
    for one, right in zip(got, of_weights, strict=True):
        close(one, right)
    grouped_gemm(inputs, gradients, got, "NT", grad=True, accumulate=True)
    for one, right in zip(got, of_weights, strict=True):
        close(one, 2 * right)


def test_tf32_keeps_ten_bits() -> None:
    a, b = random(6, 64), random(5, 64)
    exact = gemm(a, b, "TN")[0]
    functions.ROUND_TO_TF32[0] = True
    try:
        rounded = gemm(a, b, "TN")[0]
        one = gemm(torch.tensor([[1 + 2**-10]]), torch.tensor([[1 + 2**-11 + 2**-13]]), "TN")[0]
    finally:
        functions.ROUND_TO_TF32[0] = False
    assert 1e-5 < float((rounded - exact).norm() / exact.norm()) < 2**-10
    assert one.item() == pytest.approx((1 + 2**-10) ** 2, abs=1e-7)


@pytest.mark.parametrize("cp", [1, 2])
def test_rotary_embedding(cp: int) -> None:
    """Every context-parallel rank's chunks, with dimensions that are not rotated; the backward pass is the transpose."""
    lengths = [4 * cp, 2 * cp, 6 * cp]
    freqs = random(64, 1, 1, 8)
    whole = torch.cat([freqs[:length, 0] for length in lengths])
    x = random(sum(lengths), 3, 12)
    half_turned = torch.cat((-x[..., 4:8], x[..., :4]), -1)
    expected = torch.cat((x[..., :8] * whole.cos() + half_turned * whole.sin(), x[..., 8:]), -1)
    for rank in range(cp):
        rows, start = [], 0
        for length in lengths:
            chunk = length // (2 * cp)
            for number in (rank, 2 * cp - 1 - rank) if cp > 1 else (0, 1):
                rows += range(start + number * chunk, start + (number + 1) * chunk)
            start += length
        rest = (None, THD, False, offsets(lengths), cp, rank)
        close(functions.fused_rope_forward(x[rows], freqs, *rest), expected[rows])
        gradient = random(len(rows), 3, 12, seed=3)
        local = x[rows].clone().requires_grad_()
        turned = functions.fused_rope_forward(local, freqs, *rest)
        close(functions.fused_rope_backward(gradient, freqs, *rest), torch.autograd.grad(turned, local, gradient)[0])


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Any) -> Tensor:
    parts = []
    for one, two, three in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        heads = [x.transpose(0, 1)[None] for x in (one, two, three)]
        parts.append(F.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Any, real: Tensor, padded: Tensor) -> list[Tensor]:
    fixed = (0.3, 0.0, True, LAYOUT, None, mask, None, (-1, 0), real[0], real[1], q, k, v, torch.float32, padded[0], padded[1])
    return attention.fused_attn_fwd(99, 99, True, *fixed, None, None, None, None, None, None, None, 16, False, False)


def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, sums: Tensor, mask: Any, real: Any, padded: Any) -> list[Any]:
    fixed = (0.3, 0.0, True, LAYOUT, None, mask, None, (-1, 0), False, real[0], real[1], q, k, v, out, gradient, torch.float32, FLOAT32)
    return attention.fused_attn_bwd(99, 99, *fixed, [sums, sums], padded[0], padded[1], None, None, None, False)


def test_fused_attention() -> None:
    q, k, v, gradient = random(17, 4, 8), random(17, 2, 8), random(17, 2, 8, seed=1), random(17, 4, 8, seed=2)
    inputs = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = attend(*inputs, LENGTHS)
    right = torch.autograd.grad(expected, inputs, gradient.double())
    both = (offsets(LENGTHS),) * 2
    out, sums, _ = forward(q, k, v, CAUSAL, both, both)
    close(out, expected)
    for got, one in zip(backward(q, k, v, out, gradient, sums, CAUSAL, both, both), right, strict=False):
        close(got, one)


def test_ring_exchange_of_two_ranks() -> None:
    """The steps of Transformer Engine's exchange (AttnFuncWithCPAndKVP2P), with the references of its parts, give causal attention."""
    lengths = (8, 4, 12)
    q, k, v, gradient = random(24, 4, 8), random(24, 2, 8), random(24, 2, 8, seed=1), random(24, 4, 8, seed=2)
    inputs = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = attend(*inputs, lengths)
    right = torch.autograd.grad(expected, inputs, gradient.double())
    rows: list[list[int]] = [[], []]
    start = 0
    for length in lengths:
        for number in range(4):
            rows[min(number, 3 - number)] += range(start + number * length // 4, start + (number + 1) * length // 4)
        start += length
    halves, quarters = offsets([n // 2 for n in lengths]), offsets([n // 4 for n in lengths])
    of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
    for rank in range(2):
        mine, theirs = rows[rank], rows[1 - rank]
        local, remote = [x[mine] for x in (q, k, v)], [x[theirs] for x in (k, v)]
        out0, sums0, _ = forward(*local, CAUSAL, (halves, halves), (halves, halves))
        second = rank == 0  # its first chunks come before all of the other's keys
        queries = functions.thd_read_half_tensor(local[0], halves, 1) if second else local[0]
        keys = remote if second else [functions.thd_read_half_tensor(x, halves, 0) for x in remote]
        real = (quarters, halves) if second else (halves, quarters)
        out1, sums1, _ = forward(queries, *keys, ALL, real, real)
        steps = [sums.squeeze(-1).T.contiguous() for sums in (sums0, sums1)]
        total = steps[0].clone()
        if second:
            attention.thd_second_half_lse_correction(total, steps[1], halves, True)
        else:
            total = torch.logaddexp(*steps)
        out = torch.zeros_like(local[0])
        attention.thd_out_correction(out, out0, total, steps[0], halves, False, True)
        attention.thd_out_correction(out, out1, total, steps[1], halves, second, True)
        close(out, expected[mine])
        of_out, of_q = gradient[mine], torch.empty_like(local[0])
        of_q0, of_k0, of_v0, *_ = backward(*local, out, of_out, total.T[..., None], CAUSAL, (halves, halves), (halves, halves))
        sums, parts = total.T[..., None], (out, of_out)
        if second:
            sums = attention.thd_read_second_half_lse(total, halves, True, 12 // 2).T[..., None]
            parts = tuple(functions.thd_read_half_tensor(x, halves, 1) for x in parts)
        of_q1, of_k1, of_v1, *_ = backward(queries, *keys, *parts, sums, ALL, real, real)
        attention.thd_grad_correction(of_q, of_q0, halves, "copy", "copy")
        attention.thd_grad_correction(of_q, of_q1, halves, *(("none", "add") if second else ("add", "add")))
        close(of_q, right[0][mine])
        for whole, own, other in ((of_k, of_k0, of_k1), (of_v, of_v0, of_v1)):
            whole[mine] += own
            into = whole[theirs]
            attention.thd_grad_correction(into, other, halves, *(("add", "add") if second else ("add", "none")))
            whole[theirs] = into
    close(of_k, right[1])
    close(of_v, right[2])


def test_padding_to_the_longest() -> None:
    packed = random(17, 2, 4)
    padded = functions.convert_thd_to_bshd(packed, offsets(LENGTHS), 3, 9)
    assert padded.shape == (3, 9, 2, 4) and padded[1, 2:].count_nonzero() == 0
    assert torch.equal(functions.convert_bshd_to_thd(padded, offsets(LENGTHS), 17), packed)


@pytest.mark.parametrize("main", [False, True])
def test_adam(main: bool) -> None:
    start, gradient = random(7, 3), random(7, 3, seed=1)
    expected = torch.nn.Parameter(start.double())
    torchs = torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1)
    parameter, first, second = start.bfloat16() if main else start.clone(), torch.zeros(7, 3), torch.zeros(7, 3)
    mains = [[start.clone()]] if main else []
    for step in (1, 2):
        expected.grad = gradient.double()
        torchs.step()
        lists = [[gradient], [parameter], [first], [second], *mains]
        functions.multi_tensor_adam(1, torch.zeros(1), lists, 0.1, 0.9, 0.99, 1e-5, step, 1, 1, 0.1)
    close(mains[0][0] if main else parameter, expected)
    assert not main or torch.equal(parameter, mains[0][0].bfloat16())


def test_norm_and_scaling() -> None:
    tensors, flag = [random(5), random(3, 4)], torch.zeros(1, dtype=torch.int32)
    norm, each = functions.multi_tensor_l2norm(1, flag, [tensors], True)
    close(norm, torch.cat([x.flatten() for x in tensors]).norm()[None])
    close(each, torch.stack([x.norm() for x in tensors]))
    out = [torch.empty_like(x) for x in tensors]
    functions.multi_tensor_scale(1, flag, [tensors, out], 0.5)
    assert all(torch.equal(a, b * 0.5) for a, b in zip(out, tensors, strict=True)) and flag.item() == 0
    functions.multi_tensor_scale(1, flag, [[torch.tensor([float("inf")])], [torch.empty(1)]], 0.5)
    assert flag.item() == 1
