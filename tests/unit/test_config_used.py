"""No setting without effect: the code reads every key of the configuration somewhere."""

import ast

from tests.torchrun import ROOT
from vapo_mcore.config.loading import all_keys
from vapo_mcore.config.schema import CustomSource, FileSource, LossTermConfig, ReasoningGymSource

PACKAGE = ROOT / "vapo_mcore"


def test_every_key_is_read() -> None:
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if not path.is_relative_to(PACKAGE / "config") or path.parent.name == "schema":  # the schema's properties, not the rules over it
            read |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    keys = [
        *all_keys(),
        *(f"data.train.{name}" for source in (FileSource, ReasoningGymSource, CustomSource) for name in source.model_fields),
    ]
    keys += [f"algorithm.loss_terms.{name}" for name in LossTermConfig.model_fields]
    assert len(keys) > 100
    assert [key for key in keys if key.rsplit(".", 1)[-1] not in read] == []
