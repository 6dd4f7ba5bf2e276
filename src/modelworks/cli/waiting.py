"""A line that moves while something long is computed whose end is not known: shown after two seconds, on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelworks.cli.output import Output

AFTER_SECONDS = 2.0


@contextmanager
def waiting(text: str, output: Output) -> Iterator[None]:
    """Says `text` and for how long already. Nothing where the output is no terminal, and nothing for short waits."""
    if not output.console.is_terminal:
        yield
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=output.console, transient=True
    )
    bar.add_task(text, total=None)
    timer = threading.Timer(AFTER_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting the bar just now
        bar.stop()
