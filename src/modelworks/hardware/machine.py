"""What this machine has, for this process: facts read from the system, without torch and without measuring.

The number that matters is what *this process* may use: a container often sees 64 cores and may run on 2. So cores
are the least of the machine's, the affinity mask's and the control group's quota, and likewise for memory.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import psutil

# What the kernel calls an instruction set, and what we call it.
_FEATURES = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "asimdhp": "fp16",
    "sve": "sve",
    "bf16": "bf16",
    "i8mm": "i8mm",
}


@dataclass(frozen=True)
class Accelerator:
    """GPUs of one kind. memory: bytes of one. capability: CUDA compute capability, e.g. (9, 0)."""

    name: str
    count: int
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class MachineFacts:
    """cores and memory are usable by this process; the physical ones are the machine's. memory in bytes."""

    cpu: str
    cores: int
    cores_reason: str
    physical_cores: int
    memory: int
    memory_reason: str
    physical_memory: int
    features: tuple[str, ...]
    accelerator: Accelerator | None
    python: str
    system: str


def facts(*, accelerator: bool = False) -> MachineFacts:
    """Read the facts. `accelerator=True` also asks torch about GPUs, which imports it (about a second)."""
    cores, cores_reason, all_cores = _cores()
    memory, memory_reason, all_memory = _memory()
    cpu, features = _processor()
    return MachineFacts(
        cpu=cpu,
        cores=cores,
        cores_reason=cores_reason,
        physical_cores=all_cores,
        memory=memory,
        memory_reason=memory_reason,
        physical_memory=all_memory,
        features=features,
        accelerator=_accelerator() if accelerator else None,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def compiler() -> tuple[str | None, str]:
    """(path, reason): the C++ compiler that torch.compile needs on CPU, or None and what is missing.

    Inductor also includes Python's own headers, which many distributions package apart.
    """
    wanted = os.environ.get("CXX")
    names = (wanted,) if wanted else ("g++", "clang++")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        return None, f"no C++ compiler found (looked for {', '.join(names)})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return None, f"{path} is there, but Python's headers are not (Python.h; the package python3-dev)"
    return path, "C++ compiler and Python headers found"


def _cores() -> tuple[int, str, int]:
    everything = os.cpu_count() or 1
    limits = {"all of this machine": everything}
    if hasattr(os, "sched_getaffinity"):
        limits["the affinity mask allows these"] = len(os.sched_getaffinity(0))
    if quota := _cpu_quota():
        # A quota of 1.5 cores still lets two threads run, but they are stopped a quarter of the time.
        limits[f"the control group's CPU quota is {quota:.3g} cores"] = max(1, math.floor(quota))
    reason = min(limits, key=lambda key: limits[key])
    return limits[reason], reason, everything


def _memory() -> tuple[int, str, int]:
    everything = psutil.virtual_memory().total
    limit = _memory_limit()
    if limit is not None and limit < everything:
        return limit, "the control group's memory limit", everything
    return everything, "all of this machine", everything


def _cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Cores that the tightest control group on our path allows, or None without a limit. Versions 1 and 2."""
    quotas = []
    for folder in _control_groups("cpu", root, own):
        if limit := _read(folder / "cpu.max"):  # version 2: "150000 100000" or "max 100000"
            allowed, _, period = limit.partition(" ")
            if allowed != "max":
                quotas.append(int(allowed) / int(period or 100_000))
        elif (quota := _read(folder / "cpu.cfs_quota_us")) and int(quota) > 0:  # version 1: -1 is no limit
            quotas.append(int(quota) / int(_read(folder / "cpu.cfs_period_us") or 100_000))
    return min(quotas, default=None)


def _memory_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the tightest control group on our path allows, or None without a limit."""
    limits = []
    for folder in _control_groups("memory", root, own):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if text and text != "max":
            limits.append(int(text))
    return min(limits, default=None)


def _control_groups(controller: str, root: Path, own: Path) -> list[Path]:
    """Folders of our control group and its ancestors, where limits are set; a child cannot exceed its parent."""
    found: list[Path] = []
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        found += [folder for folder in (group, *group.parents) if folder == top or top in folder.parents]
    # Inside a container the path may be the host's, which we cannot see; the limits are then at the top.
    return found or [root, root / controller]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _processor() -> tuple[str, tuple[str, ...]]:
    """(model name, instruction sets that matter to matrix products)."""
    fields: dict[str, str] = {}
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    features = tuple(ours for theirs, ours in _FEATURES.items() if theirs in flags)
    if sys.platform == "darwin" and platform.machine() == "arm64":
        features = ("neon", "fp16")
    return fields.get("model name") or platform.processor() or platform.machine(), features


def _accelerator() -> Accelerator | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Accelerator(
        name=properties.name,
        count=torch.cuda.device_count(),
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
    )
