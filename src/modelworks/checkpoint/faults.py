"""Named points between any two steps of saving, where a test may end the process or fail a step.

Outside tests nothing is installed, and reaching a point costs one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hook = Callable[[str], None]

_hook: Hook | None = None


def reached(point: str) -> None:
    """Called by the code that saves, from whichever thread does so. The hook may raise, or never return."""
    if _hook is not None:
        _hook(point)


@contextmanager
def at_each_point(hook: Hook) -> Iterator[None]:
    """`hook` is called with the name of every point that this process reaches inside the block."""
    global _hook
    before, _hook = _hook, hook
    try:
        yield
    finally:
        _hook = before
