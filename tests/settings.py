"""Configurations of tests that read no files of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from vapo_mcore.config import Config, load_config


def config_of(settings: dict[str, Any]) -> Config:
    """Load nested settings like a file, without the checks that need the model folder and the data files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(settings))
        return load_config(path, check_paths=False)
