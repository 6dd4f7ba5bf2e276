"""How busy a rank's device was.

health/device_utilization   of a GPU: the share of NVML's last sampling period (up to a second) in which a kernel
                            ran, asked once a measured step; not how well kernels used it, which MFU tells
health/cpu_share            on a CPU: CPU seconds of the process over wall seconds times its threads, since the last
                            row, evaluation and saving included
"""

from __future__ import annotations

import math
import time

import psutil
import torch


class DeviceMeter:
    """One rank's. name: of the record. `share` is NaN where the device does not tell; `reason` then says why."""

    def __init__(self, device: torch.device) -> None:
        self.name = "health/device_utilization" if device.type == "cuda" else "health/cpu_share"
        self.reason: str | None = None
        self._device = device
        self._process = psutil.Process()
        self._before = self._now()

    def share(self) -> float:
        if self._device.type == "cuda":
            return self._utilization()
        before, self._before = self._before, self._now()
        seconds, cpu_seconds = (now - then for now, then in zip(self._before, before, strict=True))
        return cpu_seconds / seconds / torch.get_num_threads() if seconds > 0 else math.nan

    def _utilization(self) -> float:
        try:
            return torch.cuda.utilization(self._device) / 100
        except (ImportError, RuntimeError, OSError) as error:  # no nvidia-ml-py, no driver library, not allowed
            self.reason = f"{error}".strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return math.nan

    def _now(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return time.perf_counter(), times.user + times.system
