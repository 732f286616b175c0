"""A rollout engine of another kind: it keeps the weights and draws every token uniformly from the vocabulary."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vapo_mcore.rollout.base import Generation, GenerationRequest, SamplingConfig
from vapo_mcore.rollout.stateful import StatefulEngine


class UniformEngine(StatefulEngine):
    weights: dict[str, Tensor]

    def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        found = []
        for request in requests:
            draw, length = random.Random(request.seed), request.limit(sampling)
            tokens = [draw.randrange(3, self.vocab_size) for _ in range(length)]
            found.append(Generation(request, tokens, [-math.log(self.vocab_size - 3)] * length, "length"))
        return found

    def _distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        row = torch.full((self.vocab_size,), -math.log(self.vocab_size - 3))
        row[:3] = -math.inf
        return [row.expand(len(ids) - 1, -1) for ids in sequences]

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def _holds(self, name: str, tensor: Tensor) -> bool:
        return torch.equal(self.weights[name], tensor)

    def _sleep(self) -> None:
        self.weights = {}
