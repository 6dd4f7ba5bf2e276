"""`--profile`: where a step's time goes, from torch's profiler.

Steps 3 to 5 of this process are traced: the first ones also allocate and compile. Written to the run's `profile/`:
`trace.json` (for Perfetto or chrome://tracing) and `operations.txt`, a table of time by operation.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from modelworks.train.derivation import Derived
from modelworks.train.loop import StepDone
from modelworks.train.state import TrainState

_WAIT, _WARM, _ACTIVE = 1, 1, 3
_ROWS = 30


class Profile:
    """A context and a hook. run_dir: None profiles nothing. table: what was written to operations.txt."""

    def __init__(self, run_dir: Path | None, derived: Derived) -> None:
        self.table = ""
        self._directory = None if run_dir is None else run_dir / "profile"
        self._key = "self_cuda_time_total" if derived.device.type == "cuda" else "self_cpu_time_total"
        self._activities = [ProfilerActivity.CPU]
        if derived.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._stack = ExitStack()
        self._profiler: Any = None

    def __enter__(self) -> Profile:
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._profiler = self._stack.enter_context(
                profile(
                    activities=self._activities,
                    schedule=schedule(wait=_WAIT, warmup=_WARM, active=_ACTIVE, repeat=1),
                    on_trace_ready=self._write,
                )
            )
        return self

    def after_step(self, state: TrainState, done: StepDone) -> None:
        if self._profiler is not None:
            self._profiler.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _write(self, profiler: Any) -> None:
        assert self._directory is not None
        self.table = profiler.key_averages().table(sort_by=self._key, row_limit=_ROWS, max_name_column_width=60)
        (self._directory / "operations.txt").write_text(self.table + "\n", encoding="utf-8")
        profiler.export_chrome_trace(str(self._directory / "trace.json"))
