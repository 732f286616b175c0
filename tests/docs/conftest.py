"""The one copy of the tree in which all commands of the pages are run, and the Slurm that some of them speak to."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import fake_cluster
from tests.slurm.fake_cluster import FakeCluster
from tests.torchrun import ROOT


@pytest.fixture(scope="session")
def tree() -> Iterator[Path]:
    """What git would commit, with a link to the environment. ``DOCS_TREE`` keeps it for the next call, for some of the commands again."""
    kept = os.environ.get("DOCS_TREE")
    if kept:
        copy_tree(Path(kept))
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_docs_") as folder:
        Path(folder).chmod(0o755)
        copy_tree(Path(folder))
        yield Path(folder)


def copy_tree(tree: Path) -> None:
    """Copy what git would commit to ``tree``, and link the environment there."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)  # with its time, by which make judges
    if not (tree / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")


@pytest.fixture(scope="session")
def cluster() -> Iterator[FakeCluster]:
    """As many fake nodes as the largest recipe asks for."""
    if os.geteuid() != 0:
        pytest.skip("the daemons of the test's Slurm need root")
    if not fake_cluster.installed():
        fake_cluster.install()
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_slurm_") as folder:
        Path(folder).chmod(0o755)
        with FakeCluster(Path(folder), nodes=16, gpus=8) as running:
            yield running
