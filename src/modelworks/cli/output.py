"""What commands print, and where.

Without `--json`, people's text goes to stdout. With it, people's text and progress go to stderr and the last line of
stdout is one JSON object, so that `modelworks … --json | tail -1` is always parseable.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

FILE_WIDTH = 200  # columns of tables that go to a file or a pipe
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


class Output:
    """Where a command writes. `console` is for people: text, tables and progress bars."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """A rich console on stdout, or on stderr under `--json`."""
        if self._console is None:
            from rich.console import Console

            console = Console(stderr=self.json, highlight=False)
            if not console.is_terminal:
                console.width = FILE_WIDTH
            self._console = console
        return self._console

    def print(self, text: str = "") -> None:
        """One line for people, written as it is (no markup)."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def result(self, values: dict[str, Any]) -> None:
        """The command's result: one JSON object under `--json`, nothing otherwise."""
        if self.json:
            print(json_line(values), flush=True)


def json_line(values: dict[str, Any]) -> str:
    """One line of strict JSON: numbers that JSON lacks (nan, inf) become null, other objects their text."""
    return json_module.dumps(_finite(values), ensure_ascii=False, allow_nan=False, default=str)


def write_error(message: str, exit_code: int, *, json: bool = False) -> None:
    """`error: …` on stderr; under `--json` also an object with `error` and `exit_code` on stdout."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    if json:
        print(json_line({"error": message, "exit_code": exit_code}), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
