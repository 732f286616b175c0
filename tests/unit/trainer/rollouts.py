"""Small rollouts made by hand, for the tests beside this file."""

from __future__ import annotations

import torch

from tests.settings import config_of
from vapo_mcore.algorithm.segments import broadcast_to_tokens, keep_responses
from vapo_mcore.algorithm.weights import Denominators
from vapo_mcore.config import Config
from vapo_mcore.data.microbatch import make_microbatch
from vapo_mcore.data.rollout_batch import RolloutBatch, Rows
from vapo_mcore.experience.batches import Experience, MiniBatch
from vapo_mcore.trainer.advantages import shaped_rewards, trainable_rows


def make_config(*, rollout: dict | None = None, reward: dict | None = None, **algorithm) -> Config:
    return config_of(
        {
            "run": {"dir": "unused", "steps": 1},
            "model": {"path": "unused"},
            "batch": {"max_tokens_per_microbatch": 512, "prompts_per_step": 4, "responses_per_prompt": 4, "mini_batch_size": 4},
            "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum", "size": 4}], "max_prompt_length": 16},
            "rollout": {"max_response_length": 32, **(rollout or {})},
            "reward": reward or {},
            "algorithm": algorithm,
        }
    )


def make_rows(lengths, scores, *, groups=None, graded=None, cut=(), prompt_length=2, steps=None, segments=None) -> Rows:
    """One row a response; ``cut``: numbers of those that the length limit ended; ``steps``: (token of the response, reward) pairs."""
    n = len(lengths)
    groups = list(groups or range(n))
    return Rows(
        prompt_id=[f"set/{group}#0" for group in groups],
        group=torch.tensor(groups),
        sample_index=torch.tensor([groups[:i].count(group) for i, group in enumerate(groups)]),
        verdict=torch.tensor([score > 0 for score in scores]),
        graded=torch.tensor(graded or [True] * n),
        ungraded=["" if known else "timeout" for known in graded or [True] * n],
        score=torch.tensor(scores, dtype=torch.float32),
        reward=torch.tensor(scores, dtype=torch.float32),
        finish_reason=["length" if i in cut else "stop" for i in range(n)],
        prompt_length=torch.full((n,), prompt_length),
        response_length=torch.tensor(lengths),
        tool_length=torch.zeros(n, dtype=torch.int64),
        turns=torch.ones(n, dtype=torch.int64),
        observations_cut=torch.zeros(n, dtype=torch.int64),
        missed_end=torch.zeros(n, dtype=torch.bool),
        source=["set"] * n,
        segments=segments or [()] * n,
        observations=[()] * n,
        step_rewards=[tuple((prompt_length + t, reward) for t, reward in (steps or {}).get(i, ())) for i in range(n)],
    )


def make_batch(rows: Rows, row_ids=None) -> RolloutBatch:
    """Tokens are 100 x row id + position, rollout log-probs -1."""
    ids = range(len(rows)) if row_ids is None else row_ids
    prompts = [[100 * i + t for t in range(int(p))] for i, p in zip(ids, rows.prompt_length, strict=True)]
    pairs = zip(ids, rows.prompt_length, rows.response_length, strict=True)
    responses = [[100 * i + int(p) + t for t in range(int(r))] for i, p, r in pairs]
    return RolloutBatch.from_responses(rows, prompts, responses, [[-1.0] * len(r) for r in responses], torch.tensor(list(ids)))


def make_experience(config: Config, rows: Rows, minibatches=None) -> Experience:
    """One process; ``minibatches``: row numbers of each, one micro-batch apiece (all rows in one if None)."""
    from dataclasses import replace

    rows = replace(rows, reward=shaped_rewards(config, rows))
    batch, trainable = make_batch(rows), trainable_rows(config, rows)
    batch["response_mask"] = keep_responses(batch["response_mask"], batch.cu_seqlens, trainable)
    batch["positive_mask"] = broadcast_to_tokens(rows.verdict, batch["response_mask"], batch.cu_seqlens)
    lengths = rows.response_length * trainable
    parts = [
        MiniBatch(Denominators.from_lengths(lengths[members], rows.verdict[members]), [make_microbatch(batch, members, names=("tokens",))])
        for members in (minibatches or [list(range(len(rows)))])
    ]
    return Experience(rows, trainable, batch, batch.cu_seqlens, parts)
