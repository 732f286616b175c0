"""What a verifier may know of the pool it runs in."""

from __future__ import annotations

grading_seconds = 5.0
"""``reward.timeout_seconds``, set in each worker: a verifier that waits for something else gives up before."""
