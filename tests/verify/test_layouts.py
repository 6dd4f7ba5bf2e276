"""The equivalence matrix: every axis alone, all pairs that combine, triples and quadruples, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from pool import WorkerPool
from runs import as_text, run_of, verified

from modelworks.layout import Layout

AXES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp": ("llama", {"dp_replicate": 2}),
    "zero1": ("tied", {"dp_shard": 2, "zero": 1}),
    "zero2": ("gpt2", {"dp_shard": 2, "zero": 2, "accumulate_reduce": "every"}),
    "zero3": ("qwen3", {"dp_shard": 2, "zero": 3}),
    "zero3-on-host": ("tied", {"dp_shard": 2, "zero": 3, "offload_params": True, "offload": "cpu"}),
    "tp": ("gpt2", {"tp": 2}),
    "tp-plain": ("qwen3", {"tp": 2, "sequence_parallel": False}),
    "tp-copies": ("tied", {"tp": 4}),
    "cp": ("llama", {"cp": 2}),
    "ulysses": ("tied", {"cp": 2, "cp_mode": "ulysses"}),
    "pp": ("tied", {"pp": 2}),
    "ep": ("mixtral", {"dp_replicate": 2, "ep": 2}),
}


def check(workers: WorkerPool, model: str, parallel: dict[str, Any], **train: Any) -> None:
    run = run_of(model, parallel, **train)
    found, *_ = workers.run(verified, Layout.of(run.parallel), as_text(run), n_kv_heads=run.model.n_kv_heads)
    assert found["equal"], found
    assert found["errors"]["gradient"] <= 1e-10
    assert found["errors"]["loss"] <= 1e-12
    assert found["errors"]["initial"] == 0.0  # bit for bit


@pytest.mark.parametrize("name", AXES)
def test_one_axis(workers: WorkerPool, name: str) -> None:
    check(workers, *AXES[name])


PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp-tp": ("llama", {"dp_replicate": 2, "tp": 2}),
    "hybrid": ("tied", {"dp_replicate": 2, "dp_shard": 2, "zero": 2}),
    "hybrid-zero3": ("gpt2", {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    "zero1-tp": ("gpt2", {"dp_shard": 2, "zero": 1, "tp": 2}),
    "zero3-tp": ("tied", {"dp_shard": 2, "zero": 3, "tp": 2}),
    "zero2-cp": ("qwen3", {"dp_shard": 2, "zero": 2, "cp": 2}),
    "zero3-cp": ("llama", {"dp_shard": 2, "zero": 3, "cp": 2, "cp_mode": "ulysses"}),
    "tp-cp": ("qwen3", {"tp": 2, "cp": 2}),
    "pp-dp": ("tied", {"pp": 2, "dp_replicate": 2, "pp_schedule": "gpipe"}),
    "pp-tp": ("gpt2", {"pp": 2, "tp": 2}),
    "pp-cp": ("qwen3", {"pp": 2, "cp": 2}),
    "pp-zero1": ("llama", {"pp": 2, "dp_shard": 2, "zero": 1, "pp_schedule": "zb-h1"}),
    "pp-zero2": ("tied", {"pp": 2, "dp_shard": 2, "zero": 2, "accumulate_reduce": "every", "pp_schedule": "zbv"}),
    "pp-zero3": ("qwen3", {"pp": 2, "dp_shard": 2, "zero": 3, "pp_gather": "micro-batch"}),
    "ep-zero1": ("mixtral", {"dp_shard": 4, "zero": 1, "ep": 2}),
    "ep-zero3": ("mixtral", {"dp_shard": 4, "zero": 3, "ep": 2}),
    "ep-tp": ("mixtral", {"dp_replicate": 2, "tp": 2, "ep": 2}),
    "ep-cp": ("mixtral", {"dp_replicate": 2, "cp": 2, "ep": 4}),
    "ep-pp": ("mixtral", {"dp_replicate": 2, "pp": 2, "ep": 2, "pp_schedule": "interleaved", "pp_virtual": 2}),
}

TRIPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp-pp-dp": ("tied", {"tp": 2, "pp": 2, "dp_replicate": 2}),
    "pp-cp-zero3": ("llama", {"pp": 2, "cp": 2, "dp_shard": 2, "zero": 3}),
    "ep-tp-dp": ("mixtral", {"tp": 2, "dp_replicate": 2, "dp_shard": 2, "zero": 2, "ep": 2}),
    "pp4-interleaved-tied": ("tied", {"pp": 4, "pp_schedule": "interleaved", "pp_virtual": 2}),
    "pp4-dualpipev": ("gpt2", {"pp": 4, "pp_schedule": "dualpipev", "dp_replicate": 2}),
    "tp-cp-zero3": ("qwen3", {"tp": 2, "cp": 2, "dp_shard": 2, "zero": 3}),
    "tp-cp-pp": ("qwen3", {"tp": 2, "cp": 2, "pp": 2, "pp_schedule": "zb-h1"}),
    "tp-pp-zero1": (
        "gpt2",
        {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 1, "pp_schedule": "interleaved-zb", "pp_virtual": 2},
    ),
    "ep-pp-zero2": ("mixtral", {"pp": 2, "dp_shard": 4, "zero": 2, "ep": 4, "pp_schedule": "zbv"}),
    "ep-cp-tp-zero3": ("mixtral", {"tp": 2, "cp": 2, "dp_shard": 2, "zero": 3, "ep": 2}),
    "ep-pp-tp-dp": ("mixtral", {"pp": 2, "tp": 2, "dp_replicate": 2, "ep": 2}),
    "hybrid-tp": ("tied", {"tp": 2, "dp_replicate": 2, "dp_shard": 2, "zero": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_two_axes(workers: WorkerPool, name: str) -> None:
    check(workers, *PAIRS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIPLES)
def test_three_and_more_axes(workers: WorkerPool, name: str) -> None:
    check(workers, *TRIPLES[name])
