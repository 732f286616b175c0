"""docs/configuration.md is what the schema says, and every setting says what it means."""

from tests.torchrun import ROOT
from vapo_mcore.config.loading import all_keys
from vapo_mcore.config.reference import render_markdown
from vapo_mcore.config.schema import Config, CustomSource, FileSource, LossTermConfig, ReasoningGymSource


def rows() -> dict[str, list[str]]:
    """Key -> the other cells of its row."""
    lines = [line for line in render_markdown().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").replace(r"\|", "/").split(" | ")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_docs_configuration_is_up_to_date() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == render_markdown(), "run: python -m vapo_mcore.config.reference > docs/configuration.md"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    keys = all_keys()
    settings = {key for key in keys if not any(other.startswith(key + ".") for other in keys)}
    source_keys = {name for source in (FileSource, ReasoningGymSource, CustomSource) for name in source.model_fields} - {"fields"}
    found = rows()
    assert {key for key in found if ".N." not in key} == settings
    assert {key.split(".N.")[1] for key in found if key.startswith("data.train.N.") and ".fields." not in key} == source_keys
    assert {key.split(".N.")[1] for key in found if key.startswith("algorithm.loss_terms.N.")} == set(LossTermConfig.model_fields)
    assert [key for key, (_, _, meaning, _) in found.items() if not meaning] == [], "say it in a comment beside the field in schema/"


def test_rows_hold_type_default_and_reason() -> None:
    found = rows()
    assert found["algorithm.policy_loss.clip_low"][:2] == [
        "number > 0, < 1",
        f"`{Config.model_fields['algorithm'].default.policy_loss.clip_low}`",
    ]
    assert found["run.steps"][:2] == ["whole number >= 0", "required"]
    assert found["parallel.data_parallel_size"][1] == "derived"
    assert found["critic.optimizer.lr"][1:3] == ["`2e-06`", found["policy.optimizer.lr"][2]]
    assert found["algorithm.kl.coef"][3] == "`algorithm.kl.place`: no KL term is used"
    assert "No effect, by `data.eval`: there is no evaluation set." in render_markdown()
