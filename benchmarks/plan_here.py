"""What the planner says of runs on this machine, beside what the real trainer measures.

    modelworks plan --calibrate                # first, on an idle machine: the predictions are of these rates
    python -m benchmarks.plan_here             # on an idle machine too; --only NAME for some of the runs
    python -m benchmarks.plan_here --keep DIR --train && python -m benchmarks.plan_here --keep DIR --again
                                               # only the first of these needs an idle machine; --round N: one of them

Every run is `modelworks train` in a process of its own, as a user calls it; together they go over all axes,
accumulation and recomputation, with models of several shapes. All of them are made in turn, and then all once more,
since the machine is not equally fast at all times. Compared are:

    step     the median time of a step of both rounds, without the first ones, with the shortest and the longest;
             `spread`: by how much the medians of the rounds differ, as a part of it
    stored   parameters and optimiser state on every rank of a split run, as the run measures them
    memory   the most bytes of tensors that any rank holds at once, as torch's allocator counts them (`_live_memory.py`)

What the process's memory grows by (`resident`, rank 0) stands beside it and is not predicted: libraries' code that is
read as it is first called, their own buffers, and what the heap keeps of freed memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks._live_memory import live_peaks
from benchmarks._results import write_results
from modelworks.config import RunConfig, load_run_config
from modelworks.hardware import Device, this_machine
from modelworks.layout import Layout
from modelworks.plan.run import predict_run
from modelworks.records import Record, read_records

WARM_UP = 3  # steps that allocate
STEPS = 9
ROUNDS = 2
LLAMA = {"family": "llama", "n_layers": 8, "d_model": 384, "n_heads": 6, "n_kv_heads": 2, "d_ff": 1024}
SMALL = {"family": "llama", "n_layers": 6, "d_model": 320, "n_heads": 5, "d_ff": 896}
WIDE = {"family": "llama", "n_layers": 4, "d_model": 640, "n_heads": 10, "n_kv_heads": 5, "d_ff": 1728}
TALL = {"family": "llama", "n_layers": 4, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_ff": 1408}
MIDDLE = {"family": "llama", "n_layers": 6, "d_model": 448, "n_heads": 7, "d_ff": 1216}
GPT = {"family": "gpt2", "n_layers": 6, "d_model": 384, "n_heads": 6}
EXPERTS = {
    "family": "mixtral",
    "n_layers": 6,
    "d_model": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 512,
    "n_experts": 4,
    "experts_per_token": 2,
}
# name -> (model, train section, parallel section)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one process, fp32": (LLAMA, {"precision": "fp32", "micro_batch": 8}, {}),
    "one process, accumulation": (GPT, {"precision": "bf16-autocast", "micro_batch": 2}, {}),
    "one process, recompute full": (WIDE, {"precision": "bf16", "micro_batch": 8, "recompute": "full"}, {}),
    "one process, recompute selective": (LLAMA, {"precision": "fp32", "micro_batch": 4, "recompute": "selective"}, {}),
    "dp2": (SMALL, {"precision": "bf16-autocast", "micro_batch": 2}, {"dp_replicate": 2}),
    "zero1": (LLAMA, {"precision": "fp32", "micro_batch": 2}, {"dp_shard": 2, "zero": 1}),
    "zero2": (WIDE, {"precision": "bf16-autocast", "micro_batch": 4}, {"dp_shard": 2, "zero": 2}),
    "zero3": (LLAMA, {"precision": "bf16-autocast", "micro_batch": 4}, {"dp_shard": 2, "zero": 3}),
    "tp2": (TALL, {"precision": "fp32", "micro_batch": 4}, {"tp": 2}),
    "cp2": (SMALL, {"precision": "fp32", "micro_batch": 4}, {"cp": 2}),
    "pp2 1f1b": (LLAMA, {"precision": "bf16-autocast", "micro_batch": 2}, {"pp": 2}),
    "pp2 interleaved": (
        LLAMA,
        {"precision": "fp32", "micro_batch": 2},
        {"pp": 2, "pp_schedule": "interleaved", "pp_virtual": 2},
    ),
    "ep2": (EXPERTS, {"precision": "fp32", "micro_batch": 4}, {"dp_replicate": 2, "ep": 2}),
}
# Written down before the model of a step was changed, and first run when it was finished.
UNSEEN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one process, GPT": (
        GPT | {"n_layers": 4, "d_model": 512, "n_heads": 8},
        {"precision": "fp32", "micro_batch": 4},
        {},
    ),
    "one process, selective, 448 wide": (
        MIDDLE,
        {"precision": "bf16-autocast", "micro_batch": 2, "recompute": "selective"},
        {},
    ),
    "dp2, GPT, recompute full": (
        GPT | {"d_model": 320, "n_heads": 5},
        {"precision": "bf16-autocast", "micro_batch": 2, "recompute": "full"},
        {"dp_replicate": 2},
    ),
    "zero3, fp32": (MIDDLE, {"precision": "fp32", "micro_batch": 2}, {"dp_shard": 2, "zero": 3}),
    "tp2, autocast": (LLAMA, {"precision": "bf16-autocast", "micro_batch": 8}, {"tp": 2}),
    "cp2, bf16": (TALL, {"precision": "bf16", "micro_batch": 2}, {"cp": 2}),
    "pp2 zb-h1": (SMALL | {"n_layers": 8}, {"precision": "bf16", "micro_batch": 1}, {"pp": 2, "pp_schedule": "zb-h1"}),
    "ep2, 8 experts": (
        EXPERTS | {"n_layers": 4, "d_model": 320, "n_heads": 5, "n_kv_heads": 5, "n_experts": 8},
        {"precision": "bf16-autocast", "micro_batch": 4},
        {"dp_replicate": 2, "ep": 2},
    ),
}
ALL = RUNS | UNSEEN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="names of runs; default: all")
    parser.add_argument("--keep", type=Path, help="a directory for the runs, which are otherwise removed")
    parser.add_argument("--again", action="store_true", help="predict the runs kept there once more, train nothing")
    parser.add_argument("--train", action="store_true", help="train the runs to be kept, and compare nothing")
    parser.add_argument("--round", type=int, action="append", help=f"with --train; default: all {ROUNDS}")
    arguments = parser.parse_args()
    names = arguments.only or list(ALL)
    device = this_machine()
    if not device.is_calibrated:
        sys.exit("this machine is not calibrated: run `modelworks plan --calibrate` first")
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        if not arguments.again:
            for number in arguments.round or range(1, ROUNDS + 1):
                for name in names:
                    train(name, run_directory(directory, name, number))
        if arguments.train:
            return
        rows = []
        for name in names:
            rounds = [run_directory(directory, name, number) for number in range(1, ROUNDS + 1)]
            rows.append(compare(name, [each for each in rounds if each.is_dir()], device))
            show(rows[-1])
    summary = {"seen": summarise([row for row in rows if not row["unseen"]])}
    if unseen := [row for row in rows if row["unseen"]]:
        summary["unseen"] = summarise(unseen)
    print(json.dumps(summary))
    if names == list(ALL):
        print(write_results("plan_here", {"calibrated": device.source, "runs": rows, "summary": summary}))


def run_directory(directory: Path, name: str, number: int) -> Path:
    return directory / "runs" / f"{name.replace(' ', '-').replace(',', '')}-{number}"


def train(name: str, run_dir: Path) -> None:
    """One run, in a process of its own."""
    path = write_config(name, run_dir)
    command = [sys.executable, "-m", "modelworks", "train", str(path), "--overwrite", "--json"]
    done = subprocess.run([*command, "--runs-dir", str(run_dir.parent)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr.strip() or done.stdout.strip()}")


def write_config(name: str, run_dir: Path) -> Path:
    """The run's description. Its text is this package's own source, its vocabulary small."""
    model, train_section, parallel = ALL[name]
    here = Path(__file__).resolve().parent.parent
    content = {
        "name": run_dir.name,
        "model": {**model, "vocab_size": 4096, "max_seq_len": 256},
        "data": {
            "sources": [{"name": "code", "type": "text", "path": str(here / "src/modelworks/**/*.py")}],
            "tokenizer": {"train": "bpe", "vocab_size": 4096},
            "seq_len": 256,
            "packing": "across",
            "cache": str(run_dir.parent.parent / "data"),
        },
        "train": {"duration": f"{STEPS} steps", "global_batch": 8, "device": "cpu", **train_section},
        "parallel": parallel,
        "evaluate": {"every": "1000 steps", "max_tokens": 4096, "samples": 0},
        "checkpoint": {"every": "1000 steps"},
    }
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.with_suffix(".yaml")
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def compare(name: str, run_dirs: list[Path], device: Device) -> dict[str, Any]:
    """Predicted and measured, with the relative error of each."""
    config = load_run_config(run_dirs[0] / "config.yaml")
    found = predict_run(config, device)
    records = [list(read_records(each / "records.jsonl")) for each in run_dirs]
    steps = [step_seconds(config, each) for each in records]
    seconds = statistics.median(value for each in steps for value in each)
    medians = [statistics.median(each) for each in steps]
    stored = stored_bytes(config, device, records[0])
    total = max(live_peaks(config))
    return {
        "name": name,
        "unseen": name in UNSEEN,
        "ranks": Layout.of(config.parallel).world_size,
        "precision": config.train.precision,
        "step_seconds": {
            "predicted": found.step_seconds,
            "measured": seconds,
            "rounds": medians,
            "least": min(value for each in steps for value in each),
            "most": max(value for each in steps for value in each),
        },
        "step_error": found.step_seconds / seconds - 1.0,
        "spread": (max(medians) - min(medians)) / seconds if len(medians) > 1 else None,
        "parts": {part: value for part, value in found.parts.items() if value},
        "stored": stored,
        "stored_error": max((abs(row["predicted"] / row["measured"] - 1.0) for row in stored), default=None),
        "memory": {"predicted": found.memory, "measured": total, "bytes": {k: v for k, v in found.bytes.items() if v}},
        "memory_error": found.memory / total - 1.0,
        "resident": last(records[0], "memory/training_peak"),
    }


def step_seconds(config: RunConfig, records: list[Record]) -> list[float]:
    """Of each step, without the first ones."""
    tokens = config.train.global_batch * config.data.seq_len
    return [tokens / float(r.value) for r in records if r.name == "train/tokens_per_second" and r.step > WARM_UP]


def stored_bytes(config: RunConfig, device: Device, records: list[Record]) -> list[dict[str, Any]]:
    """Of every rank of a split run: parameters and optimiser state together, as the rank measured them."""
    measured: dict[int, dict[str, float]] = defaultdict(dict)
    for record in records:
        room, _, what = record.name.partition("/")
        if room == "rank_memory" and record.kind == "measured":
            measured[int(record.tags["rank"])][what] = float(record.value)
    by_stage = predict_run(config, device).by_stage
    rows = []
    for rank, sizes in sorted(measured.items()):
        predicted = by_stage[Layout.of(config.parallel).coordinates(rank).pp]
        total = sizes["parameters"] + sizes["optimizer"]
        rows.append({"rank": rank, "predicted": predicted.parameters + predicted.optimizer, "measured": total})
    return rows


def last(records: list[Record], name: str) -> float | None:
    values = [float(record.value) for record in records if record.name == name]
    return values[-1] if values else None


def show(row: dict[str, Any]) -> None:
    step, memory = row["step_seconds"], row["memory"]
    stored = "" if row["stored_error"] is None else f"  stored {row['stored_error']:+.1%}"
    spread = "" if row["spread"] is None else f", spread {row['spread']:.0%}"
    peak = f"  memory {memory['measured'] / 1e6:.0f} MB {row['memory_error']:+.1%}"
    print(
        f"{row['name']:34} {row['precision']:14} step {step['predicted']:.3f} s predicted, {step['measured']:.3f} s "
        f"measured, {row['step_error']:+.1%}{spread}{stored}{peak}",
        flush=True,
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many runs are within the bounds that the project sets itself: 15 % of time, 5 % of memory."""
    spreads = [row["spread"] for row in rows if row["spread"] is not None]
    return {
        "runs": len(rows),
        "step_within_15_percent": sum(abs(row["step_error"]) <= 0.15 for row in rows),
        "step_mean_error": statistics.mean(abs(row["step_error"]) for row in rows),
        "spread_mean": statistics.mean(spreads) if spreads else None,
        "step_worst": max(abs(row["step_error"]) for row in rows),
        "stored_worst": max((row["stored_error"] for row in rows if row["stored_error"] is not None), default=None),
        "memory_within_5_percent": sum(abs(row["memory_error"]) <= 0.05 for row in rows),
        "memory_mean_error": statistics.mean(abs(row["memory_error"]) for row in rows),
        "memory_worst": max(abs(row["memory_error"]) for row in rows),
    }


if __name__ == "__main__":
    main()
