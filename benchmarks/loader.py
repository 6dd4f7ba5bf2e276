"""How fast batches are made, against how fast training uses them up.

    python -m benchmarks.loader

Batches of 64 sequences of 256 tokens from the standard library's source files, shuffled, packed within documents:
asked for one by one at random steps, and through the prefetching iterator. One process and one thread make them.
`ratio` divides by 20,000 tokens/s, more than a 15M-parameter Llama trains at on two such cores (2,500-3,000 in fp32).
"""

from __future__ import annotations

import statistics
import time
from itertools import islice

import numpy as np

from benchmarks._results import write_results
from modelworks.config import DataConfig
from modelworks.data import TrainLoader, build_dataset

GLOBAL_BATCH, TRAINING_RATE, STEPS, REPEATS = 64, 20_000, 200, 5


def main() -> None:
    results = []
    for packing in ("within-document", "across"):
        config = DataConfig(packing=packing)
        dataset = build_dataset(config)
        loader = TrainLoader(dataset, config, 0, GLOBAL_BATCH)
        steps = np.random.default_rng(0).integers(0, 10**9, STEPS).tolist()
        for name, run in {
            "any step": lambda loader=loader, steps=steps: [loader.batch(step) for step in steps],
            "iterator": lambda loader=loader: list(islice(loader.iterate(), STEPS)),
        }.items():
            rates = [loader.tokens(STEPS) / _seconds(run) for _ in range(REPEATS)]
            rate = statistics.median(rates)
            results.append(
                {
                    "packing": packing,
                    "access": name,
                    "seq_len": config.seq_len,
                    "global_batch": GLOBAL_BATCH,
                    "tokens_per_second": round(rate),
                    "lowest": round(min(rates)),
                    "highest": round(max(rates)),
                    "training_tokens_per_second": TRAINING_RATE,
                    "ratio": round(rate / TRAINING_RATE, 1),
                }
            )
            print(f"{packing:16} {name:9} {rate / 1e6:6.2f}M tokens/s, {rate / TRAINING_RATE:5.0f}x training")
    print(write_results("loader", results))


def _seconds(run) -> float:  # type: ignore[no-untyped-def]
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
