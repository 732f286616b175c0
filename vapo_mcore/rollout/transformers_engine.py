"""Rollout engine based on Hugging Face transformers, for machines without vLLM; every process is a replica.

The engine left-pads prompts internally, as transformers requires for batching; requests and results are ragged.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vapo_mcore import heartbeat
from vapo_mcore.rollout.base import EngineBuild, Generation, GenerationRequest, Replica, SamplingConfig
from vapo_mcore.rollout.hf_folder import file_tensors, require_supported, stop_token_ids
from vapo_mcore.rollout.stateful import StatefulEngine
from vapo_mcore.rollout.stopping import StopTexts
from vapo_mcore.rollout.token_sampling import draw, uniform_numbers

CACHE_BYTES = 1 << 30
COMPACT_BELOW = 0.75  # drop finished rows from the KV cache when the fraction of unfinished rows falls below this


class TransformersEngine(StatefulEngine):
    """Rollout engine on ``AutoModelForCausalLM`` (see RolloutEngine), with weights in ``dtype`` on ``device``.

    A response depends on its request and the weights, but, up to the rounding of batched matrix products, not on the other requests.
    """

    @classmethod
    def build(cls, build: EngineBuild) -> Self:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        more: dict[str, Any] = {"unknown_token_ids": build.unknown_token_ids, "stop_ids": build.stop_ids, "stop_texts": build.stop_texts}
        return cls(build.folder, build.dtype, build.replica, max_model_len=build.max_model_len, device=device, **more)

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        replica: Replica,
        *,
        max_model_len: int,
        device: torch.device,
        unknown_token_ids: Sequence[int] = (),
        stop_ids: Sequence[int] | None = None,
        stop_texts: StopTexts | None = None,
    ) -> None:
        """``stop_ids``, ``stop_texts``: they end a response (None: the folder's stop tokens, no text). Others: see StatefulEngine."""
        architecture = require_supported(folder, max_model_len)
        self.stop_ids = torch.tensor(stop_token_ids(folder) if stop_ids is None else stop_ids, device=device)
        self._stop_texts = stop_texts
        self._excluded = torch.tensor(unknown_token_ids, dtype=torch.int64, device=device)
        self.device, self.dtype = device, dtype
        self.model = _uninitialised_model(folder, dtype).to(device)
        self._parameters = dict(self.model.named_parameters())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._views: dict[str, Tensor] = {}
        self._view_parameters()
        shapes = {name: tuple(view.shape) for name, view in self._views.items()}
        super().__init__(
            replica, shapes, vocab_size=architecture.vocab_size, max_model_len=max_model_len, unknown_token_ids=unknown_token_ids
        )
        values_per_token = 2 * architecture.num_layers * architecture.num_key_value_heads * architecture.head_dim
        self._cached_tokens = CACHE_BYTES // (values_per_token * dtype.itemsize)
        self._sleep()

    def settings(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "version": importlib.metadata.version("transformers"),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "stop_token_ids": self.stop_ids.tolist(),
            "cached_tokens": self._cached_tokens,
        }

    def _sleep(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.new_empty(0)
        self._views = {}

    def _wake_weights(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(self._shapes[name], dtype=self.dtype, device=self.device)
        self._view_parameters()

    def _view_parameters(self) -> None:
        """Set the tensors that a weight sync fills, by their names in the file."""
        self._views = {
            name: part for whole, parameter in self._parameters.items() for name, part in file_tensors(whole, parameter.data).items()
        }

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self._views[name].copy_(tensor)

    def _holds(self, name: str, tensor: Tensor) -> bool:
        return torch.equal(self._views[name], tensor.to(self._views[name]))

    @torch.inference_mode()
    def _generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_token_ids))
        generations: dict[int, Generation] = {}
        while by_length:
            longest = len(requests[by_length[-1]].prompt_token_ids) + max(requests[i].limit(sampling) for i in by_length)
            rows = max(1, self._cached_tokens // longest)
            by_length, batch = by_length[:-rows], by_length[-rows:]
            generations |= zip(batch, self._generate_batch([requests[i] for i in batch], sampling), strict=True)
        return [generations[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _distributions(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        found = []
        for ids in sequences:
            logits = self.model(input_ids=torch.tensor([list(ids)], device=self.device)).logits[0, :-1].float()
            found.append(logits.index_fill(-1, self._excluded, float("-inf")).log_softmax(-1).cpu())
        return found

    def _generate_batch(self, requests: list[GenerationRequest], sampling: SamplingConfig) -> list[Generation]:
        """Generate one padded batch. ``rows``: requests in the KV cache; ``live``: which of these are unfinished."""
        limits = torch.tensor([request.limit(sampling) for request in requests], device=self.device)
        n, steps = len(requests), int(limits.max())
        stop_ids = torch.cat([self.stop_ids, self.stop_ids.new_tensor(sampling.stop_token_ids)])
        uniforms = uniform_numbers([request.seed for request in requests], steps).to(self.device)
        tokens = torch.zeros((n, steps), dtype=torch.int64, device=self.device)
        logprobs = torch.zeros((n, steps), dtype=torch.float32, device=self.device)
        lengths = limits.clone()
        stopped = torch.zeros(n, dtype=torch.bool, device=self.device)
        rows, live = torch.arange(n, device=self.device), torch.ones(n, dtype=torch.bool, device=self.device)
        batch = _LeftPaddedBatch(self.model, [request.prompt_token_ids for request in requests], self._excluded)
        for step in range(steps):
            heartbeat.alive()
            sampled, drawn_logprobs = draw(batch.logits, uniforms[rows, step], sampling)
            tokens[rows[live], step], logprobs[rows[live], step] = sampled[live], drawn_logprobs[live]
            ended = live & (torch.isin(sampled, stop_ids) | self._texts_completed(tokens, rows, live, step + 1))
            lengths[rows[ended]], stopped[rows[ended]] = step + 1, True
            live &= ~ended & (limits[rows] > step + 1)
            unfinished = int(live.sum())
            if unfinished == 0 or step == steps - 1:
                break
            if unfinished < COMPACT_BELOW * len(rows):
                keep = live.nonzero()[:, 0]
                batch.select(keep)
                rows, live, sampled = rows[keep], live[keep], sampled[keep]
            batch.append(sampled)
        return [
            Generation(request, ids[:length], values[:length], "stop" if stop else "length")
            for request, ids, values, length, stop in zip(
                requests, tokens.tolist(), logprobs.tolist(), lengths.tolist(), stopped.tolist(), strict=True
            )
        ]

    def _texts_completed(self, tokens: Tensor, rows: Tensor, live: Tensor, length: int) -> Tensor:
        """Return which unfinished rows complete a stop text with their token number ``length``; bool ``[len(rows)]``."""
        found = torch.zeros_like(live)
        stops = self._stop_texts
        for number in live.nonzero()[:, 0].tolist() if stops is not None else ():
            assert stops is not None
            ids = tokens[rows[number], :length].tolist()
            found[number] = stops.completed(ids) and stops.end(ids) is not None
        return found


class _LeftPaddedBatch:
    """A batch in the model's KV cache, and the next-token logits ``[n, vocab]`` of each row, -inf for the ``excluded`` ids."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], excluded: Tensor) -> None:
        from transformers import DynamicCache

        self.model, self.excluded, device = model, excluded, excluded.device
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        self.mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        self.cache = DynamicCache(config=model.config)
        self.logits = self._forward(ids, (self.mask.cumsum(-1) - 1).clamp(min=0))

    def append(self, tokens: Tensor) -> None:
        """Append one token per row, ``[n]``."""
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(tokens), 1))], dim=1)
        self.logits = self._forward(tokens[:, None], self.mask.sum(-1, keepdim=True) - 1)

    def select(self, rows: Tensor) -> None:
        """Keep only ``rows``, in that order."""
        self.cache.batch_select_indices(rows)
        self.mask, self.logits = self.mask[rows], self.logits[rows]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].index_fill(-1, self.excluded, float("-inf"))


def _uninitialised_model(folder: str | Path, dtype: torch.dtype) -> Any:
    """Build the model with valid buffers (rotary frequencies) and uninitialised parameters, which a weight sync fills."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    return model.eval().requires_grad_(False)
