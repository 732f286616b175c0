"""Each preset of examples/configs/presets trains."""

import re
import sys
from pathlib import Path

import pytest

from tests.torchrun import run_bounded
from tests.training_setup import write_setup

PRESETS = sorted(path.stem for path in (Path(__file__).parents[2] / "examples" / "configs" / "presets").glob("*.yaml"))


@pytest.mark.slow
def test_every_preset_runs(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("presets_worker.py")
    result = run_bounded([sys.executable, str(worker), str(write_setup(tmp_path))], timeout=900)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert re.findall(r"^preset (\w+) ok", result.stdout, re.MULTILINE) == PRESETS
