"""Client of verifiers behind an HTTP endpoint: ``verifier: http://host:port/path``."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from vapo_mcore.errors import RewardError
from vapo_mcore.rewards import limits

ATTEMPTS = 4
_SHARE_OF_TIME = 0.9
_FIRST_PAUSE_SECONDS = 0.1
_MAX_ANSWER_BYTES = 2**20
_WORTH_A_RETRY = (408, 425, 429, 500, 502, 503, 504)


def score(url: str, response: str, ground_truth: str, metadata: Mapping[str, Any]) -> float:
    """POST the response as JSON and read the score: ``{"score": 0.5}`` or a bare number.

    Retries failed connections, time-outs and temporary status codes up to ``ATTEMPTS`` times within ``reward.timeout_seconds``.

    Raises:
        ConnectionError: no attempt succeeded, or the endpoint rejected the request.
        ValueError: the answer holds no number. (The pool turns NaN into an error, as for any verifier.)
    """
    text = json.dumps({"response": response, "ground_truth": ground_truth, "metadata": dict(metadata)}, default=str)
    body = text.encode("utf-8", "replace")
    deadline = time.monotonic() + _SHARE_OF_TIME * limits.grading_seconds
    reason, pause = "", _FIRST_PAUSE_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        try:
            # Half of the remaining time per attempt: leaves time for a retry if the endpoint does not answer.
            return _score_in(_post(url, body, max(0.05, (deadline - time.monotonic()) / 2)))
        except urllib.error.HTTPError as error:
            place = error.headers.get("Location") if error.code // 100 == 3 else None
            reason = f"status {error.code}" + (f", a redirect to {place!r}: give that address" if place else "")
            if error.code not in _WORTH_A_RETRY:
                raise ConnectionError(f"{url} refused the request: {reason}") from None
        except (OSError, HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
        if attempt == ATTEMPTS or time.monotonic() + pause >= deadline:
            break
        time.sleep(pause)
        pause *= 2
    raise ConnectionError(f"{url} gave no verdict in {attempt} attempts, the last: {reason}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Do not follow redirects: urllib would send a GET without the response to grade."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _post(url: str, body: bytes, seconds: float) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", "Accept": "application/json"})
    with _OPENER.open(request, timeout=seconds) as answer:
        content: bytes = answer.read(_MAX_ANSWER_BYTES + 1)
    if len(content) > _MAX_ANSWER_BYTES:
        raise ValueError(f"the endpoint's answer has more than {_MAX_ANSWER_BYTES:,} bytes")
    return content


def _score_in(content: bytes) -> float:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"the endpoint's answer is not JSON: {content[:60]!r}") from None
    if isinstance(value, dict):
        value = value.get("score")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"the endpoint's answer must be a number or an object with a number 'score': {content[:60]!r}")
    return float(value) if abs(value) < 2**1000 or not isinstance(value, int) else math.inf


def check_reachable(url: str) -> None:
    """Raise RewardError if the endpoint does not accept connections."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=10.0).close()
    except OSError as error:
        raise RewardError(f"nothing answers at {parts.hostname}:{port}: {error}") from None
