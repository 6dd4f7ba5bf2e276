"""How often a run without trouble is called ill, and how often trouble is found: spikes and the judge's findings.

    python -m benchmarks.false_alarms [--simulated N] [--real N] [--runs DIR]

Simulated runs have heavy tails and seeds that no limit was chosen on. Real ones are short trainings of a tiny Llama on
this repository's documentation, with a seed each; nothing is wrong with them, but that their text is small: the last
of their steps go over it for the tenth time. `--runs` keeps them, and makes only those that are not there yet, so that
many can be made in pieces.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._results import write_results
from benchmarks._simulated_runs import EVALUATIONS, LAYERS, STEPS, WARMUP, curves, evaluations, layers
from modelworks.config import HealthConfig, parse_run_config
from modelworks.train.health import Judge, Monitor

FIRST_SEED = 5000
_OF_STEPS = ("spike", "divergence", "plateau", "growing norm", "off the law")
KINDS = (*_OF_STEPS, "overfitting", "drop", "dead layer", "exploding layer")


def judged(seed: int, plant: str | None = None) -> Iterator[str]:
    """What is found in a simulated run, by kind; again and again for spikes and outliers. plant: trouble of that kind
    from the middle of the run on."""
    loss, norm = curves(seed)
    val, score = evaluations(seed)
    grads, moves = layers(seed)
    draw, late = np.random.default_rng([seed, 3]), np.arange(STEPS) - STEPS // 2
    noise = 1 + 0.02 * draw.standard_t(6, STEPS)
    middle = STEPS // 2 + 17
    match plant:
        case "spike":
            loss[middle] *= 2
        case "divergence":
            loss *= 1 + np.maximum(0, late) / STEPS
        case "overfitting":
            val *= 1 + 0.01 * np.maximum(0, np.arange(EVALUATIONS) - EVALUATIONS // 2)
        case "plateau":
            loss = np.where(late > 0, loss[STEPS // 2 - 20 : STEPS // 2].mean() * noise, loss)
        case "growing norm":
            norm *= np.exp(np.maximum(0, late + STEPS // 10) / STEPS * 4)
        case "dead layer":
            grads[len(grads) // 2 :, 4] *= 1e-8
        case "exploding layer":
            grads[len(grads) // 2 :, 4] *= np.exp(np.arange(len(grads) - len(grads) // 2) / 5)
        case "drop":
            val[EVALUATIONS // 2] *= 1.3
        case "off the law":
            loss *= 1 + 0.4 * np.maximum(0, late) / STEPS
    health = HealthConfig()
    monitor, judge = Monitor(health, warmup_steps=WARMUP, grad_clip=1.0), Judge(health, warmup_steps=WARMUP)
    for step in range(1, STEPS + 1):
        judgement = monitor.judge(step, float(loss[step - 1]), float(norm[step - 1]))
        if judgement.outlier:
            yield "outlier"
        if judgement.spikes:
            yield "spike"
        else:
            yield from (found.kind for found in judge.step(step, float(loss[step - 1]), float(norm[step - 1])))
        if judgement.drift:
            yield "divergence"
        if step % 10 == 0:
            row = step // 10 - 1
            yield from (found.kind for found in judge.layers(LAYERS, grads[row].tolist(), moves[row].tolist()))
        if step % (STEPS // EVALUATIONS) == 0:
            place = step // (STEPS // EVALUATIONS) - 1
            metrics = {"val_loss": float(val[place]), "eval/quiz/acc": float(score[place])}
            yield from (found.kind for found in judge.evaluation(step, metrics))


def simulated(count: int) -> dict[str, Any]:
    """Runs with a false alarm, and runs in which what was planted was found, by kind."""
    clean = [set(judged(seed)) for seed in range(FIRST_SEED, FIRST_SEED + count)]
    planted = max(1, count // 5)
    return {
        "runs": count,
        "false_alarms": {kind: sum(kind in found for found in clean) for kind in KINDS},
        "outliers": sum("outlier" in found for found in clean),
        "planted": planted,
        "found": {
            kind: sum(kind in set(judged(seed, kind)) for seed in range(FIRST_SEED, FIRST_SEED + planted))
            for kind in KINDS
        },
    }


_REAL = """
    model: {{n_layers: 2, d_model: 32, n_heads: 2, vocab_size: 512, max_seq_len: 64, d_ff: 64}}
    data:
      sources: [{{name: docs, type: text, path: "{texts}/*.md"}}]
      tokenizer: {{train: bpe, vocab_size: 512}}
      seq_len: 64
      validation: 10%
      cache: "{cache}"
      workers: 1
    train: {{duration: {steps} steps, global_batch: 8, precision: fp32, device: cpu}}
    optimizer: {{lr: 3e-3}}
    evaluate: {{every: 50 steps, samples: 0}}
    checkpoint: {{every: 100000 steps}}
"""


def real(count: int, steps: int, runs: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Short trainings; the seeds of those that were told of each kind."""
    from modelworks.records import read_records
    from modelworks.train import train

    told: dict[str, list[int]] = defaultdict(list)
    losses = []
    text = _REAL.format(texts=Path(__file__).parent.parent / "docs", cache=runs / "cache", steps=steps)
    for seed in range(count):
        run_dir = runs / f"seed-{seed}"
        if not (run_dir / "summary.json").is_file():
            train(parse_run_config(text, "benchmark", [f"seed={seed}"]), run_dir)
        losses.append(json.loads((run_dir / "summary.json").read_text())["val_loss"])
        kinds = set()
        for row in read_records(run_dir / "records.jsonl"):
            if row.name in ("spike", "outlier", "divergence"):
                kinds.add(row.name)
            elif row.name == "judgement":
                kinds.add(json.loads(str(row.value))["kind"])
        for kind in kinds:
            told[kind].append(seed)
        say(f"seed {seed}: validation loss {losses[-1]:.4f}, {', '.join(sorted(kinds)) or 'nothing told'}")
    return {"runs": count, "steps": steps, "told": dict(told), "val_loss": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", type=int, default=200)
    parser.add_argument("--real", type=int, default=40)
    parser.add_argument("--runs", type=Path, help="directory of the real runs; default one that is removed")
    parser.add_argument("--steps", type=int, default=700, help="of a real run")
    arguments = parser.parse_args()
    row: dict[str, Any] = {}
    if arguments.simulated:
        row["simulated"] = simulated(arguments.simulated)
        print(json.dumps(row["simulated"], indent=1))
    with tempfile.TemporaryDirectory() as directory:
        row["real"] = real(arguments.real, arguments.steps, arguments.runs or Path(directory), print)
    print(write_results("false_alarms", row))


if __name__ == "__main__":
    main()
