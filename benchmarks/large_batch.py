"""Large batches, honestly: the same tokens in batches of 1x to 64x, with AdamW, LAMB and LARS.

    python -m benchmarks.large_batch [--seconds N]     # goes on where it stopped, for N seconds; then draws the plot
    python -m benchmarks.large_batch --plot            # draws the plot again from the written results

A Llama of 0.2M parameters reads the Python standard library. Every run has the same number of tokens,
the same share of warmup and the same cosine, so that a batch k times as large has k times fewer steps.

    tuned at 1x    each optimiser's rate at the base batch, by factors of two, until the best lies between two others
    carried        that rate at 2x to 64x: AdamW's as it is, and AdamW's, LAMB's and LARS's times sqrt(k)
    tuned at 64x   each optimiser's rate searched again there, which is what the rules would have to guess

A seed sets the initial weights and the order of the data. Rates are tuned with seed 0, the carried runs have two seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks._results import DIRECTORY, write_results
from modelworks.config import RunConfig, count_parameters, parse_run_config
from modelworks.data import Dataset, TrainLoader, build_dataset, validation_batches
from modelworks.optim import build_optimizer, build_schedule
from modelworks.parallel import single_process, split_model
from modelworks.train import PRECISIONS, score_text
from modelworks.train.step import NonFiniteStep, train_step
from modelworks.tune import scale_factor

BASE, LENGTH, STEPS = 8, 64, 1024  # sequences, tokens, and steps at the base batch
TIMES = (1, 2, 4, 8, 16, 32, 64)
RETUNED = 64
MICRO = 64  # rows of a micro-batch: so small a model is fastest so
WARMUP, FLOOR = 0.1, 0.1
SEEDS = (0, 1)
FIRST_RATE = {"adamw": 4e-3, "lamb": 2e-2, "lars": 8.0}
NAME = "large_batch"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "large_batch.png"


@dataclass(frozen=True)
class Job:
    """One run. times: its batch over the base batch."""

    optimizer: str
    times: int
    lr: float
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--plot", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    runs = _stored()
    if not arguments.plot:
        _measure(runs, time.monotonic() + arguments.seconds)
    for row in table(runs):
        print("| " + " | ".join(row) + " |")
    plot(runs)


def jobs(losses: dict[Job, float]) -> Iterator[Job]:
    """What is still to be run; each is asked for once the losses of those before it are in `losses`."""
    for name in FIRST_RATE:
        yield from _search(losses, name, 1, FIRST_RATE[name])
    for seed in SEEDS:
        for times in (64, 16, 4, 1, 32, 8, 2):
            for name, rule in METHODS:
                yield Job(name, times, carried_rate(losses, name, rule, times), seed)
        if seed == SEEDS[0]:
            for name in FIRST_RATE:
                yield from _search(losses, name, RETUNED, carried_rate(losses, name, "sqrt", RETUNED))


METHODS = (("adamw", "none"), ("adamw", "sqrt"), ("lamb", "sqrt"), ("lars", "sqrt"))


def best(losses: dict[Job, float], name: str, times: int) -> Job:
    """The rate with the lowest loss of those tried at this batch with the first seed."""
    tried = [job for job in losses if (job.optimizer, job.times, job.seed) == (name, times, SEEDS[0])]
    return min(tried, key=lambda job: losses[job])


def carried_rate(losses: dict[Job, float], name: str, rule: Any, times: int) -> float:
    base = [job for job in losses if (job.optimizer, job.times, job.seed) == (name, 1, SEEDS[0])]
    return _round(min(base, key=lambda job: losses[job]).lr * scale_factor(rule, times, 1))


def _search(losses: dict[Job, float], name: str, times: int, start: float) -> Iterator[Job]:
    """Rates by factors of two around `start`, until the best one of this batch has a worse neighbour on both sides."""
    middle = start
    while True:
        for factor in (1.0, 0.5, 2.0):
            yield Job(name, times, _round(middle * factor), SEEDS[0])
        better = min((0.5, 1.0, 2.0), key=lambda f: losses[Job(name, times, _round(middle * f), SEEDS[0])])
        if better == 1.0:
            return
        middle *= better


def _round(rate: float) -> float:
    return float(f"{rate:.4g}")


def _stored() -> dict[Job, float]:
    path = DIRECTORY / f"{NAME}.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]["runs"]
    return {
        Job(row["optimizer"], row["times"], row["lr"], row["seed"]): math.inf if row["loss"] is None else row["loss"]
        for row in rows
    }


def _measure(losses: dict[Job, float], until: float) -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    dataset = build_dataset(configuration(Job("adamw", 1, 1e-3, 0)).data)
    for job in jobs(losses):
        if job in losses:
            continue
        if time.monotonic() > until:
            print("time is up: call again to go on")
            return
        started = time.perf_counter()
        losses[job] = train(job, dataset)
        print(f"{job}: {losses[job]:.4f} ({time.perf_counter() - started:.0f} s)", flush=True)
        write_results(NAME, _results(losses))
    print("all runs are made")


def _results(losses: dict[Job, float]) -> dict[str, Any]:
    return {
        "parameters": count_parameters(configuration(next(iter(losses))).model).total,
        "base_batch": BASE,
        "seq_len": LENGTH,
        "tokens": BASE * LENGTH * STEPS,
        "runs": [asdict(job) | {"loss": loss if math.isfinite(loss) else None} for job, loss in losses.items()],
    }


def configuration(job: Job) -> RunConfig:
    return parse_run_config(
        f"""
        seed: {job.seed}
        model: {{family: llama, n_layers: 3, d_model: 64, n_heads: 4, n_kv_heads: 4, d_ff: 192, vocab_size: 512,
                 max_seq_len: {LENGTH}, tie_embeddings: true}}
        data: {{seq_len: {LENGTH}, tokenizer: {{train: bpe, vocab_size: 512, sample: 4MB}}, packing: across,
               workers: 1}}
        train: {{global_batch: {BASE * job.times}, micro_batch: {min(MICRO, BASE * job.times)}, precision: fp32}}
        optimizer: {{name: {job.optimizer}, lr: {job.lr}}}
        schedule: {{name: cosine, floor: {FLOOR}}}
        """,
        NAME,
    )


def train(job: Job, dataset: Dataset) -> float:
    """Validation loss at the end, nats a token; infinite where the run blew up."""
    config = configuration(job)
    model = split_model(config, single_process(torch.device("cpu")), dtype=torch.float32)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    loader = TrainLoader(dataset, config.data, config.seed, config.train.global_batch)
    steps = STEPS // job.times
    rate = build_schedule(config.schedule, peak=job.lr, total_steps=steps, warmup_steps=max(1, round(WARMUP * steps)))
    try:
        for step in range(steps):
            train_step(
                model,
                optimizer,
                loader.batch(step),
                config,
                step=step,
                lr=rate(step),
                micro_batch=int(config.train.micro_batch),
                precision=PRECISIONS["fp32"],
            )
    except NonFiniteStep:
        return math.inf
    text = validation_batches(dataset, seq_len=LENGTH, rows=MICRO, packing="across", max_tokens=32_768)
    return score_text(model.parts[0], text).loss


def table(losses: dict[Job, float]) -> Iterator[list[str]]:
    """The carried runs, as means of their seeds (with their number where one is missing), and the tuned rates."""
    yield ["", *(f"{times}x" for times in TIMES)]
    for name, rule in METHODS:
        found = dict(carried(losses, name, rule))
        yield [_label(name, rule), *(_cell(found.get(times, [])) for times in TIMES)]
    for name in FIRST_RATE:
        tuned = {times: best(losses, name, times) for times in (1, RETUNED)}
        cells = [f"{losses[tuned[times]]:.3f} at {tuned[times].lr:g}" if times in tuned else "" for times in TIMES]
        yield [f"{name}, rate tuned at this batch", *cells]


def _cell(losses: list[float]) -> str:
    if not losses:
        return "–"
    return f"{fmean(losses):.3f}" + ("" if len(losses) == len(SEEDS) else f" ({len(losses)} seed)")


def _label(name: str, rule: str) -> str:
    return f"{name}, rate {'unchanged' if rule == 'none' else 'x sqrt(k)'}"


def plot(losses: dict[Job, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    for (name, rule), style in zip(METHODS, ("o:", "o-", "s-", "^-"), strict=True):
        rows = list(carried(losses, name, rule))
        means = [fmean(each) for _, each in rows]
        line = axes.plot([times for times, _ in rows], means, style, label=_label(name, rule))[0]
        for times, each in rows:
            axes.plot([times] * len(each), each, "_", color=line.get_color())
        if rule != "none":
            tuned = [best(losses, name, times) for times in (1, RETUNED)]
            places = [job.times for job in tuned], [losses[job] for job in tuned]
            axes.plot(*places, "*", markersize=11, color=line.get_color())
    axes.plot([], [], "*", markersize=11, color="gray", label="rate tuned at this batch")
    axes.set_xscale("log", base=2)
    axes.set_xticks(TIMES, [str(times) for times in TIMES])
    axes.set(xlabel=f"batch, times {BASE} sequences of {LENGTH} tokens", ylabel="validation loss (nats/token)")
    axes.legend(fontsize=8)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def carried(losses: dict[Job, float], name: str, rule: str) -> Iterator[tuple[int, list[float]]]:
    """Times the base batch, and the losses of the seeds that were run there."""
    for times in TIMES:
        rate = carried_rate(losses, name, rule, times)
        found = [losses[job] for seed in SEEDS if (job := Job(name, times, rate, seed)) in losses]
        if found:
            yield times, found


if __name__ == "__main__":
    main()
