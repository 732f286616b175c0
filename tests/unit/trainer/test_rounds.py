"""Choosing groups from several rounds keeps rows, tokens and texts together."""

import torch

from tests.unit.trainer.rollouts import make_batch, make_rows
from vapo_mcore.experience.sampling import Round, keep_groups


def make_round(first_token, mine):
    """Two groups of two responses; this rank holds the rows in ``mine``."""
    rows = make_rows([1, 2, 3, 4], [1.0, 0.0, 1.0, 0.0], groups=[0, 0, 1, 1])
    local = make_batch(rows.select(mine), mine)
    local.tensors["tokens"] += first_token
    return Round(rows, torch.tensor([0 if i in mine else 1 for i in range(4)]), local, {i: {"text": first_token + i} for i in mine})


def test_kept_groups_are_renumbered_with_their_tokens():
    rounds = [make_round(0, [0, 1]), make_round(5000, [0, 1, 2])]
    kept = keep_groups(rounds, [(0, 1), (1, 1), (1, 0)])
    assert kept.rows.response_length.tolist() == [3, 4, 3, 4, 1, 2]
    assert kept.rows.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert kept.holder.tolist() == [1, 1, 0, 1, 0, 0]
    assert sorted(kept.local.row_ids.tolist()) == [2, 4, 5]
    for number, row in enumerate(kept.local.row_ids.tolist()):
        start, stop = kept.local.cu_seqlens[number : number + 2].tolist()
        source = {2: 2, 4: 0, 5: 1}[row]
        assert kept.local["tokens"][start:stop].tolist() == [5000 + 100 * source + t for t in range(stop - start)]
        assert kept.local.rows.group[number] == kept.rows.group[row]
    assert kept.shown == {2: {"text": 5002}, 4: {"text": 5000}, 5: {"text": 5001}}


def test_nothing_kept_is_an_empty_round():
    kept = keep_groups([make_round(0, [0, 1])], [])
    assert len(kept.rows) == 0
    assert len(kept.local) == 0
    assert kept.local.num_tokens == 0
    assert set(kept.local.tensors) == {"tokens", "response_mask", "rollout_logprobs"}
