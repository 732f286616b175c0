"""The scripts in tools/ import each other by bare name, as when they are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
