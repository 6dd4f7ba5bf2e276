"""A headless Chromium, driven by the DevTools protocol over pipes: commands and answers are JSON, ended by NUL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_READS, _WRITES = 3, 4  # file descriptors that --remote-debugging-pipe uses


class Page:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._kept = b""
        self._n_sent = 0
        self._session: str | None = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **params: Any) -> Any:
        """One command; its result."""
        self._n_sent += 1
        message = {"id": self._n_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._n_sent:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, milliseconds: int = 20_000) -> None:
        """Until a JavaScript expression is true."""
        self.evaluate(
            f"""new Promise((done, fail) => {{
                const end = performance.now() + {milliseconds};
                const look = () => ({condition}) ? done() : performance.now() > end
                    ? fail(new Error("never: " + {json.dumps(condition)} + ": " + document.body.innerText))
                    : setTimeout(look, 5);
                look();
            }})"""
        )

    def _next(self) -> Any:
        while b"\0" not in self._kept:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._kept += data
        message, self._kept = self._kept.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A browser with an empty tab; the test is skipped where none is installed."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed")
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()

    def place_pipes() -> None:
        copies = os.dup(theirs_in), os.dup(theirs_out)  # either may lie where the other has to go
        os.dup2(copies[0], _READS)
        os.dup2(copies[1], _WRITES)

    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    process = subprocess.Popen(
        [program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place_pipes,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        for end in (ours_in, ours_out):
            os.close(end)
        process.kill()
        process.wait()
