"""Worker of test_algorithm.py: every case runs on all ranks of one gloo launch; rank 0 prints ``case <name> ok``.

Rank 0 holds three responses, rank 1 one token, rank 2 nothing at all. Expected values come from the whole batch in one process, or from
the definition in float64.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_mcore.algorithm.advantages import whiten
from vapo_mcore.algorithm.covariance import largest, token_covariances
from vapo_mcore.algorithm.importance import measure_mismatch
from vapo_mcore.algorithm.losses import explained_variance, policy_loss, positive_nll, value_loss
from vapo_mcore.algorithm.profiles import value_profiles
from vapo_mcore.algorithm.segments import masked_moments
from vapo_mcore.algorithm.weights import Denominators

LENGTHS = [[4, 1, 7], [2], []]  # by rank


class Share:
    """The whole batch and, as slices of it, this rank's part."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        flat = [length for part in LENGTHS for length in part]
        self.total = sum(flat)
        self.whole_cu = torch.tensor([0, *flat]).cumsum(0)
        self.mask = torch.rand(self.total, generator=generator) > 0.2
        self.mask[sum(LENGTHS[0])] = False  # rank 1: one token that counts
        self.mask[sum(LENGTHS[0]) + 1] = True
        self.x, self.y, self.z = torch.randn(3, self.total, generator=generator)
        for tensor in (self.x, self.y, self.z):
            tensor[~self.mask] = float("nan")
        rank = dist.get_rank()
        begin = sum(map(sum, LENGTHS[:rank]))
        self.own = slice(begin, begin + sum(LENGTHS[rank]))
        self.cu = torch.tensor([0, *LENGTHS[rank]]).cumsum(0)
        self.group = dist.group.WORLD


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def whiten_over_ranks() -> None:
    share = Share()
    got = whiten(share.x[share.own], share.mask[share.own], share.group)
    kept = share.x[share.mask].double()
    exact = torch.zeros(share.total, dtype=torch.float64)
    exact[share.mask] = (kept - kept.mean()) / (kept.var(correction=0) + 1e-8).sqrt()
    close(got.double(), exact[share.own])


def whiten_one_token_in_all_gives_zeros() -> None:
    share = Share()
    only = torch.zeros_like(share.mask)
    only[sum(LENGTHS[0]) + 1] = True
    assert not whiten(share.x[share.own], only[share.own], share.group).any()
    assert not whiten(share.x[share.own], torch.zeros_like(only)[share.own], share.group).any()


def moments_count_tokens_exactly() -> None:
    count, mean, variance = masked_moments(torch.full((3,), 2.0), torch.ones(3, dtype=torch.bool), dist.group.WORLD)
    assert (count.item(), mean.item(), variance.item()) == (9, 2, 0)


def explained_variance_over_ranks() -> None:
    share = Share()
    got = explained_variance(share.x[share.own], share.y[share.own], share.mask[share.own], share.group)
    expected = explained_variance(share.x, share.y, share.mask)
    assert got is not None and expected is not None and abs(got - expected) < 1e-9
    constant = torch.full_like(share.x, 0.1)
    assert explained_variance(share.x[share.own], constant[share.own], share.mask[share.own], share.group) is None


def largest_covariances_over_ranks() -> None:
    """Several counts; every second score is the same, so the keys decide among them."""
    share = Share()
    keys = torch.randperm(share.total, generator=torch.Generator().manual_seed(1))
    covariances = token_covariances(share.x, share.y, share.mask)
    close(token_covariances(share.x[share.own], share.y[share.own], share.mask[share.own], share.group), covariances[share.own])
    covariances[::2] = 0.1
    order = sorted(share.mask.nonzero().flatten().tolist(), key=lambda t: (-float(covariances[t]), int(keys[t])))
    for count in (1, 3, len(order) - 1, len(order) + 5):
        expected = torch.zeros(share.total, dtype=torch.bool)
        expected[order[:count]] = True
        own = share.own
        assert torch.equal(largest(covariances[own], share.mask[own], keys[own], count, share.group), expected[own]), count


def value_profiles_over_ranks() -> None:
    """A rank without tokens takes part; bins without any token are None on all."""
    share = Share()
    got = value_profiles(share.x[share.own], share.y[share.own], share.mask[share.own], share.cu, 8, share.group)
    expected = value_profiles(share.x, share.y, share.mask, share.whole_cu, 8)
    assert got.keys() == expected.keys()
    for name, means in expected.items():
        assert [x is None for x in got[name]] == [x is None for x in means], name
        assert all(abs(x - y) < 1e-9 for x, y in zip(got[name], means, strict=True) if x is not None and y is not None), name
    assert sum(x or 0 for x in got["tokens_by_length"]) == int(share.mask.sum())


def mismatch_over_ranks() -> None:
    share = Share()
    got = measure_mismatch(share.x[share.own], share.y[share.own], share.mask[share.own], cap=1.5, group=share.group)
    expected = measure_mismatch(share.x, share.y, share.mask, cap=1.5)
    assert got.keys() == expected.keys() and all(abs(got[name] - expected[name]) < 1e-9 for name in got), (got, expected)


def losses_of_ranks_add_up_to_the_whole_batch() -> None:
    share = Share()
    positive = share.x > 0
    lengths = torch.tensor([int(share.mask[lo:hi].sum()) for lo, hi in zip(share.whole_cu, share.whole_cu[1:], strict=False)])
    denominators = Denominators(int(lengths.sum()), int((lengths > 0).sum()), int((share.mask & positive).sum()))

    def loss(logprobs: Tensor, own: slice, cu_seqlens: Tensor, counts: Denominators | None) -> Tensor:
        policy, _ = policy_loss(
            logprobs[own],
            share.y[own],
            share.z[own],
            share.mask[own],
            cu_seqlens,
            clip_low=0.2,
            clip_high=0.28,
            aggregation="sequence",
            denominators=counts,
        )
        value, _ = value_loss(logprobs[own], share.y[own], share.z[own], share.mask[own], clip=0.2, denominators=counts)
        return policy + value + 0.1 * positive_nll(logprobs[own], share.mask[own], positive[own], counts)

    results = []
    for own, cu, counts in ((share.own, share.cu, denominators), (slice(0, share.total), share.whole_cu, None)):
        logprobs = share.x.clone().requires_grad_()
        value = loss(logprobs, own, cu, counts)
        (gradient,) = torch.autograd.grad(value, logprobs)
        results.append((value.detach(), gradient))
    (mine, my_gradient), (whole, whole_gradient) = results
    dist.all_reduce(mine)
    dist.all_reduce(my_gradient)
    close(mine, whole)
    close(my_gradient, whole_gradient)


CASES: list[Callable[[], None]] = [
    whiten_over_ranks,
    whiten_one_token_in_all_gives_zeros,
    moments_count_tokens_exactly,
    explained_variance_over_ranks,
    largest_covariances_over_ranks,
    value_profiles_over_ranks,
    mismatch_over_ranks,
    losses_of_ranks_add_up_to_the_whole_batch,
]


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in CASES:
        case()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"case {case.__name__} ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
