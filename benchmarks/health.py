"""What watching a run costs: the seconds that it takes of every step, in shares of the step.

    python -m benchmarks.health [--steps N] [--layers-every K]

A Llama of 18.9M parameters, 16 x 256 tokens a step, one process. All that `health` does in a run is timed where it is
called (judging each step against a full window, figures of every layer every K steps, their records written to disk),
and divided by the median step: the difference of two runs' steps would be smaller than a machine's noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
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


class _Clock:
    """Seconds inside of the calls that it wraps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

        return timed


def measure(steps: int, layers_every: int) -> dict[str, Any]:
    """Of `steps` steps after two that allocate."""
    model_text = ", ".join(f"{key}: {value}" for key, value in {**SHAPE, "vocab_size": VOCABULARY}.items())
    config = parse_run_config(
        f"""
        model: {{{model_text}}}
        data: {{seq_len: {SEQ_LEN}, tokenizer: none}}
        train: {{global_batch: {ROWS}, micro_batch: {ROWS}, precision: fp32}}
        health: {{layers_every: {layers_every}}}
        """,
        "benchmark",
    )
    mesh = single_process(torch.device("cpu"))
    model = split_model(config, mesh, dtype=torch.float32)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    watch = Watch(config, model, optimizer, warmup_steps=0)
    clock, seconds = _Clock(), []
    with tempfile.TemporaryDirectory() as directory:
        log = RunLog(Path(directory), first_step=0)
        terminal = Terminal(Console(quiet=True), total_steps=steps, log_every=10**9)
        hook: Any = HealthRecords(log, terminal, None, mesh)  # type: ignore[arg-type]  # asked for a spike's batch only
        state = TrainState(model, optimizer, watch=watch)
        for step in range(steps + 2):
            if step == 2:
                for name in ("before_clipping", "before_update", "after_update"):
                    setattr(watch, name, clock.around(name, getattr(watch, name)))
                hook.after_step = clock.around("records", hook.after_step)
            watch.begin(step + 1)
            batch = verification_batch(config, step)
            started = time.perf_counter()
            result = train_step(
                model,
                optimizer,
                batch,
                config,
                step=step,
                lr=1e-3,
                micro_batch=ROWS,
                precision=PRECISIONS["fp32"],
                watch=watch,
            )
            taken = time.perf_counter() - started
            hook.after_step(state, StepDone(step + 1, result, 1e-3, taken, last=False, stopping=False))
            if step >= 2:
                seconds.append(taken)
        log.close()
    typical = statistics.median(seconds)
    shares = {name: total / steps / typical for name, total in clock.seconds.items()}
    shares["judge"] = _judging_seconds(config.health) / typical
    return {
        "parameters": count_parameters(config.model).total,
        "threads": torch.get_num_threads(),
        "steps": steps,
        "layers_every": layers_every,
        "step_seconds": typical,
        "shares": shares,
        "share": sum(shares.values()),
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
    parser.add_argument("--steps", type=int, default=20, help="a multiple of --layers-every")
    parser.add_argument("--layers-every", type=int, default=10)
    arguments = parser.parse_args()
    row = measure(arguments.steps, arguments.layers_every)
    print(f"{row['parameters']:,} parameters, {row['step_seconds']:.3f} s a step on {row['threads']} threads")
    for name, share in row["shares"].items():
        print(f"  {name:16} {share:.3%}")
    print(f"  {'together':16} {row['share']:.3%}")
    print(write_results("health", row))


if __name__ == "__main__":
    main()
