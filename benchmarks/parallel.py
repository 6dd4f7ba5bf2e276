"""What a split costs on two cores: step time of every layout, our overhead over raw torch, bubbles of pipelines.

    python -m benchmarks.parallel                # measure on an idle machine
    python -m benchmarks.parallel --quick        # that it runs, in less than a minute; nothing is written

Layouts: the same global batch and model by one process with one and with two threads, and by two processes with one
thread each under every axis. All take turns, a step each, and medians count. A step is what `modelworks train` does:
gradients, reductions, clipping, AdamW. What each rank waited for others is measured where it waits; the rest of the
difference to half of a one-thread step is work that the split adds (smaller products, packing, copies).

Overhead: the same gradients by our code and by torch's own (DDP, FSDP2, its 1F1B schedule), in turns in one run.

Bubbles: see `_bubbles.py`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks._bubbles import SCHEDULES, as_timeline, compared, formula_virtual, waiting_bubbles
from benchmarks._overhead import overhead_pairs
from benchmarks._ranks import WaitingLabels, run_ranks
from benchmarks._results import write_results
from modelworks.config import RunConfig, count_parameters
from modelworks.data import Batch
from modelworks.layout import Layout
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh, build_mesh, split_model
from modelworks.train import PRECISIONS, apply_gradients, compute_gradients, data_rows, keep_freed_memory
from modelworks.train.split_records import measured_costs


@dataclass(frozen=True)
class Size:
    """Of the model, of a step and of the benchmark."""

    shape: dict[str, int]
    seq_len: int
    rows: int
    micro_batch: int
    pipeline_micro_batch: int
    rounds: int
    wait: float  # seconds of a waiting stage
    bubble_rounds: int
    ranks: tuple[int, ...]  # of pipelines whose stages wait
    fillings: tuple[int, ...]  # their micro-batches, in multiples of the ranks


FULL = Size(
    {"n_layers": 8, "d_model": 256, "n_heads": 8, "n_kv_heads": 4, "d_ff": 704, "vocab_size": 4096},
    seq_len=256,
    rows=16,
    micro_batch=8,
    pipeline_micro_batch=2,
    rounds=7,
    wait=0.02,
    bubble_rounds=3,
    ranks=(4, 8),
    fillings=(2, 4),
)
QUICK = Size(
    {"n_layers": 4, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "vocab_size": 256},
    seq_len=32,
    rows=8,
    micro_batch=4,
    pipeline_micro_batch=2,
    rounds=1,
    wait=0.005,
    bubble_rounds=1,
    ranks=(4,),
    fillings=(2,),
)
EXPERTS = {"family": "mixtral", "n_experts": 4, "experts_per_token": 2}
# name -> (parallel section, changes of the model)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp2": ({"dp_replicate": 2}, {}),
    "zero1": ({"dp_shard": 2, "zero": 1}, {}),
    "zero2": ({"dp_shard": 2, "zero": 2}, {}),
    "zero3": ({"dp_shard": 2, "zero": 3}, {}),
    "tp2": ({"tp": 2, "sequence_parallel": False}, {}),
    "tp2+SP": ({"tp": 2}, {}),
    "cp2 ring": ({"cp": 2}, {}),
    "cp2 ulysses": ({"cp": 2, "cp_mode": "ulysses"}, {}),
    **{
        f"pp2 {schedule}": ({"pp": 2, "pp_schedule": schedule, "pp_virtual": formula_virtual(schedule)}, {})
        for schedule in SCHEDULES
    },
    "ep2": ({"dp_replicate": 2, "ep": 2}, EXPERTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny size, to see that it runs; writes nothing")
    size = QUICK if (quick := parser.parse_args().quick) else FULL
    two = run_ranks(2, measure_two, size)[0]
    bubbles = two.pop("bubbles")
    for ranks in size.ranks:
        print(f"pipelines of {ranks} waiting ranks", flush=True)
        micro_batches = [ranks * filling for filling in size.fillings]
        bubbles += run_ranks(ranks, waiting_bubbles, micro_batches, size.wait, size.bubble_rounds)[0]
    results = {"size": size.__dict__, **two, "bubbles": bubbles}
    report(results)
    if not quick:
        print(write_results("parallel", results))


def measure_two(rank: int, size: Size) -> dict[str, Any]:
    """On each of two ranks: all layouts in turns, then the pairs with torch's own, then real bubbles."""
    keep_freed_memory()
    contenders = [
        _Contender("one process, 2 threads", {}, {}, size, threads=2),
        _Contender("one process, 1 thread", {}, {}, size),
        _Contender("experts, one process, 2 threads", {}, EXPERTS, size, threads=2),
        _Contender("experts, one process, 1 thread", {}, EXPERTS, size),
        *(_Contender(name, *keys, size) for name, keys in LAYOUTS.items()),
    ]
    world = build_mesh(Layout(dp_replicate=2), torch.device("cpu")).group("world")
    for turn in range(-1, size.rounds):  # the first warms up
        for contender in contenders:
            world.barrier()
            if contender.takes_part(rank):
                contender.step(rank, record=turn >= 0)
        if rank == 0:
            print(f"layouts: round {turn + 1} of {size.rounds}", flush=True)
    rows = [row for contender in contenders if (row := contender.row(world, rank)) is not None]
    bubbles = [contender.bubble(world, size.bubble_rounds) for contender in contenders if contender.schedule]
    parameters = count_parameters(contenders[0].config.model).total
    return {
        "parameters": parameters,
        "layouts": rows,
        "overhead": overhead_pairs(rank, size),
        "bubbles": bubbles,
    }


@dataclass
class _Contender:
    """One layout: its model, made on first use, and what its steps took."""

    name: str
    parallel: dict[str, Any]
    changes: dict[str, Any]
    size: Size
    threads: int = 1
    seconds: list[float] = field(default_factory=list)
    waited: list[dict[str, float]] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    _step: Callable[[], None] | None = None

    @property
    def config(self) -> RunConfig:
        micro_batch = self.size.pipeline_micro_batch if "pp" in self.parallel else self.size.micro_batch
        return run_config(self.size, self.parallel, micro_batch, self.changes)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.config.parallel)

    @property
    def schedule(self) -> str | None:
        return self.parallel.get("pp_schedule")

    def takes_part(self, rank: int) -> bool:
        return rank < self.layout.world_size

    def step(self, rank: int, *, record: bool) -> None:
        if self._step is None:
            self._build()
        assert self._step is not None
        torch.set_num_threads(self.threads)
        self.mesh.traffic.take()
        self.labels.take()
        started = time.perf_counter()
        self._step()
        took = time.perf_counter() - started
        torch.set_num_threads(1)
        if record:
            self.seconds.append(took)
            self.waited.append(self.labels.take())
            self.sent = {f"{axis} {kind}": volume.bytes for axis, kind, volume in self.mesh.traffic}

    def row(self, world: Any, rank: int) -> dict[str, Any] | None:
        """Medians; of several ranks the slowest one's time, and the mean of what they waited. None but on rank 0."""
        own = (self.seconds, self.waited) if self.takes_part(rank) else None
        of_ranks = [each for each in world.gather_objects(own) if each is not None]
        steps = [max(taken) for taken in zip(*(seconds for seconds, _ in of_ranks), strict=True)]
        axes = {axis for _, waited in of_ranks for step in waited for axis in step}
        waiting = {
            axis: statistics.mean(statistics.median(step.get(axis, 0.0) for step in waited) for _, waited in of_ranks)
            for axis in sorted(axes)
        }
        if rank:
            return None
        return {
            "name": self.name,
            "ranks": len(of_ranks),
            "seconds": statistics.median(steps),
            "each": steps,
            "waiting": waiting,
            "sent_bytes": self.sent,
        }

    def bubble(self, world: Any, rounds: int) -> dict[str, Any]:
        """Bubble fractions of further steps with their timelines, on real work; every rank must call it."""
        assert self.schedule is not None
        assert self._step is not None
        m = self.size.rows // self.size.pipeline_micro_batch
        executor = self.model.executor(m)
        executor.record = True
        timelines = []
        for _ in range(rounds):
            self._step()
            timelines.append(as_timeline(world.gather_objects(executor.timeline)))
        executor.record = False
        costs = measured_costs(timelines[-1], len(executor.ranks))
        fractions = [timeline.bubble_fraction for timeline in timelines]
        return {**compared(self.schedule, self.layout.pp, m, fractions, costs), "stages": "real"}

    def _build(self) -> None:
        config, precision = self.config, PRECISIONS["fp32"]
        self.labels = WaitingLabels()
        self.mesh: Mesh = build_mesh(
            self.layout, torch.device("cpu"), n_kv_heads=config.model.n_kv_heads, labels=self.labels
        )
        self.model = model = split_model(
            config,
            self.mesh,
            dtype=torch.float32,
        )
        model.train()
        optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
        rows = tokens(self.size).rows(data_rows(model, config.train.global_batch))
        micro_batch = int(config.train.micro_batch)

        def step() -> None:
            gradients = compute_gradients(model, rows, config, step=0, micro_batch=micro_batch, precision=precision)
            apply_gradients(model, optimizer, gradients, config, lr=1e-4)

        self._step = step


def run_config(
    size: Size, parallel: dict[str, Any], micro_batch: int, changes: dict[str, Any] | None = None
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**size.shape, "max_seq_len": size.seq_len, **(changes or {})},
            "data": {"seq_len": size.seq_len, "packing": "across", "tokenizer": "tokenizer.json"},
            "train": {"global_batch": size.rows, "micro_batch": micro_batch, "precision": "fp32"},
            "parallel": parallel,
        }
    )


def tokens(size: Size) -> Batch:
    """The global batch, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, size.shape["vocab_size"], (size.rows, size.seq_len + 1), generator=generator)
    positions = torch.arange(size.seq_len).repeat(size.rows, 1)
    ids, weights = torch.zeros(size.rows, size.seq_len, dtype=torch.int32), torch.ones(size.rows, size.seq_len)
    return Batch(rows[:, :-1].contiguous(), positions, rows[:, 1:].contiguous(), weights, ids)


def report(results: dict[str, Any]) -> None:
    seconds = {row["name"]: row["seconds"] for row in results["layouts"]}
    print(f"\n{results['parameters']:,} parameters\n{'layout':32} ms  of one process  waiting  added work")
    for row in results["layouts"]:
        experts = "experts, " if row["name"].startswith(("experts", "ep")) else ""
        whole = seconds[f"{experts}one process, 2 threads"]
        waiting = sum(row["waiting"].values())
        ideal = seconds[f"{experts}one process, 1 thread"] / 2
        row["relative"], row["waiting_total"] = row["seconds"] / whole, waiting
        row["added_work"] = row["seconds"] - waiting - ideal if row["ranks"] > 1 else None
        added = "" if row["added_work"] is None else f"{1e3 * row['added_work']:8.0f}"
        print(f"{row['name']:32} {1e3 * row['seconds']:5.0f} {row['relative']:10.2f} {1e3 * waiting:12.0f} {added}")
    print("\noverhead over torch's own")
    for row in results["overhead"]:
        print(
            f"{row['what']:32} ours {1e3 * row['ours']:.1f} ms, torch {1e3 * row['torch']:.1f} ms: {row['ratio']:.3f}"
        )
    print(f"\n{'schedule':16} p   m  stages    measured simulated formula (p-1)/(m+p-1)")
    for row in results["bubbles"]:
        formula = "" if row["formula"] is None else f"{row['formula']:.3f}"
        print(
            f"{row['schedule']:16} {row['pp']} {row['micro_batches']:3}  {row['stages']:8} {row['measured']:9.3f} "
            f"{row['simulated']:9.3f} {formula:>7} {row['simple']:9.3f}"
        )


if __name__ == "__main__":
    main()
