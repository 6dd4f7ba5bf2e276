"""`verify` can fail: faults put into a split run, one at a time, are found and the right part is suspected."""

from __future__ import annotations

import re
from typing import Any

import pytest
from faults import FAULTS, verified_with
from pool import WorkerPool
from runs import as_text, run_of

from modelworks.layout import Layout

LOW = {name: fault.train["precision"] for name, fault in FAULTS.items() if "precision" in fault.train}


def found_with(workers: WorkerPool, name: str, **more: Any) -> dict[str, Any]:
    fault = FAULTS[name]
    run = run_of(fault.model, fault.layout, **fault.train)
    layout = Layout.of(run.parallel)
    return workers.run(verified_with, layout, name, as_text(run), n_kv_heads=run.model.n_kv_heads, **more)[0]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "none" and name not in LOW])
def test_fault_is_found_and_named(workers: WorkerPool, name: str) -> None:
    fault, found = FAULTS[name], found_with(workers, name)
    assert not found["equal"]
    assert any(re.search(fault.suspect, suspect) for suspect in found["suspects"][:2]), found["suspects"]
    assert re.search(fault.parameter, found["worst_parameter"]), found["worst_parameter"]
    place = None if found["first_layer"] is None else (found["first_layer"], found["first_part"])
    assert place == fault.place


@pytest.mark.slow
@pytest.mark.parametrize("name", LOW)
def test_fault_that_only_low_precision_shows(workers: WorkerPool, name: str) -> None:
    assert found_with(workers, name)["equal"]
    found = found_with(workers, name, precision="bf16")
    assert not found["equal"]
    assert re.search(FAULTS[name].suspect, found["suspects"][0]), found


GOOD_IN_LOW_PRECISION: dict[str, tuple[str, dict[str, Any], str]] = {
    "dp": ("llama", {"dp_replicate": 2}, "bf16"),
    "zero3": ("qwen3", {"dp_shard": 2, "zero": 3}, "bf16"),
    "tp": ("gpt2", {"tp": 2}, "bf16"),
    "cp": ("llama", {"cp": 2}, "bf16-autocast"),
    "pp": ("tied", {"pp": 2}, "fp16"),
    "ep": ("mixtral", {"dp_replicate": 2, "ep": 2}, "bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD_IN_LOW_PRECISION)
def test_good_layouts_are_equal_in_low_precision(workers: WorkerPool, name: str) -> None:
    model, layout, precision = GOOD_IN_LOW_PRECISION[name]
    run = run_of(model, layout, precision=precision)
    arguments = (verified_with, Layout.of(run.parallel), "none", as_text(run), 2, "bf16")
    found, *_ = workers.run(*arguments, n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found["errors"]


@pytest.mark.slow
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
