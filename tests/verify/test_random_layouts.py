"""A few hypothesis-drawn runs are equal to one process; `python -m benchmarks.verify_random` draws many."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from pool import WorkerPool
from random_runs import small_runs
from runs import as_text, verified

from modelworks.config import RunConfig
from modelworks.layout import Layout


@pytest.mark.slow
@given(run=small_runs(4))
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_drawn_layouts_are_equal(workers: WorkerPool, run: RunConfig) -> None:
    found, *_ = workers.run(verified, Layout.of(run.parallel), as_text(run), n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found
