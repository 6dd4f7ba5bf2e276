"""What a run writes down: records, TensorBoard events, and figures of speed and memory.

Model FLOPs utilisation (MFU, Chowdhery et al. 2022, 2204.02311) is

    numerator     tokens/s x training FLOPs per token of the model's matrix products, 3 x the forward pass, with
                  attention counted causally over whole rows (recomputation is work, but not the model's)
    denominator   on CPU the matrix-product rate measured on this machine in the precision that computes;
                  on a known GPU the dense peak of its datasheet
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from modelworks.records import Kind, Record, RecordWriter
from modelworks.train.event_file import EventFile


class RunLog:
    """Writes each record to `records.jsonl` and, if it is a figure, to TensorBoard.

    run_dir: None keeps nothing, on ranks whose figures are those of rank 0.
    A disk that is full does not end the run: rows wait in memory and are written once there is room again. The curves
    for TensorBoard end there, since half an event cannot be taken back; `records.jsonl` has them all.
    """

    def __init__(self, run_dir: Path | None, *, first_step: int) -> None:
        self._path: Path | None = None
        if run_dir is None:
            return
        self._path = run_dir / "records.jsonl"
        self._writer: RecordWriter | None = None
        self._waiting: list[Record] = []
        self._warned = False
        # What an interrupted run wrote behind its last checkpoint is marked as superseded.
        purge = first_step + 1 if first_step else None
        self._board: EventFile | None = None
        with self._board_may_fail():
            self._board = EventFile(run_dir / "tensorboard", purge_step=purge)

    def figure(self, step: int, name: str, value: float, unit: str = "", *, kind: Kind = "measured") -> None:
        self.write(Record(step, name, float(value), unit, kind))

    def event(self, step: int, name: str, value: str | dict[str, Any]) -> None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        self.write(Record(step, name, text, kind="event"))

    def went_back(self, step: int) -> None:
        """Steps after this one are made again. Their rows stay in `records.jsonl`, before the event `rollback`."""
        with self._board_may_fail():
            if self._path is not None and self._board is not None:
                self._board.purge(step + 1)

    def write(self, *records: Record) -> None:
        if self._path is None:
            return
        self._waiting += records
        self._write_waiting()
        with self._board_may_fail():
            if self._board is not None:
                for record in records:
                    self._show(record, self._board)
                self._board.flush()

    def close(self) -> None:
        if self._path is None:
            return
        if self._writer:
            self._writer.close()
            if not self._path.exists():
                print(f"warning: {self._path} is gone: what this run recorded in it is lost", file=sys.stderr)
        with self._board_may_fail():
            if self._board is not None:
                self._board.close()

    def _show(self, record: Record, board: EventFile) -> None:
        if record.tags:  # of one rank: a curve of all of them would be none
            return
        if isinstance(record.value, float) and record.kind == "measured":
            board.add_scalar(record.name, record.value, record.step)
        elif record.name == "sample":
            board.add_text("sample", str(record.value), record.step)

    @contextlib.contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            board, self._board = self._board, None
            with contextlib.suppress(OSError):
                if board is not None:
                    board.close()
            print(f"warning: TensorBoard events cannot be written ({error}); they end here", file=sys.stderr)

    def _write_waiting(self) -> None:
        assert self._path is not None
        try:
            if self._writer is None:
                self._writer = RecordWriter(self._path)
            self._writer.write(*self._waiting)
        except OSError as error:
            if not self._warned:
                print(f"warning: {self._path} cannot be written ({error}); rows are kept in memory", file=sys.stderr)
            self._warned = True
        else:
            self._waiting.clear()
            self._warned = False


class MemoryMeter:
    """Bytes of this process. `peak` is since `reset`, where the system can tell (Linux), else since it started."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._process = psutil.Process()
        self.at_reset = 0

    def reset(self) -> None:
        """Start measuring peaks from here: what building the data took is not training's memory."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        # Not Linux, or not allowed: the peak is then the whole process's.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.at_reset = self.resident()

    def resident(self) -> int:
        return int(self._process.memory_info().rss)

    def peak(self) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def figures(self) -> dict[str, int]:
        """Record name -> bytes."""
        values = {"memory/resident": self.resident(), "memory/peak": self.peak()}
        if self.device.type == "cuda":
            values["memory/cuda_allocated"] = torch.cuda.memory_allocated(self.device)
            values["memory/cuda_peak"] = torch.cuda.max_memory_allocated(self.device)
        return values
