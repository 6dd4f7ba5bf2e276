"""What the end of a rank means: out of memory, a lost connection, a kill by the kernel. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modelworks.config import format_bytes

# As the backends word it when the process at the other end is gone.
_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|Socket closed", re.IGNORECASE)
_LOST_TYPES = ("DistError", "RankLost")
_NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't|not enough)|out of memory|cudaErrorMemoryAllocation")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that it came from, only says that another rank is gone."""
    return any(
        any(kind.__name__ in _LOST_TYPES for kind in type(cause).__mro__)
        or (isinstance(cause, (RuntimeError, ConnectionError)) and _LOST.search(str(cause)) is not None)
        for cause in _causes(error)
    ) and not is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it came from, says that memory ran out: of a CUDA device, or of the host."""
    return any(_says_no_memory(cause) for cause in _causes(error))


def explain_out_of_memory(
    error: BaseException, rank: int, categories: Mapping[str, int], suggestions: Sequence[str]
) -> str:
    """One text: what ran out, what the memory of that rank held in bytes by category, and what would fit."""
    total = sum(categories.values())
    width = max((len(name) for name in (*categories, "total")), default=0)
    rows = [*sorted(categories.items(), key=lambda item: -item[1]), ("total", total)]
    lines = [f"rank {rank} ran out of memory: {_wanted(error)}"]
    if categories:
        lines += [f"  {name:<{width}}  {format_bytes(size)}" for name, size in rows]
    if suggestions:
        lines += ["what needs less on each rank:", *(f"  {suggestion}" for suggestion in suggestions)]
    return "\n".join(lines)


def kernel_kills() -> int:
    """Processes that the kernel has ended for want of memory, on this machine and in this control group, so far.

    Only a rise between two calls means something. 0 where the kernel does not tell.
    """
    files = [Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"), *_own_control_groups()]
    return sum(_oom_kills(file) for file in files)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _says_no_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None)
    )


def _wanted(error: BaseException) -> str:
    """The line of the error that says it, without what a C++ library puts round it."""
    cause = next((cause for cause in _causes(error) if _says_no_memory(cause)), error)
    lines = [line for line in str(cause).splitlines() if _NO_MEMORY.search(line)]
    line = lines[0] if lines else str(cause).strip() or type(cause).__name__
    return re.sub(r"^.*(?=DefaultCPUAllocator)", "", line).strip()


def _own_control_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if path == "/":
            continue  # the root has no counter of its own, or is read already
        if not controllers:
            files.append(Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control")
    return files


def _oom_kills(file: Path) -> int:
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(word[1]) for word in words if len(word) == 2 and word[0] == "oom_kill")
