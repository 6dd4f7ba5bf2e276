"""What a split run records of its split: on every rank, measured equals predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelworks.config import dump_yaml, parse_run_config
from modelworks.hardware import Machine
from modelworks.layout import Layout
from modelworks.parallel import Mesh
from modelworks.records import Record, read_records
from modelworks.report import write_report
from modelworks.train import train

COMMON = ["model.n_layers=4", "model.n_heads=4", "train.micro_batch=1", "train.duration=5 steps"]
MEMORY = ("parameters", "gradients", "gradients_accumulating", "optimizer")


def job(mesh: Mesh, config: str, run_dir: str, machine: Machine) -> Any:
    """On a worker: what the run left in `Result.parallel`."""
    return train(parse_run_config(config, "test"), Path(run_dir), machine=machine, mesh=mesh).parallel


@pytest.fixture
def trained(workers: Any, tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> Callable[..., list[Any]]:
    """trained("key=value", …): a run on the ranks of its layout in `tmp_path/run`."""

    def run(*overrides: str) -> list[Any]:
        config = tiny_config(*COMMON, *overrides)
        arguments = (dump_yaml(config), str(tmp_path / "run"), tiny_machine)
        results: list[Any] = workers.run(
            job, Layout.of(config.parallel), *arguments, n_kv_heads=config.model.n_kv_heads
        )
        return results

    return run


def by_tags(run_dir: Path, name: str, kind: str) -> dict[tuple[Any, ...], float]:
    """(step, *tags) -> value."""
    return {
        (record.step, *record.tags.values()): float(record.value)
        for record in read_records(run_dir / "records.jsonl")
        if record.name == name and record.kind == kind
    }


def assert_measured_as_predicted(run_dir: Path, names: list[str]) -> None:
    for name in names:
        measured = by_tags(run_dir, name, "measured")
        assert measured, name
        assert measured == pytest.approx(by_tags(run_dir, name, "predicted"), rel=1e-12), name


@pytest.mark.parametrize("how", ["last", "every"])
@pytest.mark.parametrize(
    "zero", [1, 3, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_memory_and_traffic_of_data_parallelism(
    trained: Callable[..., list[Any]], tmp_path: Path, zero: int, how: str
) -> None:
    axis = "dp_shard" if zero else "dp_replicate"
    overrides = [f"parallel.{axis}=2", f"parallel.zero={zero}", f"parallel.accumulate_reduce={how}"]
    parallel, _ = trained(*overrides)
    memory = [name for name in MEMORY if how == "last" or name != "gradients_accumulating"]
    assert_measured_as_predicted(
        tmp_path / "run", ["collectives/calls", "collectives/bytes", *(f"rank_memory/{name}" for name in memory)]
    )
    steps = {step for step, *_ in by_tags(tmp_path / "run", "rank_memory/parameters", "measured")}
    assert steps == {3, 4, 5}  # the third, the one with an evaluation, the last
    assert parallel["step"] == 5
    assert {row["rank"] for row in parallel["collectives"]} == {0, 1}
    for row in parallel["collectives"]:
        assert (row["calls"], row["bytes"]) == (row["predicted_calls"], pytest.approx(row["predicted_bytes"]))
    for row in parallel["memory"]:
        assert all(row[name] == row[f"predicted_{name}"] for name in memory)
    assert parallel["bubble"] is None


@pytest.mark.parametrize(
    ("schedule", "virtual", "held"), [("1f1b", 1, [2, 1]), pytest.param("zbv", 2, [4, 4], marks=pytest.mark.slow)]
)
def test_a_pipeline_shows_its_timeline(
    trained: Callable[..., list[Any]], tmp_path: Path, schedule: str, virtual: int, held: list[int]
) -> None:
    overrides = ["parallel.pp=2", f"parallel.pp_schedule={schedule}", f"parallel.pp_virtual={virtual}"]
    found, other = trained(*overrides)
    assert_measured_as_predicted(tmp_path / "run", ["collectives/calls", "collectives/bytes", "pipeline/held"])
    assert [row["micro_batches"] for row in found["held"]] == held
    assert other is None
    bubble = found["bubble"]
    assert bubble["simple"] == pytest.approx(1 / 5)
    assert 0.0 < bubble["measured"] < 1.0
    assert 0.0 < bubble["simulated"] < 1.0
    records = list(read_records(tmp_path / "run" / "records.jsonl"))
    assert {r.tags["formula"] for r in records if r.name == "pipeline/bubble" and r.kind == "predicted"} >= {"simple"}
    [event] = [record for record in records if record.name == "pipeline/timeline"]
    assert event.step == 3
    ranks = json.loads(str(event.value))["ranks"]
    for rank in ranks:
        assert sum(kind == "forward" for kind, *_ in rank) == 4 * virtual
        assert all(duration >= 0 and start >= 0 for *_, start, duration in rank)
    trace = json.loads((tmp_path / "run" / "profile" / "pipeline-trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"]} >= {"forward 0", "forward 3"}
    assert (first_forward(ranks[1], 1) - first_forward(ranks[0], 0)) > 0  # one clock for all
    assert "How the run was split" in write_report(tmp_path / "run").read_text()


def first_forward(rank: list[list[Any]], stage: int) -> int:
    return min(start for kind, of, _, start, _ in rank if kind == "forward" and of == stage)


def test_one_process_records_nothing_of_a_split(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    result = train(tiny_config("train.duration=3 steps"), tmp_path / "run", machine=tiny_machine)
    records: list[Record] = list(read_records(tmp_path / "run" / "records.jsonl"))
    assert not any(record.tags for record in records)
    assert result.parallel is None
