"""What every driver does: load its engine once, say what it is, then generate for each line that it is sent.

A driver runs in the environment of its engine and imports nothing of ours but this file. It is given
`{"prompts": [[ids], …], "tokens": n}` a line and answers `{"ids": [[…], …], "seconds": [[…], …]}`: for each prompt the
n tokens, always n, the most likely ones, and when each was there, in seconds since the prompts were handed over.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]]]]


def own_stdout() -> object:
    """The stream of answers; what engines print goes to stderr from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return stream


def serve(stream, generate: Generate, **facts: object) -> None:  # type: ignore[no-untyped-def]
    stream.write(json.dumps({"ready": facts}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        ids, seconds = generate(asked["prompts"], asked["tokens"])
        stream.write(json.dumps({"ids": ids, "seconds": seconds}) + "\n")
