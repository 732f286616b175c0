"""The graders of a run take the scores that the configuration scales."""

from __future__ import annotations

from pathlib import Path

from tests.unit.config_helpers import load, write_base
from vapo_mcore.rewards import GradeItem
from vapo_mcore.trainer.main import _verifier_pool


def test_scores_are_those_of_the_configured_scale(tmp_path: Path) -> None:
    write_base(tmp_path)
    config = load(tmp_path, "reward.scale={source: [-1, 3], target: [0, 1]}")
    with _verifier_pool(config) as pool:
        verdicts = pool.grade([GradeItem("tests.unit.rewards.misbehaving:partial", score, "") for score in ("-1", "2", "3", "4")])
    assert [(verdict.score, verdict.correct) for verdict in verdicts[:3]] == [(-1.0, False), (2.0, False), (3.0, True)]
    assert verdicts[3].error is not None
    assert "must be between -1 and 3" in verdicts[3].error
