"""Whole runs killed at random points of their saves: how many are resumed exactly, and what was ever lost.

    python -m benchmarks.checkpoint_crashes --kills 60 [--seed N]

Each run trains a small model, alone or on two ranks, and is killed (SIGKILL) on one rank at a point that is drawn from
those that its saves reach; some are killed again while they are resumed. Then it is resumed to its end and compared,
bit for bit, with a run that nobody disturbed. Writes results/checkpoint_crashes.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "train"), str(TESTS / "parallel")]

CONFIG = """
name: crashed
model: {{n_layers: 2, d_model: 16, n_heads: 2, vocab_size: 304, max_seq_len: 32, d_ff: 32}}
data:
  sources: [{{name: words, type: text, path: "{texts}/*.txt"}}]
  tokenizer: {{train: bpe, vocab_size: 300}}
  seq_len: 32
  validation: 10%
  cache: "{cache}"
  workers: 1
train: {{duration: 10 steps, global_batch: 4, micro_batch: 1, precision: fp32, device: cpu}}
optimizer: {{lr: 1e-2}}
evaluate: {{every: 100 steps, samples: 0, max_tokens: 500}}
checkpoint: {{every: 2 steps, keep_last: 2}}
parallel: {parallel}
"""
LAYOUTS = {1: "{}", 2: "{dp_shard: 2, zero: 2}"}
# Points that every save reaches, and how often in each, roughly; the first removal is after the third save.
POINTS = (
    "before the storage is opened", "storage opened", "before a shard file", "between two tensors",
    "shard file written", "shard file durable", "before the part file", "part file written", "part file durable",
    "parts read", "part files removed", "before a tokeniser file", "before the manifest's checksum",
    "before the manifest",
    "manifest durable", "before the commit", "renamed", "committed", "before latest moves", "latest moved",
    "before an old one is removed", "old one hidden", "old ones removed",
)  # fmt: skip
ON_EVERY_RANK = POINTS[2:9]


def main() -> None:
    from benchmarks._results import write_results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    source, began = random.Random(arguments.seed), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="modelworks-crashes-") as name:
        place = Path(name)
        references = {ranks: _reference(place, ranks) for ranks in LAYOUTS}
        rows = []
        while sum(row["kills"] for row in rows) < arguments.kills:
            rows.append(_case(place / f"case-{len(rows)}", source, references))
            print(len(rows), json.dumps(rows[-1]), flush=True)
    results = {
        "kills": sum(row["kills"] for row in rows),
        "runs": len(rows),
        "exact": sum(row["exact"] for row in rows),
        "complete_checkpoints_lost": sum(row["lost"] for row in rows),
        "points": dict(sorted(Counter(point for row in rows for point in row["points"]).items())),
        "seconds": round(time.perf_counter() - began, 1),
        "failed": [row for row in rows if not row["exact"] or row["lost"]],
    }
    print(json.dumps(results, indent=1))
    if not arguments.no_results:
        print(write_results("checkpoint_crashes", results))
    if results["failed"]:
        raise SystemExit(1)


def _case(place: Path, source: random.Random, references: dict[int, Path]) -> dict[str, Any]:
    """One run, killed once or twice, then resumed to its end."""
    from kill_jobs import Kill, complete_steps, finish, kill, same_run

    ranks = source.choice([1, 1, 2])
    config = _write_config(place, ranks)
    directory = place / "runs" / "crashed" / "checkpoints"
    points, lost, complete = [], 0, list[int]()
    for _ in range(source.choice([1, 1, 1, 2])):
        point = source.choice(POINTS)
        rank = source.randrange(ranks) if point in ON_EVERY_RANK else 0
        many = 70 // ranks if point == "between two tensors" else 1
        how = Kill(point, source.randint(1, 4 * many), rank)
        if not kill(config, place / "runs", how, resume=bool(points)):
            continue
        points.append(f"{point}, rank {rank} of {ranks}")
        now = complete_steps(directory) if directory.exists() else []
        # Retention may remove older ones, never the newest that was complete.
        lost += bool(complete) and not (now and now[-1] >= complete[-1])
        complete = now
    finish(config, place / "runs", resume=True)
    exact = same_run(place / "runs" / "crashed", references[ranks])
    return {"ranks": ranks, "kills": len(points), "points": points, "exact": exact, "lost": lost}


def _reference(place: Path, ranks: int) -> Path:
    from kill_jobs import finish

    here = place / f"reference-{ranks}"
    finish(_write_config(here, ranks), here / "runs", resume=False)
    return here / "runs" / "crashed"


def _write_config(place: Path, ranks: int) -> Path:
    texts = place.parent / "texts"
    if not texts.exists():
        texts.mkdir(parents=True)
        words = random.Random(0)
        for index in range(60):
            text = " ".join(words.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(60))
            (texts / f"{index:02}.txt").write_text(f"{text}.\n")
    place.mkdir()
    path = place / "config.yaml"
    path.write_text(CONFIG.format(texts=texts, cache=place.parent / "cache", parallel=LAYOUTS[ranks]))
    return path


if __name__ == "__main__":
    main()
