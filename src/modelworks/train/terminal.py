"""What a person sees while a run trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from modelworks.config import format_count


class Terminal:
    """Use as a context around training; `say` may be called at any time."""

    def __init__(self, console: Console, *, total_steps: int, log_every: int) -> None:
        self.console = console
        self.total_steps = total_steps
        self.log_every = log_every
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()
        self._first_step = 0

    def start(self, step: int) -> None:
        self._started, self._first_step = time.monotonic(), step
        if self.console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            self._bar = Progress(*columns, console=self.console)
            self._task = self._bar.add_task("training", total=self.total_steps, completed=step, figures="")
            self._bar.start()

    def step(self, step: int, *, loss: float, lr: float, tokens_per_second: float) -> None:
        figures = f"loss {loss:.4f}  {format_count(tokens_per_second)} tokens/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, figures=figures)
        elif step % self.log_every == 0 or step == self.total_steps:
            elapsed = time.monotonic() - self._started
            left = elapsed / max(1, step - self._first_step) * (self.total_steps - step)
            self.say(f"step {step}/{self.total_steps}  {figures}  lr {lr:.3g}  {_clock(left)} left")

    def say(self, text: str) -> None:
        """One line that stays, above the bar if there is one. Written as it is: no markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
