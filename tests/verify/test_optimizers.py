"""`verify` with every optimiser: the update of two steps, in float64, split as whole."""

from __future__ import annotations

from typing import Any

import pytest
from pool import WorkerPool
from runs import as_text, run_of, verified

from modelworks.config import OptimizerConfig
from modelworks.config.optimizers import HABITS
from modelworks.layout import Layout

# Of tensors, of experts and of layers, and over ranks that hold slices of the state; each optimiser meets two of them.
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp-zero1": ("gpt2", {"dp_shard": 2, "zero": 1, "tp": 2}),
    "pp-zero3": ("qwen3", {"pp": 2, "dp_shard": 2, "zero": 3}),
    "ep-zero2": ("mixtral", {"dp_shard": 4, "zero": 2, "ep": 2}),
}
CASES = [
    (name, layout)
    for index, name in enumerate(HABITS)
    for layout in [list(LAYOUTS)[(index + turn) % len(LAYOUTS)] for turn in range(2)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_update_split_is_the_update_whole(name: str, layout: str, workers: WorkerPool) -> None:
    model, parallel = LAYOUTS[layout]
    more = {"first_moment": 0.9} if name == "adafactor" else {}
    run = run_of(model, parallel).model_copy(update={"optimizer": OptimizerConfig(name=name, **more)})  # type: ignore[arg-type]
    found, *_ = workers.run(verified, Layout.of(run.parallel), as_text(run), n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found
