"""Log-prob and entropy function against torch's own softmax in float64, values and gradients."""

import pytest
import torch

from vapo_mcore.megatron.logprob import vocab_parallel_logprobs


def reference(logits: torch.Tensor, labels: torch.Tensor, vocab: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(logits[:, :vocab] / temperature, -1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 70, 1 << 20])
@pytest.mark.parametrize("vocab", [32, 27])
def test_values_and_gradients(temperature: float, entropy: bool, chunk_elements: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, 32, generator=generator, dtype=torch.float64) * 5).requires_grad_()
    labels = torch.randint(0, vocab, (9,), generator=generator)
    weight, weight_entropy = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    expected, expected_entropy = reference(logits, labels, vocab, temperature)
    ((expected * weight).sum() + (expected_entropy * weight_entropy).sum() * entropy).backward()

    single = logits.detach().float().requires_grad_()
    got, got_entropy = vocab_parallel_logprobs(
        single, labels, vocab_size=vocab, temperature=temperature, entropy=entropy, chunk_elements=chunk_elements
    )
    loss = (got * weight.float()).sum()
    if entropy:
        assert got_entropy is not None
        torch.testing.assert_close(got_entropy, expected_entropy.float(), atol=1e-5, rtol=0)
        loss = loss + (got_entropy * weight_entropy.float()).sum()
    else:
        assert got_entropy is None
    loss.backward()
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(single.grad, logits.grad.float(), atol=1e-5, rtol=1e-5)
    assert (single.grad[:, vocab:] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_excluded_columns_have_no_probability_and_no_gradient(temperature: float, dtype: torch.dtype) -> None:
    """Some inside the vocabulary (listed) and its end (``vocab_size``), all with the largest logits of their rows."""
    generator = torch.Generator().manual_seed(4)
    outside = [3, 17, *range(27, 32)]
    logits = torch.randn(9, 32, generator=generator, dtype=torch.float64) * 5
    logits[:, outside] += 40
    logits = logits.to(dtype).double().requires_grad_()
    labels = torch.tensor([0, 1, 2, 4, 16, 18, 26, 5, 6])
    masked = logits.index_fill(1, torch.tensor(outside), float("-inf"))
    logp = torch.log_softmax(masked / temperature, -1)
    expected, expected_entropy = logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
    (expected.sum() + expected_entropy.sum()).backward()
    got_logits = logits.detach().to(dtype).requires_grad_()
    got, entropy = vocab_parallel_logprobs(
        got_logits, labels, vocab_size=27, temperature=temperature, entropy=True, excluded=torch.tensor([3, 17]), chunk_elements=70
    )
    assert entropy is not None and logits.grad is not None
    (got.sum() + entropy.sum()).backward()
    torch.testing.assert_close(got, expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=1e-5, rtol=0)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2**-6}
    assert got_logits.grad is not None
    torch.testing.assert_close(got_logits.grad.double(), logits.grad, **tolerance)
    assert (got_logits.grad[:, outside] == 0).all()


def test_temperature_is_applied_before_the_softmax() -> None:
    """Logits 2, 0 at T = 0.5: log-prob of token 0 is -0.0181; the raw one is -0.1269 and the raw one over T -0.2538."""
    logits = torch.tensor([[2.0, 0.0]])
    got, _ = vocab_parallel_logprobs(logits, torch.tensor([0]), vocab_size=2, temperature=0.5)
    assert got.item() == pytest.approx(-0.018150, abs=1e-6)


def test_bfloat16_logits_keep_a_float32_softmax() -> None:
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    labels = torch.arange(5)
    got, _ = vocab_parallel_logprobs(logits, labels, vocab_size=64, temperature=0.7)
    expected, _ = reference(logits.detach().double(), labels, 64, 0.7)
    torch.testing.assert_close(got, expected.float(), atol=2e-6, rtol=0)
    got.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    got, entropy = vocab_parallel_logprobs(logits, torch.tensor([0]), vocab_size=3, entropy=True)
    assert entropy is not None
    (got.sum() + entropy.sum()).backward()
    assert got.item() == 0.0 and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("entropy", [False, True])
def test_bfloat16_gradients_of_sure_and_unsure_tokens(entropy: bool) -> None:
    """The label's p of 0.999, 0.99999 and 0.3: bfloat16 would round the first two to 1, and their gradients 1 - p to 0."""
    logits = torch.zeros(3, 48, dtype=torch.float64)
    logits[0, 5], logits[1, 6], logits[2, 7] = 10.75, 15.375, 3.0
    logits = (logits + torch.randn(3, 48, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.1).bfloat16().double()
    logits.requires_grad_()
    labels = torch.tensor([5, 6, 7])
    expected, expected_entropy = reference(logits, labels, 48, 1.0)
    (expected.sum() + expected_entropy.sum() * entropy).backward()
    single = logits.detach().bfloat16().requires_grad_()
    got, got_entropy = vocab_parallel_logprobs(single, labels, vocab_size=48, entropy=entropy)
    (got.sum() + (got_entropy.sum() if got_entropy is not None else 0.0)).backward()
    assert single.grad is not None and single.grad.dtype == torch.bfloat16
    # two roundings to 8 bits; where the entropy's two terms nearly cancel, of the larger one
    torch.testing.assert_close(single.grad.double(), logits.grad, rtol=2**-7, atol=2e-7)
    assert (single.grad[[0, 1, 2], labels] != 0).all()


def test_the_value_of_the_entropy_costs_no_gradient() -> None:
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    labels = torch.arange(4)
    gradients = []
    for entropy in (False, True):
        leaf = logits.clone().requires_grad_()
        got, found = vocab_parallel_logprobs(leaf, labels, vocab_size=16, entropy=entropy)
        assert (found is not None) is entropy
        got.sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_a_second_backward_pass_is_refused() -> None:
    leaf = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    got, _ = vocab_parallel_logprobs(leaf, torch.arange(4), vocab_size=16)
    got.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        got.sum().backward()


def test_without_gradients_no_buffer_is_kept() -> None:
    leaf = torch.randn(4, 16).requires_grad_()
    with torch.no_grad():
        got, _ = vocab_parallel_logprobs(leaf, torch.arange(4), vocab_size=16)
    assert got.grad_fn is None
