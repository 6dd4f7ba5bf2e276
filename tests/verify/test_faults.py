"""`verify` can fail: faults put into a split run, one at a time, are found and the right part is suspected."""

from __future__ import annotations

import re
from typing import Any

import pytest
from faults import FAULTS, verified_with
from pool import WorkerPool
from runs import as_text, run_of

from modelworks.layout import Layout

LARGE = {name for name, fault in FAULTS.items() if 4 in fault.layout.values()}


def found_with(workers: WorkerPool, name: str, **more: Any) -> dict[str, Any]:
    fault = FAULTS[name]
    run = run_of(fault.model, fault.layout, **fault.train)
    layout = Layout.of(run.parallel)
    return workers.run(verified_with, layout, name, as_text(run), n_kv_heads=run.model.n_kv_heads, **more)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none"])
def test_fault_is_found_and_named(workers: WorkerPool, name: str) -> None:
    fault, found = FAULTS[name], found_with(workers, name)
    assert not found["equal"]
    assert any(re.search(fault.suspect, suspect) for suspect in found["suspects"][:2]), found["suspects"]
    assert re.search(fault.parameter, found["worst_parameter"]), found["worst_parameter"]
    place = None if found["first_layer"] is None else (found["first_layer"], found["first_part"])
    assert place == fault.place


def test_the_same_runs_without_a_fault_are_equal(workers: WorkerPool) -> None:
    for model, layout in {
        (fault.model, str(fault.layout)): (fault.model, fault.layout) for fault in FAULTS.values()
    }.values():
        run = run_of(model, layout)
        found, *_ = workers.run(
            verified_with, Layout.of(run.parallel), "none", as_text(run), n_kv_heads=run.model.n_kv_heads
        )
        assert found["equal"], (model, layout, found)
        assert found["suspects"] == []
        assert (found["first_layer"], found["first_part"]) == (None, None)
