"""What a trial's process runs in tests that are about processes and not about training."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from modelworks.config import UserError

ROW = {"status": "finished", "loss": 3.0, "train_loss": 3.5, "steps": 8, "seconds": 0.1, "reason": "", "curve": []}


def die(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    print("the last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def fail(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    raise RuntimeError("something\nelse")


def refuse(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    raise UserError("model.vocab_size is too small")


def meet(config: str, directory: str, machine: dict[str, Any] | None) -> dict[str, Any]:
    """Ends only where another trial runs at the same time: one reads from a pipe what the other writes."""
    mode = "r" if yaml.safe_load(config)["seed"] == 0 else "w"
    with open(Path(directory).parents[1] / "pipe", mode) as pipe:
        text = pipe.read() if mode == "r" else str(pipe.write("hello"))
    return {**ROW, "reason": f"{text} with {os.environ.get('OMP_NUM_THREADS')} threads"}
