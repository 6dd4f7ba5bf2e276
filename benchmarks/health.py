"""What watching a run costs: steps with all of it beside steps with nothing, in one process and one after the other.

    python -m benchmarks.health [--rounds N] [--layers-every K]

A Llama of 18.9M parameters, 16 x 256 tokens a step in 4 micro-batches. A round is four steps: one without a watch, one
whose gradients are sampled for the next one's cosine, one that is measured (figures of every layer, noise of every
micro-batch, logits, activations, the update; records written to disk), and one more without a watch. The cost of a
kind of step is the median over rounds of its seconds over the mean of the two without, less 1; of a run, in which one
step in K is measured, one sampled and all are judged, the mean over K steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks._contenders import ROWS, SEQ_LEN, SHAPE, VOCABULARY
from benchmarks._results import write_results
from modelworks.config import HealthConfig, count_parameters, parse_run_config
from modelworks.optim import build_optimizer
from modelworks.parallel import single_process, split_model
from modelworks.train import PRECISIONS
from modelworks.train.health import Monitor, Watch
from modelworks.train.health.records import HealthRecords
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState
from modelworks.train.step import train_step
from modelworks.train.terminal import Terminal
from modelworks.verify.batches import verification_batch


def measure(rounds: int, layers_every: int) -> dict[str, Any]:
    """Of `rounds` rounds after one that allocates."""
    model_text = ", ".join(f"{key}: {value}" for key, value in {**SHAPE, "vocab_size": VOCABULARY}.items())
    config = parse_run_config(
        f"""
        model: {{{model_text}}}
        data: {{seq_len: {SEQ_LEN}, tokenizer: none}}
        train: {{global_batch: {ROWS}, micro_batch: {ROWS // 4}, precision: fp32}}
        health: {{layers_every: {layers_every}}}
        """,
        "benchmark",
    )
    mesh = single_process(torch.device("cpu"))
    model = split_model(config, mesh, dtype=torch.float32)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    watch = Watch(config, model, optimizer, warmup_steps=0)
    state = TrainState(model, optimizer, watch=watch)
    seconds: dict[str, list[float]] = {"off": [], "sampled": [], "measured": []}
    with tempfile.TemporaryDirectory() as directory:
        log = RunLog(Path(directory), first_step=0)
        terminal = Terminal(Console(quiet=True), total_steps=10**9, log_every=10**9)
        hook = HealthRecords(log, terminal, None, mesh)  # type: ignore[arg-type]  # asked for a spike's batch only

        def step(number: int, kind: str) -> None:
            batch = verification_batch(config, number)
            watched = None if kind == "off" else watch
            more: dict[str, Any] = {"lr": 1e-4, "micro_batch": ROWS // 4, "precision": PRECISIONS["fp32"]}
            started = time.perf_counter()
            watch.begin(number)
            result = train_step(model, optimizer, batch, config, step=number, watch=watched, **more)
            if watched:
                done = StepDone(number, result, 1e-4, time.perf_counter() - started, last=False, stopping=False)
                hook.after_step(state, done)
            seconds[kind].append(time.perf_counter() - started)

        for place in range(1, rounds + 2):
            last = place * layers_every
            for number, kind in ((last - 2, "off"), (last - 1, "sampled"), (last, "measured"), (last + 1, "off")):
                step(number, kind)
        log.close()
    off = [(before + after) / 2 for before, after in zip(seconds["off"][2::2], seconds["off"][3::2], strict=True)]
    extra = {
        kind: statistics.median(own / plain for own, plain in zip(seconds[kind][1:], off, strict=True)) - 1
        for kind in ("sampled", "measured")
    }
    typical = statistics.median(off)
    judging = _judging_seconds(config.health) / typical
    return {
        "parameters": count_parameters(config.model).total,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "layers_every": layers_every,
        "step_seconds": typical,
        "extra": {**extra, "judged": judging},
        "share": (max(0.0, extra["sampled"]) + extra["measured"]) / layers_every + judging,
        "spread": statistics.median(
            abs(before / after - 1) for before, after in zip(seconds["off"][2::2], seconds["off"][3::2], strict=True)
        ),
        "cosine_bytes": watch.probes.cosine.n_bytes / (4 * count_parameters(config.model).total)
        if watch.probes
        else 0.0,
    }


def _judging_seconds(health: HealthConfig) -> float:
    """Of one step at its dearest: the window is full, and both values are above what is usual."""
    monitor = Monitor(health, warmup_steps=0, grad_clip=1.0)
    draw = random.Random(0)
    for step in range(2 * health.window):
        monitor.judge(step + 1, 3 + 0.1 * draw.random(), 0.5 + 0.1 * draw.random())
    seconds = []
    for step in range(30):  # few enough to leave what is usual where it is
        started = time.perf_counter()
        monitor.judge(2 * health.window + step + 1, 3.11, 0.61)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers-every", type=int, default=10, help="at least 4")
    arguments = parser.parse_args()
    row = measure(arguments.rounds, arguments.layers_every)
    print(f"{row['parameters']:,} parameters, {row['step_seconds']:.3f} s a step on {row['threads']} threads")
    for name, share in row["extra"].items():
        print(f"  a step that is {name:10} {share:+.3%}")
    print(f"  of a run {row['share']:.3%}; two steps without a watch differ by {row['spread']:.2%}")
    print(write_results("health", row))


if __name__ == "__main__":
    main()
