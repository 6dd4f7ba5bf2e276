"""The C library's memory, kept by the process between steps.

A training step takes and gives back hundreds of tensors of megabytes. glibc hands each back to the kernel at once
(`mmap`, `munmap`), and the kernel zeroes every page again on the next step: measured at 7% of a step on a CPU. Here
the heap serves all sizes and is never trimmed, so a step finds its memory where the last one left it. The price is
that the process keeps its peak until it ends, which for a training run is what it needs anyway.
"""

from __future__ import annotations

import ctypes
import sys

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_GROWTH = 64 * 2**20  # bytes that the heap grows by at least


def keep_freed_memory() -> bool:
    """Tell the C library to keep freed memory. False where it is not glibc, and then nothing has changed."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _GROWTH))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
