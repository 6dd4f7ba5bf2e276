"""Emitted files read by the packages they are for: python -m benchmarks.emit_check [--venvs DIRECTORY] [TARGET ...]

For each target an environment of its own is made under --venvs (kept, and used again), a set of layouts is written,
and the real package parses each: torchtitan's configuration manager, Megatron-Core's configuration classes,
DeepSpeed's `DeepSpeedConfig`, transformers' `AutoConfig`. What their objects hold is compared, key by key, with what
was meant; models are built without memory and their parameters counted. The FSDP script is also run, by two processes
on the CPU. Writes results/emit_check.json; exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._results import DIRECTORY, write_results
from modelworks.config import ModelConfig, ParallelConfig, UserError, count_parameters, parse_run_config, preset
from modelworks.hardware import device
from modelworks.plan import Candidate
from modelworks.plan.emit import emit, read_back

PEERS = Path(__file__).parent / "emit_peers"
TORCH = "torch==2.13.0+cpu"
PACKAGES = {
    # triton: torchtitan imports it, and torch for CPUs leaves it out
    "torchtitan": [TORCH, "torchtitan==0.3.0", "triton"],
    "megatron": [TORCH, "megatron-core==0.16.1"],
    "deepspeed": [TORCH, "deepspeed==0.19.8", "transformers==5.24.0"],
    "fsdp": [TORCH, "transformers==5.24.0"],
}
READER = {
    "torchtitan": "torchtitan_sees.py",
    "megatron": "megatron_sees.py",
    "deepspeed": "deepspeed_sees.py",
    "fsdp": "transformers_sees.py",
}
EVERY = {"accumulate_reduce": "every"}
OFFLOAD = {"offload": "cpu", "offload_params": True}
EXPERTS = {"router_bias": True, "router_aux_loss": 0.0}
# model (or changes of one), rows of a step, precision, recompute, layout
LAYOUTS: list[tuple[str, dict[str, Any], int, str, str, dict[str, Any]]] = [
    ("llama-3-8b", {}, 64, "bf16", "none", {"dp_shard": 8, "zero": 3, **EVERY}),
    ("llama-3-8b", {}, 64, "bf16", "full", {"dp_shard": 8, "zero": 2, **EVERY}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"dp_shard": 8, "zero": 1}),
    ("llama-3-8b", {}, 64, "fp32", "full", {"dp_replicate": 2, "dp_shard": 8, "zero": 3, **EVERY}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"dp_shard": 8, "zero": 3, **OFFLOAD, **EVERY}),
    ("llama-3-70b", {}, 64, "bf16", "selective", {"tp": 8, "pp": 4, "dp_shard": 2, "zero": 1}),
    ("llama-3-70b", {}, 64, "bf16", "full", {"tp": 8, "pp": 4, "dp_replicate": 2, "sequence_parallel": False}),
    ("llama-3-70b", {}, 64, "bf16", "none", {"tp": 8, "pp": 4, "pp_schedule": "interleaved", "pp_virtual": 5}),
    ("llama-3-70b", {}, 64, "bf16", "none", {"tp": 8, "pp": 4, "pp_partition": [22, 21, 20, 17]}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 3, "pp_schedule": "zbv"}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"pp": 2, "pp_schedule": "dualpipev", "dp_replicate": 4}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"pp": 4, "pp_schedule": "gpipe", "dp_replicate": 2}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"pp": 4, "pp_schedule": "interleaved-zb", "pp_virtual": 2}),
    ("llama-3-8b", {}, 8, "bf16", "none", {"cp": 4, "dp_shard": 2, "zero": 3, **EVERY}),
    ("llama-3-8b", {}, 8, "bf16", "none", {"cp": 4, "cp_mode": "ulysses", "dp_shard": 2, "zero": 1}),
    ("llama-3-8b", {}, 64, "bf16", "none", {"tp": 4, "dp_replicate": 2, "sequence_parallel": False}),
    ("llama-3-8b", {}, 64, "fp16", "none", {"dp_shard": 8, "zero": 1}),
    ("llama-3-8b", {}, 64, "fp8", "none", {"tp": 2, "dp_shard": 4, "zero": 1}),
    ("llama-3.2-1b", {}, 64, "bf16", "none", {"dp_shard": 8, "zero": 3, **EVERY}),
    ("qwen3-8b", {}, 64, "bf16", "none", {"tp": 2, "dp_shard": 4, "zero": 3, **EVERY}),
    ("qwen2.5-7b", {}, 64, "bf16", "none", {"tp": 2, "dp_shard": 4, "zero": 1}),
    ("gpt2-xl", {}, 64, "bf16-autocast", "none", {"dp_replicate": 8}),
    ("gpt2-xl", {}, 64, "bf16", "none", {"dp_shard": 8, "zero": 1}),
    ("mixtral-8x7b", {}, 64, "bf16", "none", {"ep": 8, "dp_shard": 8, "zero": 1}),
    ("mixtral-8x7b", {}, 64, "bf16", "none", {"tp": 2, "pp": 2, "ep": 4, "dp_shard": 4, "zero": 1}),
    ("mixtral-8x7b", {}, 64, "bf16", "full", {"dp_shard": 8, "zero": 3, **EVERY}),
    ("qwen3-30b-a3b", {}, 64, "bf16", "none", {"ep": 8, "dp_shard": 16, "zero": 2, **EVERY}),
    ("qwen3-30b-a3b", EXPERTS, 64, "bf16", "none", {"ep": 8, "dp_shard": 16, "zero": 3, **EVERY}),
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", choices=[*PACKAGES, []], help="by default all")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "modelworks-emit-check")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    for target in options.targets or list(PACKAGES):
        python = environment(options.venvs / f"venv-{target}", PACKAGES[target])
        results[target] = check(target, python)
        if target == "fsdp":
            results[target]["run"] = run_fsdp(python)
        summary = {key: value for key, value in results[target].items() if key != "layouts"}
        print(target, json.dumps(summary, indent=1), flush=True)
    print(write_results("emit_check", earlier_results() | results))
    return int(any(result["different"] for result in results.values()))


def earlier_results() -> dict[str, Any]:
    """Of targets that were checked before, kept where only some are checked again."""
    path = DIRECTORY / "emit_check.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
    return found


def environment(directory: Path, packages: list[str]) -> Path:
    """The Python of an environment with these packages; made where there is none."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def candidate(model: ModelConfig, rows: int, precision: str, recompute: str, layout: dict[str, Any]) -> Candidate:
    seq_len = min(4096, model.max_seq_len)
    split = ParallelConfig(**layout)
    return Candidate(model, split, device("H100-SXM-80GB"), 1, rows, seq_len, precision=precision, recompute=recompute)


def check(target: str, python: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    written: list[tuple[dict[str, Any], Candidate, Path]] = []
    keys, different = set(), 0
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, changes, batch, precision, recompute, layout) in enumerate(LAYOUTS):
            meant = candidate(preset(name).model_copy(update=changes), batch, precision, recompute, layout)
            row: dict[str, Any] = {"model": name, "layout": layout, "precision": precision, "recompute": recompute}
            rows.append(row)
            try:
                emit(target, meant, Path(scratch) / str(number))
                written.append((row, meant, Path(scratch) / str(number)))
            except UserError as error:
                row["refused"] = str(error)
        seen = peer(target, python, [(place, meant.n_devices) for _, meant, place in written])
        for (row, meant, place), holds in zip(written, seen, strict=True):
            row["keys_compared"], row["different"] = len(holds), differences(holds, read_back(target, place), meant)
            keys |= set(holds)
            different += bool(row["different"])
    return {
        "packages": PACKAGES[target],
        "written": len(written),
        "refused": len(rows) - len(written),
        "different": different,
        "keys": sorted(keys),
        "layouts": rows,
    }


def peer(target: str, python: Path, places: list[tuple[Path, int]]) -> list[dict[str, Any]]:
    """What the package holds after reading each directory."""
    words = [str(word) for place in places for word in place]
    command = [python, "-W", "ignore", PEERS / READER[target], *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{target}: the reader itself failed\n{done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("seen ")]
    return [json.loads(line.removeprefix("seen ")) for line in lines]


def differences(seen: dict[str, Any], said: dict[str, Any], meant: Candidate) -> list[str]:
    """Keys for which the package's objects hold something else than we meant."""
    expected = dict(said)
    expected["parameters"] = count_parameters(meant.model).total
    expected["data_ranks"] = meant.parallel.dp_replicate * meant.parallel.dp_shard
    expected["micro_batches"] = meant.global_batch // expected["data_ranks"]
    return [
        f"{key}: meant {expected.get(key)}, it holds {value}"
        for key, value in seen.items()
        if not (key in expected and same(expected[key], value))
    ]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)


def run_fsdp(python: Path) -> dict[str, list[float]]:
    """Losses of three steps of the emitted script, by two processes on the CPU; the same for every way to shard."""
    ways: dict[str, dict[str, Any]] = {
        "zero 3": {"dp_shard": 2, "zero": 3},
        "zero 2, reduced at every micro-batch": {"dp_shard": 2, "zero": 2, **EVERY},
        "zero 3, offloaded": {"dp_shard": 2, "zero": 3, **OFFLOAD},
        "copies": {"dp_replicate": 2},
    }
    text = """
        model: {n_layers: 2, d_model: 64, n_heads: 4, n_kv_heads: 2, vocab_size: 512, max_seq_len: 64}
        data: {seq_len: 64, tokenizer: {train: bpe, vocab_size: 300}}
        train: {duration: 3 steps, global_batch: 8}
        schedule: {warmup: 1 steps}
    """
    run = parse_run_config(text, "the check", [])
    losses = {}
    for name, layout in ways.items():
        with tempfile.TemporaryDirectory() as scratch:
            meant = candidate(run.model, 8, "fp32", "none", layout)
            emit("fsdp", meant, Path(scratch), run=run)
            done = subprocess.run(
                ["bash", str(Path(scratch) / "launch.sh")],
                capture_output=True,
                text=True,
                env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "MASTER_PORT": "0"},
            )
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
        losses[name] = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    return losses


if __name__ == "__main__":
    sys.exit(main())
