"""Measure what limits the critic of the quickstart's task: sums by the tiny model of ``make models/tiny/.made``.

    python benchmarks/critic_diagnosis.py [--model models/tiny] [--samples runs/critic_diagnosis.pt] [--responses 32768] [--only SET ...]

Plain torch on one thread. The first run samples responses of the untrained policy at temperature 1 and stores them: ``--responses`` to
train on and 4 to each of the 400 held-out prompts, on which everything is measured. Prints one JSON object per experiment.

- ``oracles``: explained variance of a constant, of tables of mean returns (by prompt, by whether the text is still right, by log-probs),
  and of exact values, by a second continuation of ``--continuations`` prefixes of the held-out responses.
- ``probe``: linear probes of the states of each layer of the policy; those of ``PROBED`` critics follow their training.
- the other sets train critics: a transformers trunk and a linear head. ``curve``: ``ev`` and ``auc_error`` after so many updates.

Columns of a critic: ``ev`` explained variance of the held-out returns, ``ev_prompt_end`` the same of the value before the first token,
``ev_oracle`` that of the still-right oracle's values, ``auc_error`` how well low values find text with an error among texts of the same
length and number of sums (0.5: not at all), ``auc_fresh`` and ``auc_old`` the same for errors in the last 11 characters and for older ones.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen2Model

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from addition_task import LETTERS, Problem, worked_solution

from vapo_mcore.algorithm.losses import explained_variance, value_loss_terms
from vapo_mcore.errors import DataError
from vapo_mcore.rewards.mathematics import math as verify

MAX_RESPONSE, ENTRY = 176, 11  # the quickstart's rollout.max_response_length; characters of one sum
HELDOUT_RESPONSES, SAMPLING_BATCH, ROWS_OF_MICROBATCH = 4, 512, 8
RIGHT, RECOVERED, WRONG = 0, 1, 2
"""States of a text: a prefix of the right solution; not, but its last total or box so far is right; neither."""


def read_problem(prompt: str) -> Problem:
    """Read a prompt such as ``_/c+58:730;``."""
    return Problem(int(prompt[9:6:-1]), int(prompt[4:6]), LETTERS.index(prompt[2]))


def on_track(problem: Problem, text: str) -> bool:
    """Return whether the last total of ``text``, and the digits begun after it, are right, whatever came before."""
    *entries, tail = text.split(";")
    total = problem.start + len(entries) * problem.addend
    if entries and entries[-1].rpartition(":")[2] != f"{total:03d}"[::-1]:
        return False
    if tail.startswith("\\boxed{"):
        return f"{problem.answer}}}".startswith(tail[7:])
    return f"{total + problem.addend:03d}"[::-1].startswith(tail.partition(":")[2])


def prefix_states(problem: Problem, text: str) -> list[int]:
    """Return the states of the prefixes of 0, 1, ..., len(text) characters."""
    solution, states, right = worked_solution(problem), [RIGHT], True
    for end in range(1, len(text) + 1):
        right = right and end <= len(solution) and text[end - 1] == solution[end - 1]
        states.append(RIGHT if right else RECOVERED if on_track(problem, text[:end]) else WRONG)
    return states


@dataclass
class Samples:
    """Padded responses; ``tokens`` has the prompts, too. ``logprobs``: of each token; ``states``: of the text before it."""

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor
    times: Tensor
    rewards: Tensor
    logprobs: Tensor
    states: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Tensor) -> "Samples":
        return Samples(**{name: value[rows] for name, value in vars(self).items()})

    @property
    def mask(self) -> Tensor:
        return torch.arange(MAX_RESPONSE) < self.lengths[:, None]

    @property
    def prompt_length(self) -> int:
        return self.tokens.shape[1] - MAX_RESPONSE

    def flat(self, value: Tensor) -> Tensor:
        """Return the per-response or per-token ``value`` at all response tokens, in one row."""
        return (value[:, None].expand(-1, MAX_RESPONSE) if value.dim() == 1 else value)[self.mask]

    def positions(self) -> Tensor:
        return self.flat(torch.arange(MAX_RESPONSE).expand(len(self), -1))


@torch.no_grad()
def continue_texts(model: Any, prompts: Tensor, eos: int, forced: Tensor, forced_lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses that begin with the first ``forced_lengths`` tokens of ``forced``. Returns tokens, lengths and log-probs."""
    rows, lengths = torch.arange(len(prompts)), torch.full((len(prompts),), MAX_RESPONSE)
    tokens, logprobs = torch.zeros(len(prompts), MAX_RESPONSE, dtype=torch.long), torch.zeros(len(prompts), MAX_RESPONSE)
    cache, current, open_rows = DynamicCache(), prompts, torch.ones(len(prompts), dtype=torch.bool)
    for t in range(MAX_RESPONSE):
        scores = torch.log_softmax(model(current, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float(), -1)
        drawn = torch.multinomial(scores.exp(), 1)[:, 0]
        drawn = torch.where(t < forced_lengths[rows], forced[rows, t], drawn)
        tokens[rows, t], logprobs[rows, t] = drawn, scores.gather(1, drawn[:, None])[:, 0]
        lengths[rows[open_rows & (drawn == eos)]] = t + 1
        open_rows &= drawn != eos
        if open_rows.float().mean() < 0.9:  # drop ended rows now and then
            keep = torch.nonzero(open_rows)[:, 0]
            if not len(keep):
                break
            cache.batch_select_indices(keep)
            rows, drawn, open_rows = rows[keep], drawn[keep], open_rows[keep]
        current = drawn[:, None]
    return tokens, lengths, logprobs


def sample(model: Any, text: Any, prompts: list[dict[str, str]], numbers: Tensor, forced: Samples | None = None) -> Samples:
    """Sample a response to each of ``prompts[number]``; with ``forced`` continue a random prefix of each of its responses."""
    problems = [read_problem(prompts[n]["prompt"]) for n in numbers.tolist()]
    ids = torch.tensor([text.encode(prompts[n]["prompt"]) for n in numbers.tolist()])
    found = Samples(*(torch.zeros(len(numbers), *shape, dtype=kind) for shape, kind in [
        ((ids.shape[1] + MAX_RESPONSE,), torch.uint8), ((), torch.long), ((), torch.long), ((), torch.long), ((), torch.float32),
        ((MAX_RESPONSE,), torch.float16), ((MAX_RESPONSE,), torch.uint8),
    ]))  # fmt: skip
    found.times, found.prompts = torch.tensor([problem.times for problem in problems]), numbers
    for rows in torch.argsort(found.times, stable=True).split(SAMPLING_BATCH):
        prefix, prefix_lengths = torch.zeros(len(rows), MAX_RESPONSE, dtype=torch.long), torch.zeros(len(rows), dtype=torch.long)
        if forced is not None:
            prefix = forced.tokens[rows, ids.shape[1] :].long()
            prefix_lengths = (torch.rand(len(rows)) * forced.lengths[rows]).long()
        tokens, lengths, logprobs = continue_texts(model, ids[rows], text.eos_token_id, prefix, prefix_lengths)
        found.tokens[rows] = torch.cat([ids[rows], tokens], 1).to(torch.uint8)
        found.lengths[rows], found.logprobs[rows] = lengths, logprobs.half()
        for row, response, length in zip(rows.tolist(), tokens.tolist(), lengths.tolist(), strict=True):
            characters = text.decode([token for token in response[:length] if token != text.eos_token_id])
            found.rewards[row] = verify(characters, prompts[int(numbers[row])]["answer"], {})
            found.states[row, :length] = torch.tensor(prefix_states(problems[row], characters)[:length], dtype=torch.uint8)
    return found


def make_samples(model: Any, text: Any, folder: Path, responses: int, continuations: int) -> dict[str, Samples]:
    """Sample the responses to train on, the held-out ones, and continuations of prefixes of held-out ones (one row for each)."""
    torch.manual_seed(0)
    read = {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "heldout")}
    training = sample(model, text, read["train"], torch.arange(responses) % len(read["train"]))
    heldout = sample(model, text, read["heldout"], torch.arange(HELDOUT_RESPONSES * len(read["heldout"])) % len(read["heldout"]))
    # Prefixes weighted by tokens: responses are drawn in proportion to their length, the prefix uniformly.
    origin = heldout.take(torch.multinomial(heldout.lengths.float(), continuations, replacement=True))
    again = sample(model, text, read["heldout"], origin.prompts, forced=origin)
    return {"train": training, "heldout": heldout, "origin": origin, "again": again}


def table(keys: Tensor, coarse: Tensor, targets: Tensor, new_keys: Tensor, new_coarse: Tensor, strength: float) -> Tensor:
    """Return for each of ``new_keys`` the mean target of its key, shrunk to the mean of its coarse key as by ``strength`` observations."""

    def means(index: Tensor, size: int, prior: Tensor) -> Tensor:
        counts = torch.bincount(index, minlength=size)
        return (torch.bincount(index, targets.double(), size) + strength * prior) / (counts + strength)

    rough = means(coarse, int(max(coarse.max(), new_coarse.max())) + 1, targets.double().mean())
    size = int(max(keys.max(), new_keys.max())) + 1
    parent = torch.full((size,), float(targets.double().mean()), dtype=torch.float64)
    parent[new_keys], parent[keys] = rough[new_coarse], rough[coarse]
    return means(keys, size, parent)[new_keys].float()


def ev(values: Tensor, targets: Tensor) -> float:
    found = explained_variance(values.float(), targets.float(), torch.ones(len(targets), dtype=torch.bool))
    return float("nan") if found is None else round(found, 4)


def auc(scores: Tensor, labels: Tensor, groups: Tensor) -> float:
    """Return the probability that a token with label 1 has a higher score than one with label 0 of the same group (ties: half)."""
    order = np.lexsort((scores.numpy(), groups.numpy()))
    g, s, y = groups.numpy()[order], scores.numpy()[order], labels.numpy()[order].astype(np.float64)
    starts = np.flatnonzero(np.r_[True, g[1:] != g[:-1]])
    ties = np.flatnonzero(np.r_[True, (g[1:] != g[:-1]) | (s[1:] != s[:-1])])
    positive, negative = np.add.reduceat(y, ties), np.add.reduceat(1 - y, ties)
    below = np.cumsum(negative) - negative
    first_tie = np.searchsorted(ties, starts)[np.searchsorted(starts, ties, "right") - 1]
    wins = positive * (below - below[first_tie] + negative / 2)
    pairs = np.add.reduceat(y, starts) * np.add.reduceat(1 - y, starts)
    return round(float(wins.sum() / max(pairs.sum(), 1)), 4)


def answers(data: Samples) -> Tensor:
    """Return the right answers. Digits are tokens 2 to 11; in a prompt the addend is at 4 and 5, the start, units first, at 7 to 9."""
    digits = data.tokens[:, :10].long() - 2
    return digits[:, 7] + 10 * digits[:, 8] + 100 * digits[:, 9] + data.times * (10 * digits[:, 4] + digits[:, 5])


def least_logprobs(data: Samples) -> Tensor:
    """Return the policy's least log-prob of any token of the text so far."""
    return data.flat(torch.cat([torch.zeros(len(data), 1), data.logprobs.float()[:, :-1]], 1).cummin(1).values)


def keys_of(data: Samples, kind: str) -> tuple[Tensor, Tensor]:
    """Return fine and coarse keys of all tokens for ``table``."""
    times, position = data.flat(data.times), data.positions()
    size = data.flat(torch.bucketize(answers(data), torch.tensor([9, 99, 599])))
    if kind in ("times", "prompt"):
        return times * 4 + (size if kind == "prompt" else 0), times if kind == "prompt" else torch.zeros_like(times)
    if kind == "surprise":
        state = torch.bucketize(least_logprobs(data), torch.tensor([-5.0, -3.5, -2.5, -1.5, -1.0, -0.5, -0.1]))
    else:
        state = data.flat(data.states).long()
        state = state.clamp(max=1) if kind == "still_right" else state * 4 + size if kind == "on_track_size" else state
    return (state * 15 + times) * MAX_RESPONSE + position, state * 15 + times


def ratio_error(parts: Tensor, wholes: Tensor, prompts: Tensor) -> float:
    """Return the standard error of sum(parts) / sum(wholes), where only prompts are independent."""
    above, below = torch.bincount(prompts, parts.double()), torch.bincount(prompts, wholes.double())
    residual = above - above.sum() / below.sum() * below
    return round(float(residual.square().sum().sqrt() / below.sum()), 4)


def oracle_values(kind: str, training: Samples, data: Samples) -> Tensor:
    strength = 500.0 if kind in ("times", "prompt") else 5.0  # in tokens: a response has about 90 of one prompt, one of one state
    return table(*keys_of(training, kind), training.flat(training.rewards), *keys_of(data, kind), strength)


def oracles(samples: dict[str, Samples]) -> dict[str, Any]:
    """Measure the oracles on held-out responses, and the exact ceiling by pairs of continuations of one prefix."""
    training, heldout = samples["train"], samples["heldout"]
    returns = heldout.flat(heldout.rewards)
    found, at_end = {"ev_constant": ev(torch.zeros_like(returns), returns)}, heldout.positions() == 0
    found |= {f"{name}_surprise": value for name, value in error_aucs(-least_logprobs(heldout), heldout).items()}
    for kind in ("times", "prompt", "still_right", "on_track", "on_track_size", "surprise"):
        values = oracle_values(kind, training, heldout)
        found[f"ev_{kind}"], found[f"ev_{kind}_first_token"] = ev(values, returns), ev(values[at_end], returns[at_end])
    pairs = one, two = torch.stack([samples["origin"].rewards, samples["again"].rewards])
    found["ev_exact"] = round(float(torch.cov(pairs)[0, 1] / pairs.var()), 4)
    found["ev_exact_error"] = ratio_error((one - one.mean()) * (two - two.mean()), pairs.var().expand(len(one)), samples["origin"].prompts)
    residual = (returns - oracle_values("still_right", training, heldout)).square()
    found["ev_still_right_error"] = ratio_error(residual, (returns - returns.mean()).square(), heldout.flat(heldout.prompts))
    # Prompt alone, exact: the mean of the other responses to a prompt estimates its value without bias.
    order = torch.argsort(heldout.prompts, stable=True)
    by_prompt, lengths = heldout.rewards[order].view(-1, HELDOUT_RESPONSES), heldout.lengths[order].view(-1, HELDOUT_RESPONSES)
    others = (by_prompt.sum(1, keepdim=True) - by_prompt) / (HELDOUT_RESPONSES - 1)
    for name, weight in (("ev_exact_prompt", lengths), ("ev_exact_prompt_first_token", torch.ones_like(lengths))):
        centered = by_prompt - (by_prompt * weight).sum() / weight.sum()
        residual = others - (others * weight).sum() / weight.sum()
        parts, wholes = centered * residual * weight, centered.square() * weight
        found[name] = round(float(parts.sum() / wholes.sum()), 4)
        found[f"{name}_error"] = ratio_error(parts.sum(1), wholes.sum(1), torch.arange(len(parts)))
    sums_right = training.states.gather(1, (training.times * ENTRY).clamp(max=MAX_RESPONSE - 1)[:, None])[:, 0] == RIGHT
    means = {"mean_return": training.rewards, "mean_length": training.lengths, "errors": training.flat(training.states) != RIGHT}
    means |= {"all_sums_right": sums_right, "return_if_right": training.rewards[sums_right], "return_if_not": training.rewards[~sums_right]}
    for name, use in (("below_100", answers(training) < 100), ("from_100", answers(training) >= 100)):
        means[f"return_if_right_{name}"] = training.rewards[sums_right & use]
    found |= {name: round(float(value.float().mean()), 4) for name, value in means.items()}
    return found


@dataclass(frozen=True)
class Settings:
    """One training; the defaults are the quickstart's, on 4,096 fixed responses. ``head_init`` mean: zero, with the mean return as bias."""

    trunk: str = "policy"  # or scratch
    layers: int = 3
    width: int = 128
    head: str = "zero"  # or small, mean
    reads_logprobs: bool = False  # each response token's embedding plus a trained vector times the token's log-prob
    target: str = "return"  # or oracle (the still-right oracle's values), right (1 while the text is right)
    responses: int = 4096
    updates: int = 128
    batch: int = 64
    lr: float = 5e-4
    warmup: int = 8
    weight_decay: float = 0.1
    clip: float = 1.0
    beta2: float = 0.999
    eps: float = 1e-8
    seed: int = 1


class Critic(nn.Module):
    """A trunk and a linear head. Layers beyond the policy's begin as the identity: their output projections are zero."""

    def __init__(self, policy: Any, settings: Settings, mean: float) -> None:
        super().__init__()
        torch.manual_seed(settings.seed)
        shape = {"num_hidden_layers": settings.layers, "hidden_size": settings.width, "intermediate_size": 2 * settings.width}
        config = type(policy.config)(**{**policy.config.to_dict(), **shape, "layer_types": None, "head_dim": 32})
        config.num_attention_heads, config.num_key_value_heads = settings.width // 32, settings.width // 64
        self.trunk = Qwen2Model(config)
        if settings.trunk == "policy":
            self.trunk.load_state_dict(policy.model.state_dict(), strict=False)
            for layer in self.trunk.layers[policy.config.num_hidden_layers :]:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)
        self.reader = nn.Parameter(torch.zeros(settings.width), requires_grad=settings.reads_logprobs)
        self.head = nn.Linear(settings.width, 1)
        nn.init.normal_(self.head.weight, std=0.1 * settings.width**-0.5 if settings.head == "small" else 0.0)
        nn.init.constant_(self.head.bias, mean if settings.head == "mean" else 0.0)

    def forward(self, data: Samples) -> Tensor:
        """Return the values before all response tokens, in one row."""
        longest = int(data.lengths.max())
        logprobs = nn.functional.pad((data.logprobs.float() * data.mask)[:, :longest].clamp(min=-8), (data.prompt_length, 0))
        embedded = self.trunk.embed_tokens(data.tokens[:, : data.prompt_length + longest].long()) + logprobs[..., None] * self.reader
        hidden = self.trunk(inputs_embeds=embedded, use_cache=False).last_hidden_state[:, data.prompt_length - 1 : -1]
        return self.head(hidden)[..., 0][data.mask[:, : hidden.shape[1]]]


@torch.no_grad()
def values_of(critic: Critic, data: Samples) -> Tensor:
    found = torch.zeros(len(data), MAX_RESPONSE)
    for rows in torch.argsort(data.lengths, stable=True).split(64):
        inside = data.mask & torch.isin(torch.arange(len(data)), rows)[:, None]
        found[inside] = critic(data.take(rows.sort().values))
    return data.flat(found)


def train(policy: Any, samples: dict[str, Samples], settings: Settings) -> tuple[Critic, dict[str, Any]]:
    """Train a critic. Returns it, and ``ev`` and ``auc_error`` after each number of updates in ``CURVE``."""
    data = samples["train"].take(torch.arange(settings.responses))
    targets = torch.zeros(len(data), MAX_RESPONSE)
    if settings.target == "oracle":
        targets[data.mask] = oracle_values("still_right", samples["train"], data)
    else:
        targets[data.mask] = data.flat(data.rewards) if settings.target == "return" else (data.flat(data.states) == RIGHT).float()
    critic = Critic(policy, settings, float(targets[data.mask].mean()))
    decays = ((True, settings.weight_decay), (False, 0.0))  # matrices, vectors
    groups = [{"params": [p for p in critic.parameters() if (p.dim() > 1) == matrix], "weight_decay": rate} for matrix, rate in decays]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, settings.beta2), eps=settings.eps)
    generator, returns = torch.Generator().manual_seed(settings.seed), samples["heldout"].flat(samples["heldout"].rewards)
    order, found, norms = torch.empty(0, dtype=torch.long), {}, []
    for update in range(1, settings.updates + 1):
        if len(order) < settings.batch:
            order = torch.randperm(len(data), generator=generator)
        rows, order = order[: settings.batch], order[settings.batch :]
        for part in rows[torch.argsort(data.lengths[rows], stable=True)].split(ROWS_OF_MICROBATCH):  # of similar lengths
            some, values = data.take(part), critic(data.take(part))
            terms, _ = value_loss_terms(values, None, targets[part][some.mask], torch.ones(len(values), dtype=torch.bool))
            (terms.sum() / data.lengths[rows].sum()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(critic.parameters(), settings.clip)))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, update / max(settings.warmup, 1))
        optimizer.step()
        optimizer.zero_grad()
        if update in CURVE and update < settings.updates:
            values = values_of(critic, samples["heldout"])
            found[str(update)] = [ev(values, returns), error_aucs(-values, samples["heldout"])["auc_error"]]
    return critic, {**found, "clipped_updates": sum(norm > settings.clip for norm in norms)}


def error_aucs(scores: Tensor, data: Samples) -> dict[str, float]:
    """Return how well ``scores`` find errors among texts of equal length and number of sums: all, of the last ENTRY characters, older."""
    states, position = data.flat(data.states), data.positions()
    error = states != RIGHT
    right_before = torch.cat([torch.full((len(data), ENTRY), RIGHT), data.states[:, :-ENTRY]], 1)
    old = data.flat(right_before) != RIGHT
    groups = data.flat(data.times) * MAX_RESPONSE + position
    used = {"auc_error": error | ~error, "auc_fresh": ~old, "auc_old": old | ~error}
    return {name: auc(scores[use], error[use], groups[use]) for name, use in used.items()}


def measure(critic: Critic, samples: dict[str, Samples]) -> dict[str, float]:
    heldout, part = samples["heldout"], samples["train"].take(torch.arange(512))
    values, returns, first = values_of(critic, heldout), heldout.flat(heldout.rewards), heldout.positions() == 0
    found = {"ev": ev(values, returns), "ev_prompt_end": ev(values[first], returns[first])}
    found["ev_oracle"] = ev(values, oracle_values("still_right", samples["train"], heldout))
    return {**found, **error_aucs(-values, heldout), "ev_first_512_trained": ev(values_of(critic, part), part.flat(part.rewards))}


BASE, CURVE = Settings(), (32, 128, 256)
FAST = replace(BASE, lr=2e-3, updates=256)
READING = replace(FAST, reads_logprobs=True)
SETS: dict[str, list[Settings]] = {
    "base": [replace(BASE, updates=256), replace(BASE, seed=2)],
    "lr": [FAST, replace(FAST, lr=5e-3, updates=128)],
    "target": [replace(FAST, target="right"), replace(FAST, target="oracle", updates=128)],
    "generous": [replace(FAST, target="right", layers=5, responses=32768, updates=384)],
    "depth": [replace(FAST, layers=5)],
    "data": [replace(FAST, responses=1024), replace(FAST, responses=32768, updates=512)],
    "optimizer": [replace(BASE, weight_decay=0.0, clip=100.0, warmup=0), replace(BASE, beta2=0.95, eps=1e-5)],
    "head": [replace(BASE, head="mean"), replace(BASE, head="small")],
    "logprobs": [replace(READING, lr=5e-4), READING, replace(READING, responses=32768, updates=512)],
    "trunk": [replace(FAST, trunk="scratch", width=width, updates=128) for width in (128, 256)],
}
PROBED = (SETS["base"][0], SETS["target"][0], SETS["generous"][0])  # critics whose states are probed


@torch.no_grad()
def hidden_states(trunk: Any, data: Samples) -> list[Tensor]:
    """Return the states of each layer, the embedding first, before all response tokens."""
    layers: list[list[Tensor]] = []
    for rows in torch.arange(len(data)).split(64):
        part = data.take(rows)
        tokens = part.tokens[:, : part.prompt_length + int(part.lengths.max())].long()
        states = trunk(tokens, use_cache=False, output_hidden_states=True).hidden_states
        layers.append([state[:, part.prompt_length - 1 : -1][part.mask[:, : int(part.lengths.max())]] for state in states])
    return [torch.cat(parts) for parts in zip(*layers, strict=True)]


def logistic(features: Tensor, labels: Tensor, new: Tensor) -> Tensor:
    """Fit a logistic regression with a small penalty. Returns the logits of ``new``."""
    mean, deviation, weights = features.mean(0), features.std(0) + 1e-6, torch.zeros(features.shape[1] + 1, requires_grad=True)
    x = (features - mean) / deviation
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = x @ weights[:-1] + weights[-1]
        value = nn.functional.binary_cross_entropy_with_logits(logits, labels.float()) + 1e-4 * weights[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (((new - mean) / deviation) @ weights[:-1] + weights[-1]).detach()


def least_squares(features: Tensor, targets: Tensor, new: Tensor) -> Tensor:
    mean, center = features.double().mean(0), targets.double().mean()
    x = features.double() - mean
    weights = torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(x.shape[1]), x.T @ (targets.double() - center))
    return ((new.double() - mean) @ weights + center).float()


def probe(name: str, trunk: Any, samples: dict[str, Samples], responses: int = 1000) -> Iterator[dict[str, Any]]:
    """Yield for each layer how well its states tell errors and the number of sums, and the return, linearly."""
    training, heldout = (
        samples["train"].take(torch.arange(min(responses, len(samples["train"])))),
        samples["heldout"].take(torch.arange(800)),
    )
    error, new_error = (data.flat(data.states) != RIGHT for data in (training, heldout))
    times, new_times = (data.flat(data.times) for data in (training, heldout))
    keys, new_keys = times * MAX_RESPONSE + training.positions(), new_times * MAX_RESPONSE + heldout.positions()
    base, everything = table(keys, times, error.float(), new_keys, new_times, 5.0), torch.zeros_like(new_keys)
    first, new_first = training.positions() == 0, heldout.positions() == 0
    returns, new_returns = training.flat(training.rewards), heldout.flat(heldout.rewards)
    for layer, (x, new) in enumerate(zip(hidden_states(trunk, training), hidden_states(trunk, heldout), strict=True)):
        logits = logistic(x, error, new)
        accuracies = {
            "accuracy": (logits > 0) == new_error,
            "accuracy_by_times_and_position": (base > 0.5) == new_error,
            "base_rate": new_error,
        }
        yield {
            "model": name, "layer": layer, **{key: round(float(value.float().mean()), 4) for key, value in accuracies.items()},
            "auc_all_tokens": auc(logits, new_error, everything), "auc_all_tokens_by_times_and_position": auc(base, new_error, everything),
            **error_aucs(logits, heldout), "ev_return": ev(least_squares(x, returns, new), new_returns),
            "times_at_prompt_end": ev(least_squares(x[first], times[first].float(), new[new_first]), new_times[new_first]),
        }  # fmt: skip


def load(arguments: argparse.Namespace, model: Any) -> dict[str, Samples]:
    """Read the samples, or make them. Samples of another model are refused."""
    weights = float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))
    if not arguments.samples.exists():
        made = make_samples(
            model, AutoTokenizer.from_pretrained(arguments.model), arguments.model, arguments.responses, arguments.continuations
        )
        arguments.samples.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": weights, **{name: vars(part) for name, part in made.items()}}, arguments.samples)
    stored = torch.load(arguments.samples)
    if stored.pop("weights") != weights:
        raise DataError(f"{arguments.samples} holds responses of another model than {arguments.model}; choose another --samples")
    return {name: Samples(**part) for name, part in stored.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--samples", type=Path, default=Path("runs/critic_diagnosis.pt"))
    parser.add_argument("--responses", type=int, default=32768)
    parser.add_argument("--continuations", type=int, default=16384)
    parser.add_argument("--only", nargs="+", choices=["oracles", *SETS, "probe"], default=["oracles", "probe", *SETS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)

    def say(experiment: str, started: float, line: dict[str, Any]) -> None:
        name = {"benchmark": "critic_diagnosis", "experiment": experiment}
        print(json.dumps({**name, **line, "cpu_s": round(time.process_time() - started)}), flush=True)

    samples = load(arguments, policy)
    say("samples", 0.0, {name: len(part) for name, part in samples.items()})
    if "oracles" in arguments.only:
        say("oracles", time.process_time(), oracles(samples))
    started = time.process_time()
    for line in probe("policy", policy.model, samples) if "probe" in arguments.only else ():
        say("probe", started, line)
    for name, settings in ((key, one) for key in SETS if key in arguments.only for one in SETS[key]):
        started = time.process_time()
        critic, curve = train(policy, samples, settings)
        say(name, started, {**asdict(settings), **measure(critic, samples), "curve": curve})
        for line in probe(name, critic.trunk, samples) if settings in PROBED else ():
            say("probe", started, line)


if __name__ == "__main__":
    main()
