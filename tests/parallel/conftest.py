"""The session's pool of workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.stop()
