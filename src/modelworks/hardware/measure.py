"""Measuring this machine: how fast it multiplies matrices and moves memory.

A CPU's datasheet says little about what one process can reach, so the denominator of utilisation on CPU is the
best *sustained* rate of a large matrix product, measured here. Each figure is the median of repeated runs after a
warm-up, and each measurement has a time limit: fp16 products are thousands of times slower than fp32 on some
CPUs. Results are kept on disk under a fingerprint of hardware, torch version and threads.

A measurement that other processes disturbed is too low, which would make every later utilisation too high. So what
others used of our cores meanwhile is measured too, and a disturbed result is returned but not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch.nn.functional import linear

from modelworks import __version__
from modelworks.hardware.machine import Accelerator, MachineFacts, facts

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CACHE = Path("~/.cache/modelworks")
# Share of our cores that others may use before a measurement counts as disturbed.
DISTURBANCE = 0.1

# (rows, out features, in features): square, and long as a training batch is. Small machines stop at the first.
_SHAPES = [(512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 1024), (4096, 4096, 4096)]
_GPU_SHAPES = [(8192, 8192, 8192), (16384, 8192, 8192)]


@dataclass(frozen=True)
class Machine:
    """Facts and measured rates of one machine.

    device: what was measured, `cpu` or `cuda`. gemm: FLOP/s by dtype. memory_bandwidth: bytes/s, read and written
    bytes counted once each (as STREAM does; a cache line that is fetched only to be overwritten is not counted).
    """

    facts: MachineFacts
    device: str
    torch: str
    threads: int
    gemm: dict[str, float]
    memory_bandwidth: float
    measured_at: str
    disturbance: float  # share of this process's cores that others used meanwhile

    @property
    def disturbed(self) -> bool:
        """Whether the rates are too low because the machine was busy."""
        return self.disturbance > DISTURBANCE

    @classmethod
    def read(cls, values: dict[str, Any]) -> Machine:
        """From what `asdict` made of one. Raises KeyError or TypeError for what is none."""
        stored = dict(values["facts"])
        accelerator = stored.pop("accelerator")
        if accelerator:
            accelerator = Accelerator(**{**accelerator, "capability": tuple(accelerator["capability"])})
        stored["features"] = tuple(stored["features"])
        return cls(**{**values, "facts": MachineFacts(accelerator=accelerator, **stored)})


def measure_machine(
    *,
    device: str = "cpu",
    quick: bool = False,
    refresh: bool = False,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Machine:
    """Rates of this machine, from the cache if it has them, else measured (about 3 s; `quick` about 1 s).

    A quick or disturbed measurement is not kept. `cache`: a directory, default ~/.cache/modelworks. `progress` is
    told what is being measured.
    """
    found = facts(accelerator=True)
    kept = (cache or CACHE.expanduser()) / f"machine-{_key(found, device)}.json"
    if not refresh and (known := _load(kept)):
        return replace(known, facts=found)
    tell = progress or (lambda _: None)
    seconds = 0.25 if quick else 0.8
    others = _others_cores()
    gemm: dict[str, float] = {}
    for name in DTYPES:
        tell(f"matrix products in {name}")
        # fp16 is measured to know whether it is usable at all, which takes no precision.
        gemm[name] = _best_gemm(name, device, seconds if device != "cpu" or name != "fp16" else seconds / 2)
    tell("memory bandwidth")
    bandwidth = _bandwidth(device, found.memory)
    machine = Machine(
        facts=found,
        device=device,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        gemm=gemm,
        memory_bandwidth=bandwidth,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        # Others who fit beside us do not disturb us.
        disturbance=max(0.0, others() - (found.physical_cores - found.cores)) / found.cores,
    )
    if not quick and not machine.disturbed:
        _store(kept, machine)
    return machine


def gemm_rate(m: int, n: int, k: int, dtype: Precision, *, device: str = "cpu", seconds: float = 0.3) -> float:
    """FLOP/s of (m, k) times (n, k) transposed, as a linear layer does it: the median of at most `seconds`.

    The sum of 2mnk over a model's own products, divided by the sum of their times at these rates, is the
    time-weighted rate that the model's shapes allow.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(m, k, generator=generator).to(device, DTYPES[dtype])
    weight = torch.randn(n, k, generator=generator).to(device, DTYPES[dtype])
    with torch.inference_mode():
        return 2 * m * n * k / _median_time(lambda: linear(inputs, weight), device, seconds)


def fingerprint(machine: Machine | None = None) -> dict[str, Any]:
    """What a measured figure depends on, for the JSON of a benchmark's results."""
    found = machine.facts if machine else facts(accelerator=True)
    values: dict[str, Any] = {
        "modelworks": __version__,
        "cpu": found.cpu,
        "cores": found.cores,
        "memory_bytes": found.memory,
        "features": list(found.features),
        "accelerator": asdict(found.accelerator) if found.accelerator else None,
        "system": found.system,
        "python": found.python,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if machine:
        values["measured"] = {"gemm_flops": machine.gemm, "memory_bandwidth": machine.memory_bandwidth}
    return values


def _best_gemm(dtype: Precision, device: str, seconds: float) -> float:
    """The best median rate over growing shapes. A shape is tried only if the rate so far says that it fits."""
    deadline = time.perf_counter() + seconds
    best = gemm_rate(256, 256, 256, dtype, device=device, seconds=seconds / 8)
    shapes = _SHAPES if device == "cpu" else _SHAPES + _GPU_SHAPES
    for m, n, k in shapes:
        left = deadline - time.perf_counter()
        expected = 2 * m * n * k / best
        if 3 * expected > left:
            break
        best = max(best, gemm_rate(m, n, k, dtype, device=device, seconds=min(left, max(seconds / 4, 4 * expected))))
    return best


def _bandwidth(device: str, memory: int) -> float:
    """Bytes/s of the better of a copy and a triad over arrays far larger than any cache."""
    elements = min(64 * 1024**2, memory // 64)  # three arrays of 256 MiB
    a, b, c = (torch.full((elements,), float(i), device=device) for i in range(3))
    with torch.inference_mode():
        copy = 2 * a.nbytes / _median_time(lambda: a.copy_(b), device, 0.2)
        triad = 3 * a.nbytes / _median_time(lambda: torch.add(b, c, alpha=3.0, out=a), device, 0.2)
    return max(copy, triad)


def _median_time(work: Callable[[], object], device: str, seconds: float) -> float:
    """Seconds of one call: the median of those that fit in `seconds`, at least one, after one that warms up."""

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    deadline = time.perf_counter() + seconds
    work()
    synchronize()
    times: list[float] = []
    while not times or (time.perf_counter() < deadline and len(times) < 200):
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _others_cores() -> Callable[[], float]:
    """Starts a clock; the function returned says how many cores others kept busy since, on average."""

    def busy() -> float:
        times = psutil.cpu_times()
        kinds = ("user", "nice", "system", "irq", "softirq", "steal")  # which of them exist depends on the system
        return float(sum(getattr(times, kind, 0.0) for kind in kinds))

    def ours() -> float:
        times = psutil.Process().cpu_times()
        return float(times.user + times.system)

    start, start_others = time.perf_counter(), busy() - ours()
    return lambda: max(0.0, (busy() - ours() - start_others) / (time.perf_counter() - start))


def _key(found: MachineFacts, device: str) -> str:
    depends_on = (found.cpu, found.cores, found.features, found.accelerator, device)
    text = repr((depends_on, torch.__version__, torch.get_num_threads()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load(path: Path) -> Machine | None:
    """The machine that was kept, or None: an unreadable or older file is only a reason to measure again."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Machine.read(values) if set(values["gemm"]) == set(DTYPES) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _store(path: Path, machine: Machine) -> None:
    # A read-only home directory costs a measurement each time and nothing else, so it is no error.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{time.time_ns()}")
        unfinished.write_text(json.dumps(asdict(machine), indent=1), encoding="utf-8")
        unfinished.replace(path)
