"""Replay buffer of self-imitation: the run's own correct responses, replayed with an NLL loss (Oh et al. 2018, arXiv:1806.05635).

A pure data structure: it holds no model, no files and no random state. Entries are kept in insertion order, and the same additions
give the same contents on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Eviction = Literal["fifo", "top_reward", "frozen"]


@dataclass(frozen=True)
class ReplaySample:
    """Packed responses. tokens int64 [total] (prompt and response); response_mask bool [total]; returns float32 [total], the
    Monte-Carlo return of each token when it was sampled; cu_seqlens int64 [n + 1]; rewards float32 [n]; steps int64 [n], the
    rollout each was sampled in; prompt_ids, n strings."""

    tokens: Tensor
    response_mask: Tensor
    returns: Tensor
    cu_seqlens: Tensor
    rewards: Tensor
    steps: Tensor
    prompt_ids: list[str]


@dataclass(frozen=True, eq=False)
class _Entry:
    tokens: Tensor
    response_mask: Tensor
    returns: Tensor
    reward: float
    step: int
    prompt_id: str


class ReplayBuffer:
    """Holds at most ``capacity`` responses, at most ``top_k`` per prompt.

    The candidates of each batch are the ``top_k`` eligible responses of highest reward of every prompt. The buffer ranks its entries and
    the candidates by ``eviction`` and keeps the first ones up to both limits:

    - ``fifo``: newest first;
    - ``top_reward``: highest reward first, ties newest first;
    - ``frozen``: oldest first; once it is full, or after ``freeze``, it admits nothing more.

    A response that is already in the buffer (same prompt, same tokens) is not stored twice: its step is updated
    (a frozen buffer ignores it).
    """

    def __init__(self, capacity: int, *, eviction: Eviction = "top_reward", top_k: int = 1) -> None:
        if capacity < 1 or top_k < 1:
            raise ValueError(f"capacity and top_k must be at least 1, got {capacity} and {top_k}")
        if eviction not in ("fifo", "top_reward", "frozen"):
            raise ValueError(f"eviction must be fifo, top_reward or frozen, got {eviction!r}")
        self.capacity = capacity
        self.eviction = eviction
        self.top_k = top_k
        self.is_frozen = False
        self._entries: list[_Entry] = []  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def freeze(self) -> None:
        """End the phase that fills the buffer: admit nothing more. ``eviction: frozen`` only."""
        if self.eviction != "frozen":
            raise ValueError(f"only a frozen buffer can be frozen; this one evicts by {self.eviction}")
        self.is_frozen = True

    def add(
        self,
        tokens: Tensor,
        response_mask: Tensor,
        returns: Tensor,
        cu_seqlens: Tensor,
        rewards: Tensor,
        eligible: Tensor,
        prompt_ids: Sequence[str],
        step: int,
    ) -> int:
        """Add the candidates of a rollout; returns how many of its responses are in the buffer afterwards.

        tokens int64 [total]; response_mask bool [total]; returns float [total]; cu_seqlens int [n + 1]; rewards float [n];
        eligible bool [n]: responses the verifier graded correct, others are never imitated; prompt_ids: n strings; step: the
        rollout's number. Tensors are copied to the CPU. A response without unmasked tokens is never a candidate.
        """
        if self.is_frozen:
            return 0
        bounds, scores = cu_seqlens.tolist(), rewards.float().tolist()
        if not len(bounds) - 1 == len(scores) == eligible.numel() == len(prompt_ids):
            counts = f"{len(scores)} rewards, {eligible.numel()} verdicts and {len(prompt_ids)} prompt ids"
            raise ValueError(f"{counts} for {len(bounds) - 1} responses")
        by_prompt: dict[str, list[int]] = {}
        for i in eligible.nonzero().flatten().tolist():
            if bool(response_mask[bounds[i] : bounds[i + 1]].any()):
                by_prompt.setdefault(prompt_ids[i], []).append(i)
        best = sorted(i for rows in by_prompt.values() for i in sorted(rows, key=lambda i: -scores[i])[: self.top_k])
        offered = []
        for i in best:
            span = slice(bounds[i], bounds[i + 1])
            own = (
                tokens[span].detach().cpu().clone(),
                response_mask[span].detach().bool().cpu().clone(),
                returns[span].detach().float().cpu().clone(),
            )
            offered.append(_Entry(*own, reward=scores[i], step=step, prompt_id=prompt_ids[i]))
        self._entries = self._trim(self._merge(offered))
        self.is_frozen = self.eviction == "frozen" and len(self._entries) == self.capacity
        present = {id(entry) for entry in self._entries}
        return sum(id(entry) in present for entry in offered)

    def sample(self, count: int, generator: torch.Generator) -> ReplaySample:
        """Draw ``count`` distinct responses uniformly (all of them, shuffled, if there are fewer)."""
        order = torch.randperm(len(self._entries), generator=generator)[:count].tolist()
        return _pack([self._entries[i] for i in order])

    def ages(self, step: int) -> Tensor:
        """Return the number of rollouts since each response was last sampled, int64 [n]."""
        return step - torch.tensor([entry.step for entry in self._entries], dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, strings and numbers, loadable with ``weights_only=True``."""
        packed = _pack(self._entries)
        return {
            "capacity": self.capacity,
            "eviction": self.eviction,
            "top_k": self.top_k,
            "is_frozen": self.is_frozen,
            "tokens": packed.tokens,
            "response_mask": packed.response_mask,
            "returns": packed.returns,
            "cu_seqlens": packed.cu_seqlens,
            "rewards": packed.rewards,
            "steps": packed.steps,
            "prompt_ids": packed.prompt_ids,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents; if the settings differ, trim the loaded entries to this buffer's limits and eviction order.

        A loaded frozen buffer stays frozen if this one has ``eviction: frozen``.
        """
        bounds = state["cu_seqlens"].tolist()
        columns = zip(bounds, bounds[1:], state["rewards"].tolist(), state["steps"].tolist(), state["prompt_ids"], strict=False)
        entries = [
            _Entry(
                tokens=state["tokens"][lo:hi].clone(),
                response_mask=state["response_mask"][lo:hi].clone(),
                returns=state["returns"][lo:hi].clone(),
                reward=reward,
                step=step,
                prompt_id=prompt_id,
            )
            for lo, hi, reward, step, prompt_id in columns
        ]
        self._entries = self._trim(entries)
        self.is_frozen = self.eviction == "frozen" and (state["is_frozen"] or len(self._entries) == self.capacity)

    def _merge(self, offered: list[_Entry]) -> list[_Entry]:
        """Return the entries followed by the offered ones; of duplicates the newer stays (in a frozen buffer the older)."""
        merged: dict[tuple[str, bytes], _Entry] = {}
        for entry in [*self._entries, *offered]:
            key = (entry.prompt_id, entry.tokens.numpy().tobytes())
            if key in merged and self.eviction == "frozen":
                continue
            merged.pop(key, None)  # so that it moves to the end
            merged[key] = entry
        return list(merged.values())

    def _trim(self, entries: list[_Entry]) -> list[_Entry]:
        """Rank by ``eviction``, keep the first entries up to both limits, and return them in insertion order."""
        order = list(range(len(entries)))
        if self.eviction != "frozen":
            order.reverse()
        if self.eviction == "top_reward":
            order.sort(key=lambda i: -entries[i].reward)  # stable: newer first among equals
        kept: list[int] = []
        per_prompt: dict[str, int] = {}
        for i in order:
            used = per_prompt.get(entries[i].prompt_id, 0)
            if len(kept) < self.capacity and used < self.top_k:
                per_prompt[entries[i].prompt_id] = used + 1
                kept.append(i)
        return [entries[i] for i in sorted(kept)]


def _pack(entries: list[_Entry]) -> ReplaySample:
    lengths = torch.tensor([0, *(len(e.tokens) for e in entries)], dtype=torch.int64)
    return ReplaySample(
        tokens=torch.cat([torch.zeros(0, dtype=torch.int64), *(e.tokens for e in entries)]),
        response_mask=torch.cat([torch.zeros(0, dtype=torch.bool), *(e.response_mask for e in entries)]),
        returns=torch.cat([torch.zeros(0), *(e.returns for e in entries)]),
        cu_seqlens=lengths.cumsum(0),
        rewards=torch.tensor([e.reward for e in entries], dtype=torch.float32),
        steps=torch.tensor([e.step for e in entries], dtype=torch.int64),
        prompt_ids=[e.prompt_id for e in entries],
    )
