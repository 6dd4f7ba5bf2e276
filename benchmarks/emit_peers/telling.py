"""How a peer's process tells what its package reads in files: a line of JSON for each directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def tell_each(see: Callable[[str, int], dict[str, Any]]) -> None:
    """Arguments: DIRECTORY WORLD DIRECTORY WORLD ...; one process for all, as importing takes longer than reading."""
    for directory, world in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        try:
            print("seen", json.dumps(see(directory, int(world))))
        except Exception as error:  # what the package says against a file is a result
            print("seen", json.dumps({"error": f"{type(error).__name__}: {error}"}))
