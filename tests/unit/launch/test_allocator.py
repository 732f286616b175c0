"""The CUDA allocator's configuration: set for commands that train or generate, kept where the environment has one, judged by doctor."""

from __future__ import annotations

import os

import pytest

from vapo_mcore import cli
from vapo_mcore.doctor.machine import allocator
from vapo_mcore.launch.allocator import ALLOCATOR_VARIABLES, is_expandable, prepare_allocator


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}),
    ],
)
def test_only_an_environment_without_a_configuration_is_changed(given: dict[str, str], expected: dict[str, str]) -> None:
    prepare_allocator(given)
    assert given == expected


@pytest.mark.parametrize(("command", "expected"), [("train", "expandable_segments:True"), ("config", None)])
def test_commands_that_start_models_have_it_before_torch(command: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "x")  # so that the variable is as it was after the test
        monkeypatch.delenv(name)
    seen = {}

    def look(*_: object) -> int:
        seen["value"] = os.environ.get("PYTORCH_ALLOC_CONF")
        return 0

    monkeypatch.setattr(cli, f"_{command}", look)
    assert cli.main([command, "recipe.yaml"]) == 0
    assert seen["value"] == expected


def test_what_doctor_says() -> None:
    assert allocator({}).status == "ok"
    assert allocator({"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8, expandable_segments:true"}).status == "ok"
    fixed = allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert fixed.status == "warn"
    assert fixed.detail == (
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64: memory will fragment; add expandable_segments:True, or unset the variable"
    )
    # torch reads the first variable alone
    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert allocator(both).status == "warn"


def test_values_of_the_switch() -> None:
    assert [is_expandable(f"expandable_segments:{value}") for value in ("True", "1", "False", "")] == [True, True, False, False]
