"""Results of benchmarks as JSON beside the benchmark, with the hardware they were measured on."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modelworks.hardware import Machine, fingerprint

DIRECTORY = Path(__file__).parent / "results"


def write_results(name: str, results: Any, *, machine: Machine | None = None, directory: Path = DIRECTORY) -> Path:
    """Write `results/<name>.json`: `{hardware, date, command, results}`. Returns the path.

    With a measured `machine`, its rates stand beside the facts.
    """
    content = {
        "hardware": fingerprint(machine),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *(_relative(word) for word in sys.argv[1:])]
        ),
        "results": results,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    return path


def _relative(word: str) -> str:
    """Paths inside the repository as they are from its root and others by their name, so that a result names no one's
    directories."""
    root = Path(__file__).resolve().parent.parent
    path = Path(word)
    if path.exists() and path.resolve().is_relative_to(root):
        return str(path.resolve().relative_to(root))
    return path.name if path.is_absolute() else word
