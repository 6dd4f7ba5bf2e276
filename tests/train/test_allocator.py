"""Freed memory stays with the process: a large tensor that comes again causes no page faults."""

import platform
import subprocess
import sys

import pytest

# In a process of its own: the setting holds for the rest of a process's life.
PROGRAM = """
import resource, sys, torch
from modelworks.train.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 * 2**20 // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# Where the heap begins is random, and it may have to grow a few times before it has a place for the tensor.
print([faults() for _ in range(30)][-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_memory_comes_back_without_page_faults() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True).stdout)
        for mode in ("keep", "default")
    )
    assert kept < 100
    assert given_back > 1000  # else the setting would be pointless on this system
