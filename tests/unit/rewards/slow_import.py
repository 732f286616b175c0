"""A verifier whose module takes 1.5 seconds to import."""

import time
from collections.abc import Mapping
from typing import Any

time.sleep(1.5)


def equal(response: str, ground_truth: str, metadata: Mapping[str, Any]) -> bool:
    return response == ground_truth
