"""Fixtures of the weight tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.weights.models import hf_config


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a small model -> its folder in bfloat16, weights random (biases and norms too), made once a session."""
    made: dict[str, Path] = {}

    def make(model: str) -> Path:
        if model not in made:
            from transformers import AutoModelForCausalLM

            torch.manual_seed(7)
            hf = AutoModelForCausalLM.from_config(hf_config(model)).to(torch.bfloat16)
            with torch.no_grad():
                for parameter in hf.parameters():
                    parameter.normal_()
            made[model] = tmp_path_factory.mktemp(model) / "hf"
            hf.save_pretrained(made[model])
        return made[model]

    return make
