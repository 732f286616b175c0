"""The tables of docs/from_nemo_rl.md and docs/from_verl.md name settings, values, metrics and presets that exist here."""

import re
from pathlib import Path

import pytest

from tests.torchrun import ROOT
from vapo_mcore.config import load_config
from vapo_mcore.config.loading import all_keys
from vapo_mcore.config.schema import CustomSource, FileSource, ReasoningGymSource
from vapo_mcore.errors import ConfigError
from vapo_mcore.records.metric_table import EVALUATION, METRICS

CONFIGS = ROOT / "examples" / "configs"
PAGES = ("from_nemo_rl", "from_verl")

# Wide enough for every value that the tables give alone; it gives no setting of the algorithm, so that any can be switched.
BASE = """
run: {dir: runs/x, steps: 1}
model: {path: models/x}
parallel: {world_size: 8}
batch: {prompts_per_step: 512, responses_per_prompt: 16, mini_batch_size: 512, max_tokens_per_microbatch: 65536}
data:
  train: [{kind: file, path: train.jsonl, verifier: math}]
  eval: [{kind: file, path: validation.jsonl, verifier: math}]
  max_prompt_length: 2048
rollout: {max_response_length: 14336}
"""

SETTING = re.compile(r"(?P<key>[a-z_]+(?:\.[a-z0-9_]+)*)(?:: (?P<value>.+))?")
METRIC = re.compile(r"[a-z_]+/[a-z_]+")
FILE = re.compile(r".*\.(?:jsonl|json|md|py|yaml)")


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def our_spans(text: str) -> list[str]:
    """Code spans of all table cells but those of the first column, which holds the other system's names."""
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [span for row in rows for cell in row[1:] for span in re.findall(r"`([^`]+)`", cell)]


def settings_in(text: str) -> list[tuple[str, str | None]]:
    """(dotted key, value or None) of each span that is written like a setting; single words are values and names."""
    matches = [SETTING.fullmatch(span) for span in our_spans(text) if not FILE.fullmatch(span)]
    return [(m["key"], m["value"]) for m in matches if m is not None and ("." in m["key"] or m["value"] is not None)]


def is_known(key: str) -> bool:
    inside = re.fullmatch(r"data\.(?:train|eval)\.\d+\.(.+)", key)
    if inside is None:
        return key in all_keys()
    return inside[1] in {name for source in (FileSource, ReasoningGymSource, CustomSource) for name in all_keys(source)}


def unusable(settings: list[tuple[str, str | None]], base: Path) -> list[str]:
    """What is wrong with keys, and with values given on top of ``base``."""
    wrong = [key for key, _ in settings if not is_known(key)]
    for key, value in settings:
        if value is not None and is_known(key):
            try:
                load_config(base, [f"{key}={value}"], check_paths=False)
            except ConfigError as error:
                wrong.append(str(error))
    return wrong


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist_and_take_their_values(page: str, base: Path) -> None:
    settings = settings_in(text_of(page))
    assert len(settings) > 90
    assert sum(value is not None for _, value in settings) > 70
    assert unusable(settings, base) == []


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    metrics = [span for span in our_spans(text_of(page)) if METRIC.fullmatch(span)]
    assert len(metrics) > 15
    assert set(metrics) <= {metric.name for metric in METRICS} | {f"eval/{name}" for name, _ in EVALUATION}


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    text = text_of(page)
    presets = re.findall(r"presets/(\w+)\.yaml", text)
    assert len(presets) >= 2
    assert [name for name in presets if not (CONFIGS / "presets" / f"{name}.yaml").is_file()] == []
    links = re.findall(r"\]\(([\w.]+\.md)\)", text)
    assert [name for name in links if not (ROOT / "docs" / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_example_is_valid(page: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", text_of(page), flags=re.DOTALL)
    path = tmp_path / "example.yaml"
    path.write_text(example.replace("presets/", f"{CONFIGS}/presets/"))
    config = load_config(path, check_paths=False)
    assert config.uses_critic == (page == "from_nemo_rl")


def test_a_mistake_in_a_table_is_found(base: Path) -> None:
    ours = "`batch.minibatch_size: 4`, `rollout.top_p: 0.5`, `seed: 3`, `data.train.0.nmae`"
    settings = settings_in(f"| theirs | here |\n|---|---|\n| `no.such.key` | {ours} |\n")
    assert settings == [("batch.minibatch_size", "4"), ("rollout.top_p", "0.5"), ("seed", "3"), ("data.train.0.nmae", None)]
    unknown_size, unknown_name, message = unusable(settings, base)
    assert (unknown_size, unknown_name) == ("batch.minibatch_size", "data.train.0.nmae")
    assert "rollout.top_p" in message
