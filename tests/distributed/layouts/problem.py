"""A fixed small training problem and its right answers in float64, from plain transformers without packing.

The batch has responses of length 1 and 2, a response whose tokens are all masked, and one with a masked gap in its middle
(a tool call). Nothing here uses the code under test.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHAPES = [(3, 5), (1, 1), (4, 2), (2, 9), (6, 1), (5, 12), (3, 7), (2, 3), (4, 6), (1, 10), (2, 17), (3, 4)]
"""(prompt, response) tokens of each sequence."""
FULLY_MASKED, WITH_GAP = 8, 5
POSITIVE = (0, 3, 5, 9)
CLIP_LOW, CLIP_HIGH, MU, ENTROPY, VALUE_CLIP = 0.2, 0.28, 0.1, 0.01, 0.3
SEQUENCE_CLIP_LOW, SEQUENCE_CLIP_HIGH = 0.03, 0.05
"""Of GSPO's ratio: some of the sequences are beyond, on both sides."""
MAX_LENGTH = 20
VOCAB = 70
MODELS = ("qwen2", "qwen2_tied", "qwen3", "llama_tied", "one_kv_head")
MIXTURE = "qwen3_moe"
"""A mixture of four experts a layer, two of which a token takes; ``qwen3_moe_raw``: their weights are not normalised."""
MIXTURES = (MIXTURE, "qwen3_moe_raw")
ROUTER_NOISE, BALANCE, Z_LOSS = 0.1, 0.02, 0.003
"""Standard deviation of what is added to the routers' weights between two passes; coefficients of the routers' losses."""
MLP_HEAD = "qwen2_tied_mlp"
"""A model whose critic has a head of two layers."""
HISTOGRAM_HEAD = "qwen2_tied_histogram"
"""A model whose critic has a categorical head, and its bins: the returns, in [0, 1], lie inside."""
BINS = {"low": -0.3, "high": 1.4, "bins": 9, "sigma": 0.75}
UNKNOWN_MODELS = ("qwen2_unknown", "qwen2_tied_unknown")
UNKNOWN = (5, 33, *range(40, VOCAB))
"""Ids that the tokenizer of these models lacks, whose output rows are large: single ones, and with TP all of the last ranks' shards."""


def unknown_ids(model: str) -> tuple[int, ...]:
    return UNKNOWN if model in UNKNOWN_MODELS else ()


def make_model(name: str, folder: Path) -> None:
    """Write a random float32 HF model of four layers; all have more than two heads, GQA and an odd vocabulary."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": "tied" in name,
        "initializer_range": 0.15,
    }
    torch.manual_seed(sum(map(ord, name)))
    model: Any
    if name.startswith("qwen2"):
        head = {"value_bins": BINS} if name == HISTOGRAM_HEAD else {}
        model = Qwen2ForCausalLM(Qwen2Config(**common, value_head="mlp" if name == MLP_HEAD else "linear", **head))
    elif name in MIXTURES:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": name == MIXTURE}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=16))
    elif name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=24))
    elif name == "one_kv_head":
        scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
        model = Qwen3ForCausalLM(Qwen3Config(**(common | {"num_key_value_heads": 1}), head_dim=16, rope_parameters=scaling))
    else:
        scaling = {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        }
        model = LlamaForCausalLM(LlamaConfig(**common, rope_parameters=scaling))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases and norms that would hide a wrong mapping if they were all 0 or 1
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in parameter_name else 0.3))
        model.get_output_embeddings().weight[list(unknown_ids(name))] *= 5
    model.save_pretrained(folder)


def make_batch(model: str) -> dict[str, list[Tensor]]:
    """Token-aligned tensors, one list entry a sequence; tokens are those that the model's tokenizer has."""
    known = torch.tensor(sorted(set(range(VOCAB)) - set(unknown_ids(model))))
    generator = torch.Generator().manual_seed(7)
    batch: dict[str, list[Tensor]] = {}
    for row, (prompt, response) in enumerate(SHAPES):
        length = prompt + response
        mask = torch.arange(length) >= prompt
        if row == FULLY_MASKED:
            mask = torch.zeros(length, dtype=torch.bool)
        if row == WITH_GAP:
            mask[prompt + 3 : prompt + 6] = False
        columns = {
            "tokens": known[torch.randint(0, VOCAB, (length,), generator=generator) % known.numel()],
            "response_mask": mask,
            "advantages": torch.randn(length, generator=generator),
            "noise": torch.randn(length, generator=generator) * 0.2,
            "returns": torch.rand(length, generator=generator),
            "old_values": torch.randn(length, generator=generator) * 0.3,
            "positive": mask & torch.tensor(row in POSITIVE),
        }
        for name, value in columns.items():
            batch.setdefault(name, []).append(value)
    return batch


def head_weights(hidden_size: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    """A value head that is not zero, so that the trunk receives gradients: weight [outputs, hidden], bias [outputs]."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(outputs, hidden_size, generator=generator) * 0.1, torch.linspace(0.05, 0.3, outputs)


def dense_weights(hidden_size: int) -> tuple[Tensor, Tensor]:
    """The first layer of a head of two: weight [hidden, hidden], bias [hidden]."""
    generator = torch.Generator().manual_seed(12)
    return torch.randn(hidden_size, hidden_size, generator=generator) * 0.1, torch.randn(hidden_size, generator=generator) * 0.1


def router_noise(layer: int, weight: Tensor) -> Tensor:
    """What is added to the router of a layer (from 0), in the model's dtype."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 + layer)) * ROUTER_NOISE
    return noise.to(weight)


def per_token_weights(batch: dict[str, list[Tensor]], aggregation: str) -> list[Tensor]:
    """Weight of each token's term in the loss, from the definitions of the three aggregations."""
    counts = [int(mask.sum()) for mask in batch["response_mask"]]
    used = sum(count > 0 for count in counts)
    scale = {
        "token": [1 / sum(counts)] * len(counts),
        "sequence": [1 / (used * max(count, 1)) for count in counts],
        "fixed_length": [1 / (used * MAX_LENGTH)] * len(counts),
    }["sequence" if aggregation == "gspo" else aggregation]
    return [mask.double() * factor for mask, factor in zip(batch["response_mask"], scale, strict=True)]


def sequence_advantages(batch: dict[str, list[Tensor]]) -> list[Tensor]:
    """One advantage a response, at all its tokens: what GSPO is defined for."""
    return [advantages[-1:].expand_as(advantages).contiguous() for advantages in batch["advantages"]]


def _by_expert(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split the gradients of stacked experts into those of the tensors in the file."""
    result: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            result[name] = gradient
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, part in enumerate(gradient):
            if kind == "down_proj":
                result[f"{prefix}.{expert}.down_proj.weight"] = part
            else:
                result[f"{prefix}.{expert}.gate_proj.weight"], result[f"{prefix}.{expert}.up_proj.weight"] = part.chunk(2)
    return result


class Oracle:
    """Right answers of one model: forward quantities, then losses with their gradients, all in float64."""

    def __init__(self, folder: Path, batch: dict[str, list[Tensor]]) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoModelForCausalLM

        experts = {"experts_implementation": "eager"} if folder.name in MIXTURES else {}  # the grouped one takes no float64
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", **experts)
        self.batch = batch
        columns = torch.tensor(unknown_ids(Path(folder).name), dtype=torch.int64)
        self.model.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, columns, -1e300))
        self.tied = self.model.config.tie_word_embeddings
        self.bins: dict[str, Any] | None = getattr(self.model.config, "value_bins", None)
        weight, bias = head_weights(self.model.config.hidden_size, self.bins["bins"] if self.bins else 1)
        self.head = torch.nn.Parameter(weight.double()), torch.nn.Parameter(bias.double())
        self.dense: tuple[torch.nn.Parameter, ...] = ()
        if getattr(self.model.config, "value_head", "linear") == "mlp":
            self.dense = tuple(torch.nn.Parameter(tensor.double()) for tensor in dense_weights(self.model.config.hidden_size))

    def watch_routers(self) -> None:
        """Replace the routers' forward pass by one in float64 that notes choices and logits, and takes the choices of ``forced``."""
        self.row = 0
        self.forced: list[Tensor] | None = None  # by row: [tokens, layers, topk]
        self.seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by row and layer
        for number, layer in enumerate(self.model.model.layers):
            layer.mlp.gate.forward = self._gate(number, layer.mlp.gate)

    def _gate(self, layer: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            probabilities = logits.softmax(-1)
            chosen = probabilities.topk(gate.top_k).indices if self.forced is None else self.forced[self.row][:, layer].long()
            weights = probabilities.gather(1, chosen)
            self.seen[self.row, layer] = chosen, logits
            return logits, weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights, chosen

        return forward

    def choices(self) -> list[Tensor]:
        """By row: the experts of the last pass, int64 [tokens, layers, topk]."""
        layers = len(self.model.model.layers)
        return [torch.stack([self.seen[row, layer][0] for layer in range(layers)], dim=1) for row in range(len(SHAPES))]

    def perturb_routers(self) -> None:
        with torch.no_grad():
            for number, layer in enumerate(self.model.model.layers):
                layer.mlp.gate.weight += router_noise(number, layer.mlp.gate.weight)

    def router_losses(self) -> tuple[Tensor, Tensor]:
        """Balance loss E sum_i f_i P_i and z-loss of the last pass, over all tokens of the batch, summed over the layers."""
        balance = z_loss = torch.zeros((), dtype=torch.float64)
        for layer in range(len(self.model.model.layers)):
            chosen, logits = (torch.cat([self.seen[row, layer][part] for row in range(len(SHAPES))]) for part in (0, 1))
            experts = logits.shape[1]
            shares = torch.bincount(chosen.flatten(), minlength=experts).double() / chosen.numel()
            balance = balance + experts * (shares * logits.softmax(-1).mean(0)).sum()
            z_loss = z_loss + logits.logsumexp(-1).square().mean()
        return balance, z_loss

    def policy_outputs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs of each token (0 for the first) and entropies of the distributions they were drawn from."""
        logprobs, entropies = [], []
        for row, tokens in enumerate(self.batch["tokens"]):
            self.row = row
            logp = torch.log_softmax(self.model(tokens[None]).logits[0, :-1], -1)
            logprobs.append(torch.cat([logp.new_zeros(1), logp.gather(1, tokens[1:, None])[:, 0]]))
            entropies.append(torch.cat([logp.new_zeros(1), -(logp.exp() * logp).sum(-1)]))
        return logprobs, entropies

    def values(self) -> tuple[list[Tensor], Tensor]:
        """V(s_t) of each token (0 for the first), and the outputs at the last tokens."""
        values, last = [], []
        self.logits: list[Tensor] = []
        for row, tokens in enumerate(self.batch["tokens"]):
            self.row = row
            hidden = self.model.model(tokens[None]).last_hidden_state[0]
            if self.dense:
                hidden = torch.tanh(hidden @ self.dense[0].T + self.dense[1])
            raw = hidden @ self.head[0].T + self.head[1]
            self.logits.append(torch.cat([raw.new_zeros(1, raw.shape[1]), raw[:-1]]))
            raw = raw.softmax(-1) @ self._centres() if self.bins else raw[:, 0]
            values.append(torch.cat([raw.new_zeros(1), raw[:-1]]))
            last.append(raw[-1])
        return values, torch.stack(last)

    def policy_loss(self, aggregation: str, old_logprobs: list[Tensor]) -> Tensor:
        logprobs, entropies = self.policy_outputs()
        weights = per_token_weights(self.batch, aggregation)
        positives = sum(int(mask.sum()) for mask in self.batch["positive"])
        tokens = sum(int(mask.sum()) for mask in self.batch["response_mask"])
        total = torch.zeros((), dtype=torch.float64)
        for row, logp in enumerate(logprobs):
            mask = self.batch["response_mask"][row]
            if aggregation == "gspo":
                total = total - self._gspo(logp, old_logprobs[row], row) / sum(bool(m.any()) for m in self.batch["response_mask"])
            else:
                ratio = (logp - old_logprobs[row]).exp()
                advantage = self.batch["advantages"][row].double()
                objective = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
                total = total - (weights[row] * objective).sum()
            total = total - MU * (logp * self.batch["positive"][row]).sum() / positives
            total = total - ENTROPY * (entropies[row] * mask).sum() / tokens
        return total

    def _gspo(self, logp: Tensor, old: Tensor, row: int) -> Tensor:
        """min(s A, clip(s) A) of one response, s the geometric mean of its tokens' ratios (arXiv:2507.18071, Eqs. 5 and 7)."""
        mask = self.batch["response_mask"][row]
        if not mask.any():
            return torch.zeros((), dtype=torch.float64)
        ratio = (logp - old)[mask].mean().exp()
        advantage = sequence_advantages(self.batch)[row][0].double()
        return torch.minimum(ratio * advantage, ratio.clamp(1 - SEQUENCE_CLIP_LOW, 1 + SEQUENCE_CLIP_HIGH) * advantage)

    def _centres(self) -> Tensor:
        assert self.bins is not None
        width = (self.bins["high"] - self.bins["low"]) / self.bins["bins"]
        return torch.tensor([self.bins["low"] + (number + 0.5) * width for number in range(self.bins["bins"])], dtype=torch.float64)

    def _targets(self, returns: Tensor) -> Tensor:
        """Masses of a Gaussian around each return in the bins, of what lies in all of them (HL-Gauss, arXiv:2403.03950)."""
        assert self.bins is not None
        width = (self.bins["high"] - self.bins["low"]) / self.bins["bins"]
        edges = torch.cat([self._centres() - width / 2, torch.tensor([self.bins["high"]], dtype=torch.float64)])
        masses = torch.distributions.Normal(returns.double()[:, None], self.bins["sigma"] * width).cdf(edges).diff(dim=-1)
        return masses / masses.sum(-1, keepdim=True)

    def value_loss(self) -> Tensor:
        values, _ = self.values()
        weights = per_token_weights(self.batch, "token")
        total = torch.zeros((), dtype=torch.float64)
        if self.bins:
            for row, logits in enumerate(self.logits):
                entropy = -(self._targets(self.batch["returns"][row]) * logits.log_softmax(-1)).sum(-1)
                total = total + (weights[row] * entropy).sum()
            return total
        for row, value in enumerate(values):
            target, old = self.batch["returns"][row].double(), self.batch["old_values"][row].double()
            clipped = old + (value - old).clamp(-VALUE_CLIP, VALUE_CLIP)
            total = total + (weights[row] * 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)).sum()
        return total

    def gradients(self, loss: Tensor, critic: bool) -> dict[str, Tensor]:
        """HF name -> gradient; the head as ``score.*``."""
        self.model.zero_grad(set_to_none=True)
        for parameter in (*self.head, *self.dense):
            parameter.grad = None
        loss.backward()
        result = _by_expert({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
        if critic:
            names = ("score.out.weight", "score.out.bias", "score.dense.weight", "score.dense.bias")
            if not self.dense:
                names = ("score.weight", "score.bias")
            for name, parameter in zip(names, (*self.head, *self.dense), strict=True):
                assert parameter.grad is not None
                result[name] = parameter.grad
        return result
