"""A process that calls one function for us: started, told what to call, listened to (its side: rank_process.py).

It never outlives this process, or the thread that started it. It is in a process group of its own, or the terminal
would give it Ctrl-C as well.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROGRAM = "modelworks.parallel.rank_process"


@dataclass
class Child:
    """control: readable once it has something to say, or ended. outcome: what it sent (rank_process.py), or
    `killed`/`vanished` where it ended without a word."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    log: Path | None
    outcome: dict[str, Any] | None = None
    received: bytearray = field(default_factory=bytearray)

    def tell(self, target: str, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        """Call `module:function` with the arguments (what JSON can hold), under these variables."""
        words = {
            "target": target,
            "arguments": dict(arguments),
            "environment": dict(environment),
            "path": sys.path,
        }
        text = json.dumps(words, allow_nan=True).encode() + b"\n"
        try:
            self.control.sendall(text)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is dead already, which reading from it will show

    def listen(self) -> None:
        """Take what the process sent; the end of it without an outcome is the end of the process."""
        try:
            data = self.control.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self.received += data
        if data and not self.received.endswith(b"\n"):
            return
        if data:
            self.outcome = json.loads(self.received)
            return
        code = self.process.wait()
        kind = "killed" if code < 0 else "vanished"
        self.outcome = {"kind": kind, "code": code, "when": time.monotonic(), "lost": code == -signal.SIGABRT}

    @property
    def failed(self) -> bool:
        return self.outcome is not None and self.outcome["kind"] not in ("result", "exit")

    def describe_end(self, memory_ran_out: bool) -> str:
        """How a process ended that said nothing. memory_ran_out: whether the kernel has meanwhile ended a process."""
        code = int((self.outcome or {})["code"])
        if code >= 0:
            return f"ended with exit code {code} without a word"
        return f"was {_killed(-code, memory_ran_out)}"

    def end(self, seconds: float) -> None:
        """Wait for its end, and kill it after some seconds."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.control.close()


def start_child(environment: Mapping[str, str], log: Path | None) -> Child:
    """log: what its output goes to; None: where ours goes."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", _PROGRAM, str(os.getpid()), str(theirs.fileno())]
    with theirs, open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output if log else None,
            stderr=output if log else None,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return Child(process, ours, log)


def _killed(number: int, memory_ran_out: bool) -> str:
    name = signal.Signals(number).name
    if memory_ran_out and number == signal.SIGKILL:
        return f"killed ({name}), perhaps out of memory: meanwhile the kernel ended a process for want of it"
    return f"killed ({name})"
