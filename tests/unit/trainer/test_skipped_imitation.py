"""Imitation steps that were skipped are counted, the critic's as well as the policy's."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from vapo_mcore.trainer.step import StepRunner


@pytest.mark.parametrize(("policy", "critic", "skipped"), [(True, True, 0), (False, True, 1), (True, False, 1), (False, False, 2)])
def test_skipped_steps_of_both_models_are_counted(policy: bool, critic: bool, skipped: int) -> None:
    imitation = SimpleNamespace(
        settings=SimpleNamespace(value_coef=0.5),
        draw=lambda *_: object(),
        imitate=lambda *_: policy,
        learn_values=lambda *_: critic,
        record=lambda *_: None,
    )
    residency = SimpleNamespace(enter=lambda _: None, mark_changed=lambda _: None)
    trainer: Any = SimpleNamespace(imitation=imitation, rollouts=1, models=SimpleNamespace(policy=1, critic=2, residency=residency))
    told: dict[str, int] = {}
    step: Any = SimpleNamespace(
        number=1, timer=SimpleNamespace(phase=lambda _: contextlib.nullcontext()), metrics=SimpleNamespace(put=told.__setitem__)
    )
    StepRunner._imitate(trainer, step)
    assert told == {"imitation/skipped": skipped}
