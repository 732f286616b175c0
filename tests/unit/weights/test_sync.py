"""A verified weight sync compares what the loader received with what the policy has afterwards."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.rollout_models import load_model, named_weights, write_model
from vapo_mcore.errors import RolloutError
from vapo_mcore.rollout.base import EngineState, Replica
from vapo_mcore.rollout.transformers_engine import TransformersEngine
from vapo_mcore.weights.sync import WeightSync

SPOILT = "model.norm.weight"


class SpoilingEngine(TransformersEngine):
    """Its loader writes into a tensor that it was lent."""

    def _load_weights(self, weights) -> None:
        lent: dict[str, Tensor] = {}

        def keep() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                lent[name] = tensor
                yield name, tensor

        super()._load_weights(keep())
        lent[SPOILT].mul_(2.0)


def make_sync(kind: type[TransformersEngine], folder: Path, *, verify: bool) -> WeightSync:
    """A sync whose policy is the folder's transformers model: the exporter lends out its parameters."""
    weights = named_weights(load_model(folder))
    sync = WeightSync.__new__(WeightSync)
    sync.exporter = SimpleNamespace(names=list(weights), buckets=lambda: iter([list(weights.items())]))  # type: ignore[assignment]
    sync.engine = kind(folder, torch.float32, Replica.of_rank(0, 1, 1), max_model_len=64, device=torch.device("cpu"))
    sync.verify = verify
    return sync


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen2", tmp_path_factory.mktemp("qwen2"))


def test_a_sound_sync_passes_and_reports_every_tensor(folder: Path) -> None:
    sync = make_sync(TransformersEngine, folder, verify=True)
    moves: list[EngineState] = []
    report = sync.make_ready(after_loading=lambda: moves.append(sync.engine.state))
    assert report.checksums is not None
    assert set(report.checksums) == set(sync.exporter.names)
    assert moves == [EngineState.WEIGHTS_LOADED]
    assert sync.engine.state is EngineState.READY


def test_a_policy_that_differs_from_what_was_loaded_is_named(folder: Path) -> None:
    with pytest.raises(RolloutError, match=rf"values that differ from the policy's, in {SPOILT}$"):
        make_sync(SpoilingEngine, folder, verify=True).make_ready(after_loading=lambda: None)


def test_without_verification_nothing_is_summed(folder: Path) -> None:
    assert make_sync(SpoilingEngine, folder, verify=False).make_ready(after_loading=lambda: None).checksums is None


class ForgettingEngine(TransformersEngine):
    """Takes everything in, and then changes one number of its own parameters."""

    def _load_weights(self, weights) -> None:
        super()._load_weights(weights)
        self._parameters[SPOILT].data[3] += 1e-3


def test_an_engine_that_holds_other_values_than_it_was_given_is_found(folder: Path) -> None:
    with pytest.raises(RolloutError, match=rf"the rollout engine's weights differ from those it received, in {SPOILT}$"):
        make_sync(ForgettingEngine, folder, verify=True).make_ready(after_loading=lambda: None)
