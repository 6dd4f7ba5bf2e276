"""A process started to call a function (child.py): `python -m modelworks.parallel.rank_process PARENT DESCRIPTOR`.

The descriptor is a socket to the parent. One line of JSON comes from it (what to run), one goes back (how it ended).
The process never outlives its parent: the kernel kills it then, and where it cannot, the closed socket ends it.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from modelworks.config import UserError
from modelworks.parallel.failures import is_lost_connection

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(parent: int, descriptor: int) -> None:
    _die_with(parent)
    os.set_inheritable(descriptor, False)  # or a process started here would keep the socket open
    control = socket.socket(fileno=descriptor)
    words = control.makefile("r", encoding="utf-8")
    line = words.readline()
    if not line:
        os._exit(1)  # the parent is gone already
    threading.Thread(target=_end_with_parent, args=(words,), daemon=True).start()
    setup = json.loads(line)
    os.environ.update(setup["environment"])
    sys.path[:] = setup["path"]
    outcome = _run(setup["target"], setup["arguments"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    control.sendall(json.dumps(outcome).encode() + b"\n")
    if outcome["kind"] not in ("result", "exit"):
        os._exit(1)  # what a failed rank leaves behind may not let go of the process


def _run(target: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What became of `target(**arguments)`: `kind` and what belongs to it, with the time on this machine's clock."""
    try:
        result = _function(target)(**arguments)
        json.dumps(result)  # here, so that a result that cannot be sent is this rank's failure
        outcome = {"kind": "result", "result": result}
    except UserError as error:
        outcome = {"kind": "user error", "text": str(error)}
    except KeyboardInterrupt:
        outcome = {"kind": "interrupted", "text": "interrupted"}
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        outcome = {"kind": "exit", "code": code}
    except BaseException as error:
        outcome = {
            "kind": "failure",
            "type": type(error).__name__,
            "text": str(error),
            "place": _place(error),
            "trace": traceback.format_exc(),
            "lost": is_lost_connection(error),
        }
    return {**outcome, "when": time.monotonic()}


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _place(error: BaseException) -> str:
    """The last line of ours that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}modelworks{os.sep}" in frame.filename][1:] or frames[1:] or frames
    return f"{os.path.basename(ours[-1].filename)}:{ours[-1].lineno}"


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def _end_with_parent(words: io.TextIOBase) -> None:
    words.read()  # returns when the parent's end closes, however it ended
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
