"""Limits of the grading pool that verifiers may read."""

from __future__ import annotations

grading_seconds = 5.0
"""``reward.timeout_seconds``, set in each worker; a verifier that waits for I/O must give up earlier."""
