"""The curves for TensorBoard: an event file, written by whoever calls and not by a thread of its own.

TensorBoard's own writer has a thread that prints a trace when the disk is full or the directory gone, and is silent to
its caller until the next call. Here a failure is an OSError of the call that had it.

The format is TensorBoard's: framed protocol buffers, the first of which gives the version. Files of one directory are
read in the order of their names.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any


class EventFile:
    """A new file in `directory`. purge_step: what earlier files say of this step and later is superseded. Importing
    what writes it takes a second."""

    def __init__(self, directory: Path, *, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._session, self._summary = Event, SessionLog, summary
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records: Any = RecordWriter((directory / name).open("ab"))
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self.purge(purge_step)

    def purge(self, step: int) -> None:
        """What was said so far of this step and later is superseded."""
        self._write(step=step, session_log=self._session(status=self._session.START))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._write(step=step, summary=self._summary.scalar(name, value))

    def add_text(self, name: str, text: str, step: int) -> None:
        self._write(step=step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _write(self, **what: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **what).SerializeToString())
