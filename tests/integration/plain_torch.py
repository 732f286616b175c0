"""Updates of ``test_train_step.py`` worked out with transformers and plain PyTorch in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rollout_models import load_model


def assert_one_update(folder: Path, row: dict[str, Any]) -> None:
    """Log-probs, length-adaptive advantages, loss, gradient norm and AdamW's step, worked out with transformers in float64."""
    model = load_model(folder / "model").double().requires_grad_(True)
    model.get_input_embeddings().padding_idx = None  # transformers would keep the gradient from the pad token, which is sampled here
    responses = _responses(folder)
    assert len(responses) == 16
    tokens = sum(len(r["logprobs_seen"]) for r in responses)
    positive_tokens = sum(len(r["logprobs_seen"]) for r in responses if r["verdict"])
    advantages = [_length_adaptive_advantages(len(r["logprobs_seen"]), r["reward"]) for r in responses]
    everything = torch.cat(advantages)
    std = (everything.var(correction=0) + 1e-8).sqrt()
    loss, nll = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for response, advantage in zip(responses, advantages, strict=True):
        start, sequence = response["start"], response["tokens"]
        logits = model(sequence[None]).logits[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, sequence[start:, None])[:, 0]
        whitened = (advantage - everything.mean()) / std
        assert response["logprobs_seen"] == pytest.approx(logprobs.tolist(), abs=1e-5)
        assert response["advantages_seen"] == pytest.approx(whitened.tolist(), abs=1e-5)
        assert response["returns_seen"] == pytest.approx([response["reward"]] * len(advantage))
        loss = loss - ((logprobs - logprobs.detach()).exp() * whitened).sum() / tokens
        nll = nll - logprobs.sum() * response["verdict"] / positive_tokens
    (loss + 0.1 * nll).backward()
    parameters = dict(model.named_parameters())
    norm = torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm()
    assert row["policy/surrogate_loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert row["policy/nll_loss"] == pytest.approx(nll.item(), rel=1e-5)
    assert row["policy/loss"] == pytest.approx((loss + 0.1 * nll).item(), rel=1e-5)
    assert row["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    _assert_exported_weights(folder, parameters, clip=1.0 / (norm.item() + 1e-6), lr=row["policy/lr"])


def _responses(folder: Path) -> list[dict[str, Any]]:
    """What each rank trained on, a response at a time."""
    found = []
    for rank in range(2):
        batch = torch.load(folder / f"batch_rank{rank}.pt", weights_only=True)
        offsets = batch["cu_seqlens"].tolist()
        for number, (a, b) in enumerate(pairwise(offsets)):
            mask = batch["response_mask"][a:b]
            start = int(mask.nonzero()[0])
            assert bool(mask[start:].all())
            found.append(
                {
                    "tokens": batch["tokens"][a:b],
                    "start": start,
                    "reward": float(batch["reward"][number]),
                    "verdict": bool(batch["verdict"][number]),
                    "logprobs_seen": batch["old_logprobs"][a:b][start:].tolist(),
                    "advantages_seen": batch["advantages"][a:b][start:].tolist(),
                    "returns_seen": batch["returns"][a:b][start:].tolist(),
                }
            )
    return found


def _length_adaptive_advantages(length: int, reward: float) -> torch.Tensor:
    """All values are 0 (zero head), so the only TD error is the reward at the end."""
    lam = max(0.0, 1.0 - 1.0 / (0.05 * length))
    return torch.tensor([reward * lam ** (length - 1 - t) if length - 1 - t else reward for t in range(length)], dtype=torch.float64)


def _assert_exported_weights(folder: Path, parameters: dict[str, Any], *, clip: float, lr: float) -> None:
    """AdamW's first step from zero moments is g / (|g| + eps); where |g| is near eps its rounding shows, so entries are counted."""
    exported = load_file(folder / "one_update" / "export" / "hf" / "model.safetensors")
    assert set(exported) == set(parameters)
    assert lr == 1e-3
    off = total = 0
    for name, parameter in parameters.items():
        gradient = parameter.grad * min(1.0, clip)
        decay = 0.1 if parameter.dim() > 1 else 0.0
        expected = parameter.detach() * (1 - lr * decay) - lr * gradient / (gradient.abs() + 1e-8)
        off += int(((exported[name].double() - expected).abs() > 1e-2 * lr).sum())
        total += expected.numel()
    assert off <= 1e-4 * total, f"{off} of {total}"


def assert_self_imitation(folder: Path, rows: list[list[dict[str, Any]]]) -> None:
    """Mean NLL at the rollout's temperature and the norm of its gradient, in float64; the critic's loss from its zero head."""
    samples = [
        torch.load(folder / f"imitated_{name}_rank{rank}.pt", weights_only=True)
        for name in ("imitation_dp2", "imitation_tp2")
        for rank in (0, 1)
    ]
    for sample in samples[1:]:  # every rank draws the same, in every layout
        assert all(torch.equal(sample[name], samples[0][name]) for name in sample)
    tokens, mask, bounds = samples[0]["tokens"], samples[0]["response_mask"], samples[0]["cu_seqlens"].tolist()
    assert (samples[0]["rewards"] == 1).all()
    model = load_model(folder / "model").double().requires_grad_(True)
    model.get_input_embeddings().padding_idx = None
    total = torch.zeros((), dtype=torch.float64)
    for a, b in pairwise(bounds):
        logprobs = (model(tokens[a:b][None]).logits[0, :-1] / 0.8).log_softmax(-1)
        total = total - logprobs.gather(-1, tokens[a + 1 : b, None])[mask[a + 1 : b]].sum()
    nll = total / mask.sum()
    (0.5 * nll).backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item()
    for first, second in rows:
        assert first["imitation/responses"] == len(bounds) - 1
        assert first["imitation/buffer"] >= first["imitation/responses"]
        assert first["imitation/nll"] == pytest.approx(nll.item(), rel=1e-5)
        assert first["imitation/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert first["imitation/lr"] == 0.01
        assert first["imitation/skipped"] == 0
        assert first["imitation/value_loss"] == pytest.approx(0.5, rel=1e-4)  # V is 0, each return 1
        assert (first["imitation/age_mean"], first["imitation/age_max"]) == (0.0, 0)
        assert second["imitation/age_max"] == 1
        assert second["imitation/buffer"] >= first["imitation/buffer"]
        assert (first["policy/updates"], second["policy/updates"]) == (2, 4)  # imitation steps are not the schedule's
        assert (first["critic/updates"], second["critic/updates"]) == (3, 6)  # K_v
        assert second["policy/approx_kl_first"] <= 1e-6  # the sampler got the imitated policy
