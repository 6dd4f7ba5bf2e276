"""Names of a room that are imported on first use, so that naming the room costs nothing (and imports no torch).

    _HOME = {"train": "job", "measure": "preparation"}
    __getattr__ = lazily(__name__, _HOME)

A name is kept in the room once it was asked for. That is more than speed: its import puts the file's *module* into the
room under the file's own name, and where the two share a name, what was asked for must win.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(room: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of the module `room`. home: name -> the file in the room that has it."""

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(f"{room}.{home[name]}"), name)
        setattr(sys.modules[room], name, value)
        return value

    return find
