"""A verifier behind HTTP: verdicts, retries, and everything that an endpoint can answer instead of a number."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from vapo_mcore.config.verifiers import verifier_name_fault
from vapo_mcore.errors import RewardError
from vapo_mcore.rewards import GradeItem, VerifierPool, endpoint, limits
from vapo_mcore.rewards.endpoint import score
from vapo_mcore.rewards.registry import load_verifier


class Handler(BaseHTTPRequestHandler):
    """Answers as its path says; ``/flaky/N`` fails N times first."""

    calls: ClassVar[dict[str, int]] = {}

    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = self.calls[self.path] = self.calls.get(self.path, 0) + 1
        kind, _, rest = self.path.strip("/").partition("/")
        if kind == "flaky" and count <= int(rest):
            self.send_error(503)
        elif kind == "status":
            self.send_error(int(rest))
        elif kind == "moved":
            self.send_response(int(rest))
            self.send_header("Location", "/says")
            self.end_headers()
        elif kind == "slow":
            time.sleep(float(rest))
            with suppress(ConnectionError):  # the client has given up
                self.answer(b"1")
        elif kind == "says":
            self.answer(job["response"].encode())
        else:
            right = job["response"] == job["ground_truth"] and job["metadata"] == {"level": 1}
            self.answer(json.dumps({"score": float(right), "more": "ignored"}).encode())

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_score(server):
    assert score(f"{server}/grade", "é", "é", {"level": 1}) == 1.0
    assert score(f"{server}/grade", "é", "e", {"level": 1}) == 0.0
    assert score(f"{server}/says", "0.25", "", {}) == 0.25


def test_what_passes_is_tried_again(server, monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_SECONDS", 0.01)
    assert score(f"{server}/flaky/3", "x", "x", {"level": 1}) == 1.0
    assert Handler.calls["/flaky/3"] == 4
    with pytest.raises(ConnectionError, match="gave no verdict in 4 attempts, the last: status 503"):
        score(f"{server}/flaky/9", "x", "x", {})
    with pytest.raises(ConnectionError, match="refused the request: status 404"):
        score(f"{server}/status/404", "x", "x", {})
    assert Handler.calls["/status/404"] == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_named_and_not_followed(server, status):
    """Followed, it would be a GET without the response."""
    with pytest.raises(ConnectionError, match=rf"refused the request: status {status}, a redirect to '/says': give that address"):
        score(f"{server}/moved/{status}", "1", "1", {})


def test_an_endpoint_that_hangs_is_given_up_before_the_pool_would(server, monkeypatch):
    monkeypatch.setattr(limits, "grading_seconds", 0.8)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="TimeoutError"):
        score(f"{server}/slow/3", "x", "x", {})
    assert time.monotonic() - start < 2.0
    assert Handler.calls["/slow/3"] >= 2


@pytest.mark.parametrize("answer", ["", "{", "null", '"1"', "true", "[1]", "{}", '{"score": "1"}', '{"score": null}', "[" * 100_000])
def test_an_answer_without_a_number_is_no_verdict(server, answer):
    with pytest.raises(ValueError, match="the endpoint's answer"):
        score(f"{server}/says", answer, "", {})


def test_in_the_pool_bad_answers_are_error_verdicts(server):
    answers = ["1", "NaN", "Infinity", '{"score": 1e999}', "2", "-1", "9" * 400, "nonsense", "0.5"]
    with VerifierPool(1, 10.0) as pool:
        verdicts = pool.grade([GradeItem(f"{server}/says", answer, "") for answer in answers])
    assert [verdict.error is None for verdict in verdicts] == [True, *[False] * 7, True]
    assert [verdicts[0].correct, verdicts[-1].correct, verdicts[-1].score] == [True, False, 0.5]
    assert "must be a finite number" in verdicts[1].error
    assert "is not JSON" in verdicts[7].error


def test_an_endpoint_that_is_not_there_ends_the_start():
    with pytest.raises(RewardError, match=r"nothing answers at 127\.0\.0\.1:1: "):
        load_verifier("http://127.0.0.1:1/grade")


@pytest.mark.parametrize("name", ["ftp://host/x", "http://", "http:///x", "http://a b/x", "https://user@host/x"])
def test_urls_that_are_no_endpoints(name):
    assert "by the URL of its endpoint" in verifier_name_fault(name)
    assert verifier_name_fault("https://host.example:8443/grade?v=1") is None
