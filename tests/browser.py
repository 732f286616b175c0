"""Drive a headless Chromium with the DevTools protocol over two pipes, without a port or a library.

If no Chromium is installed, root installs Debian's chromium-headless-shell; for other users the test fails with that advice.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"


def executable() -> str:
    """Return the path of a Chromium. Installs one if there is none and the process runs as root."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", PACKAGE, "fonts-dejavu-core"],
        ):
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        found = shutil.which(PACKAGE)
    assert found is not None, f"this test needs Chromium: install Debian's {PACKAGE} (or chromium), or run it as root, which installs it"
    return found


class Browser:
    """A browser with one page. ``events`` contains all events reported by the browser, in order."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process, self._write, self._read = process, write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a protocol command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path: Path, width: int = 1440, height: int = 1000) -> None:
        """Load a file and wait until its load event has finished."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + 20
        while not self.evaluate("document.readyState === 'complete' && performance.timing.loadEventEnd > 0"):
            assert time.monotonic() < deadline, "the page did not load within 20 s"
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression and return its value, converted by JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def complaints(self) -> list[str]:
        """Return script errors, console messages, and requests for anything except the page."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                found.append(json.dumps(parameters))
            elif event["method"] == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file://", "about:")):
                found.append(f"request: {parameters['request']['url']}")
        return found

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 30
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium did not answer within 30 s"
            part = os.read(self._read, 1 << 20)
            assert part, f"Chromium exited with {self._process.wait(5)}"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a running browser and close it afterwards."""
    to_browser, from_browser = os.pipe(), os.pipe()
    read_by_it, written_by_it = to_browser[0], from_browser[1]
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        "--no-first-run",
        "--disable-background-networking",
    ]
    script = f'exec "$@" 3<&{read_by_it} 4>&{written_by_it}'
    with tempfile.TemporaryDirectory(prefix="vapo_mcore_chromium_") as profile:
        command = ["bash", "-c", script, "_", executable(), *options, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command, pass_fds=(read_by_it, written_by_it), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read_by_it)
        os.close(written_by_it)
        try:
            browser = Browser(process, to_browser[1], from_browser[0])
            yield browser
            with contextlib.suppress(OSError, AssertionError):
                browser._session = None
                browser.call("Browser.close")
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
