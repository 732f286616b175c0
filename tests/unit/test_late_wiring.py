"""No module changes a finished object of another module: what an object needs is an argument of its constructor or of a method.

An attribute belongs to the modules whose classes declare it (a field, a name of the class, or an assignment to ``self``). A module without
such a class may assign to it only if ``ALLOWED`` names the place. An attribute that no class of the package declares is another library's.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.torchrun import ROOT

PACKAGE = ROOT / "vapo_mcore"
THEIRS = "object of another library, whose attribute has the name of one of ours"
ALLOWED = {
    ("commands/replay_command.py", "options"): "argparse's result, completed before it is read",
    ("config/yaml_text.py", "node"): THEIRS,
    ("data/chat_template.py", "tokenizer"): THEIRS,
    ("data/command.py", "tokenizer"): THEIRS,
    ("megatron/attention.py", "self.weight"): THEIRS,
    ("megatron/logprob.py", "ctx"): THEIRS,
    ("megatron/model.py", "chunk.rotary_pos_emb"): THEIRS,
    ("megatron/model.py", "layer.submodules.mlp.submodules"): THEIRS,
    ("rollout/transformers_engine.py", "parameter"): THEIRS,
    ("rollout/vllm_engine.py", "llm.llm_engine"): THEIRS,
    ("rollout/vllm_engine.py", "processor"): THEIRS,
    ("experience/critic_rows.py", "experience"): "fills in what the critic's layout adds to a rollout",
    ("experience/critic_rows.py", "own"): "the same, in the critic's layout",
    ("megatron/routing.py", "router"): "the task of the pass that begins",
    ("rewards/pool.py", "self.stats"): "counters",
    ("trainer/step.py", "step"): "the state of the step under way, which the runner fills",
    ("trainer/step.py", "self.models"): "a count that belongs to the trainer's checkpointed state",
}
"""File and receiver of each assignment, with the reason."""


def stored(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns or deletes."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.comprehension):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
    for target in targets:
        yield from (inner for inner in ast.walk(target) if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store | ast.Del))


def is_own(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def declared(tree: ast.Module) -> Iterator[str]:
    """The attributes that the module's classes declare."""
    for made in ast.walk(tree):
        if not isinstance(made, ast.ClassDef):
            continue
        for statement in made.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        yield from (attribute.attr for node in ast.walk(made) for attribute in stored(node) if is_own(attribute))


def late_assignments(root: Path) -> Iterator[tuple[str, str, str]]:
    """File, receiver, and "file:line: target" of each assignment to an attribute that classes of other files alone declare."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(root.rglob("*.py"))}
    owners: dict[str, set[Path]] = defaultdict(set)
    for file, tree in trees.items():
        for name in declared(tree):
            owners[name].add(file)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            for attribute in stored(node):
                if not is_own(attribute) and attribute.attr in owners and file not in owners[attribute.attr]:
                    name = file.relative_to(root).as_posix()
                    yield name, ast.unparse(attribute.value), f"{name}:{node.lineno}: {ast.unparse(attribute)}"  # type: ignore[attr-defined]


def test_no_module_changes_finished_objects_of_another() -> None:
    found = list(late_assignments(PACKAGE))
    assert [place for file, receiver, place in found if (file, receiver) not in ALLOWED] == []
    assert set(ALLOWED) - {(file, receiver) for file, receiver, _ in found} == set(), "these entries allow nothing"


def test_a_planted_assignment_is_found_and_those_of_the_own_module_are_not(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(
        "class Runner:\n    limit: int = 3\n\n    def __init__(self):\n        self.dump = None\n\n\nrunner = Runner()\nrunner.dump = 1\n"
    )
    (tmp_path / "command.py").write_text(
        "def replay(runner, other):\n    runner.dump, other.unknown = 2, 3\n    runner.limit += 1\n    del runner.dump\n"
    )
    assert [place for _, _, place in late_assignments(tmp_path)] == [
        "command.py:2: runner.dump",
        "command.py:3: runner.limit",
        "command.py:4: runner.dump",
    ]
