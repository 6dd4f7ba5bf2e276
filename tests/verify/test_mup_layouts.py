"""Under µP a layout changes nothing either: initial values, rates and multipliers go by names and whole shapes."""

from __future__ import annotations

from typing import Any

import pytest
from pool import WorkerPool
from runs import as_text, run_of, verified

from modelworks.config.mup import query_multiplier, width_growth
from modelworks.layout import Layout

MUP = {"mup_base_width": 256}


@pytest.mark.parametrize(
    ("model", "parallel", "optimizer"),
    [
        ("tied", {"tp": 2, "pp": 2}, "adamw"),
        ("qwen3", {"dp_shard": 2, "zero": 3, "cp": 2}, "muon"),
        ("mixtral", {"dp_shard": 2, "zero": 1, "ep": 2}, "sgd"),
    ],
)
def test_layouts(workers: WorkerPool, model: str, parallel: dict[str, Any], optimizer: str) -> None:
    run = run_of(model, parallel, changes=MUP, optimizer=optimizer)
    assert width_growth(run.model) == 2.0
    assert query_multiplier(run.model) < 1.0
    found, *_ = workers.run(verified, Layout.of(run.parallel), as_text(run), n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found
    assert found["errors"]["gradient"] <= 1e-10
    assert found["errors"]["initial"] == 0.0  # bit for bit
