"""What watching a run costs: steps with all of it beside steps with nothing, in one process and one after the other.

    python -m benchmarks.health [--rounds N] [--layers-every K]

A Llama of 18.9M parameters, 16 x 256 tokens a step in 4 micro-batches. A round is five steps: one without a watch; one
like most (judged, with the gradient norm of every layer); one whose gradient is sketched for the next one's cosine too;
one that is measured (figures of every layer, noise of every micro-batch, logits, activations, the update); and one
more without a watch. Records are written to disk. The cost of a kind of step is the median over rounds of its seconds
over the mean of the two without, less 1; of a run, in which one step in K is measured, one sampled and all others like
most, the mean over K steps; of one in which every step is measured, those of a sampled and a measured one together.

    python -m benchmarks.health --cosine

how far the cosine of sketches is from that of the gradients, on consecutive gradients of a Llama of 2.1M parameters.
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
from modelworks.train.health.cosine import ConsecutiveCosine, cosine
from modelworks.train.health.records import HealthRecords
from modelworks.train.loop import StepDone
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState
from modelworks.train.step import apply_gradients, compute_gradients, train_step
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
    seconds: dict[str, list[float]] = {"off": [], "plain": [], "sampled": [], "measured": []}
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
            kinds = ("off", "plain", "sampled", "measured", "off")
            for number, kind in enumerate(kinds, start=last - 3):
                step(number, kind)
        log.close()
    off = [(before + after) / 2 for before, after in zip(seconds["off"][2::2], seconds["off"][3::2], strict=True)]
    extra = {
        kind: statistics.median(own / plain for own, plain in zip(seconds[kind][1:], off, strict=True)) - 1
        for kind in ("plain", "sampled", "measured")
    }
    often = {"plain": layers_every - 2, "sampled": 1, "measured": 1}
    typical = statistics.median(off)
    judging = _judging_seconds(config.health) / typical
    return {
        "parameters": count_parameters(config.model).total,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "layers_every": layers_every,
        "step_seconds": typical,
        "extra": {**extra, "judged": judging},
        "share": sum(max(0.0, extra[kind]) * times for kind, times in often.items()) / layers_every + judging,
        "share_of_every_step": max(0.0, extra["sampled"]) + max(0.0, extra["measured"]) + judging,
        "spread": statistics.median(
            abs(before / after - 1) for before, after in zip(seconds["off"][2::2], seconds["off"][3::2], strict=True)
        ),
        "cosine_bytes": watch.probes.cosine.n_bytes / (4 * count_parameters(config.model).total)
        if watch.probes
        else 0.0,
    }


def cosine_errors(rounds: int) -> dict[str, Any]:
    """Of sketches, over consecutive steps of a short training; and the deviation that theory says."""
    config = parse_run_config(
        """
        model: {n_layers: 4, d_model: 192, n_heads: 4, d_ff: 512, vocab_size: 1024, max_seq_len: 128}
        data: {seq_len: 128, tokenizer: none}
        train: {global_batch: 8, micro_batch: 8, precision: fp32}
        """,
        "benchmark",
    )
    model = split_model(config, single_process(torch.device("cpu")), dtype=torch.float32)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    sketched = ConsecutiveCosine(model.split, 4)
    before: dict[str, torch.Tensor] = {}
    rows = []
    for step in range(rounds + 1):
        more: dict[str, Any] = {"micro_batch": 8, "precision": PRECISIONS["fp32"]}
        gradients = compute_gradients(model, verification_batch(config, step), config, step=step, **more)
        now = {name: each.detach().clone() for name, each in gradients.by_name.items()}
        if before:
            sketched.compare(step, now)
            product = sum(float((now[name].double() * before[name].double()).sum()) for name in now)
            norms = [sum(float(each.double().square().sum()) for each in one.values()) ** 0.5 for one in (now, before)]
            rows.append({"exact": product / norms[0] / norms[1], "sketched": cosine(sketched.sketches)})
        sketched.keep(step, now)
        before = now
        apply_gradients(model, optimizer, gradients, config, lr=1e-3)
    n_parameters = count_parameters(config.model).total
    errors = [row["sketched"] - row["exact"] for row in rows if row["sketched"] is not None]
    return {
        "parameters": n_parameters,
        "width": sketched.width,
        "share_of_bytes": sketched.n_bytes / (4 * n_parameters),
        "largest_error": max(map(abs, errors)),
        "deviation": statistics.fmean(error**2 for error in errors) ** 0.5,
        "deviation_expected": sketched.width**-0.5,
        "steps": rows,
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
    parser.add_argument("--layers-every", type=int, default=10, help="at least 5")
    parser.add_argument("--cosine", action="store_true", help="only the error of the cosine")
    arguments = parser.parse_args()
    if arguments.cosine:
        print(write_results("health_cosine", cosine_errors(arguments.rounds)))
        return
    row = measure(arguments.rounds, arguments.layers_every)
    print(f"{row['parameters']:,} parameters, {row['step_seconds']:.3f} s a step on {row['threads']} threads")
    for name, share in row["extra"].items():
        print(f"  a step that is {name:10} {share:+.3%}")
    print(f"  of a run {row['share']:.3%}, measured at every step {row['share_of_every_step']:.3%}")
    print(f"  two steps without a watch differ by {row['spread']:.2%}")
    print(write_results("health", row))


if __name__ == "__main__":
    main()
