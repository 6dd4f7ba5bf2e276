"""What rank 0 does for all ranks while they wait, however long it takes.

A rank that waits in a collective longer than `parallel.timeout` is called hung. Building a data set or asking
questions may take longer than that and is no hang, so all ranks meet every second until rank 0 has done it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from modelworks.config import UserError
from modelworks.parallel import Mesh, RankLost, agree

T = TypeVar("T")

_PERIOD = 1.0  # seconds between meetings


def on_rank_0(mesh: Mesh, work: Callable[[], T]) -> T:
    """What `work` returned on rank 0, on every rank; all must call it. Results are to be small.

    A `UserError` is raised on all ranks alike, another error on rank 0, and `RankLost` on the others.
    """
    if mesh.layout.world_size == 1:
        return work()
    task = _Task(work) if mesh.is_main else None
    while agree(task is not None and task.is_working(), mesh):
        pass
    error = task.error if task else None
    words = None if error is None else (isinstance(error, UserError), str(error))
    told = mesh.shared(words)
    if error is not None:
        raise error
    if told is not None:
        is_mistake, text = told
        raise UserError(text) if is_mistake else RankLost(f"rank 0 failed: {text}")
    result: T = mesh.shared(task.result if task else None)
    return result


class _Task(Generic[T]):
    """Work in a thread of its own. A daemon: Ctrl-C ends the process in the middle of it."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.result: T | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="rank 0's own work", daemon=True)
        self._thread.start()

    def is_working(self) -> bool:
        self._thread.join(_PERIOD)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
