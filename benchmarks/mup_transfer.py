"""Does the best learning rate of a narrow model stay the best of a wider one? Under µP, and without.

    python -m benchmarks.mup_transfer --seconds 500   # goes on where it was, for so long; results/mup_transfer.json
    python -m benchmarks.mup_transfer --plot          # draws the plot again from what is written

The same small byte-level model is trained on the Python standard library's own source at widths 64 to 512, each at
rates a factor of 2 apart, once with `mup_base_width: 64` and once without; nothing else differs, tokens and initial
random numbers included. At width 64 both are the same model, trained once. A width starts at the best rate of the one
before and goes on, up and down, until the best it has seen has worse ones on both sides (`MARGIN` of them; fewer at the
dearest width). Each trial is written when it is done, so the command can be stopped and called again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._results import DIRECTORY, write_results
from benchmarks.residual_depth import standard_library_bytes
from modelworks.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from modelworks.data import Batch
from modelworks.models import CausalContext
from modelworks.optim import build_optimizer, build_schedule
from modelworks.parallel import single_process, split_model
from modelworks.train import PRECISIONS, NonFiniteStep, apply_gradients, compute_gradients
from modelworks.train.loss import vocabulary_loss

BASE, WIDTHS = 64, (64, 128, 256, 512)
SEEDS = {64: (0, 1), 128: (0, 1), 256: (0,), 512: (0,)}
MARGIN = {64: 2, 128: 2, 256: 2, 512: 1}  # rates on each side of the best that must be worse
STEPS, WARMUP, ROWS, LENGTH = 120, 30, 8, 64
INIT_STD = 0.06  # with 0.02 so narrow a model's curves are too rough to have one best rate
EXPECTED = {64: 5, 128: 10, 256: 30, 512: 110}  # seconds a trial takes on one busy core
FIRST = -7  # the first rate tried at width 64 is 2 to this power
VALIDATION_ROWS = 256
DIVERGED = 10.0  # nats a byte; uniform is 5.55
NAME = "mup_transfer"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "mup_transfer.png"


@dataclass(frozen=True)
class Trial:
    """rate: 2 to the power `exponent`. mup: whether the model has a base; loss: of validation, nats a byte."""

    width: int
    mup: bool
    exponent: int
    seed: int
    loss: float
    train_loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop before a trial that would go beyond")
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    trials = read()
    if not arguments.plot:
        measure(trials, arguments.seconds)
    plot(trials)


def read() -> list[Trial]:
    path = DIRECTORY / f"{NAME}.json"
    if not path.exists():
        return []
    return [Trial(**trial) for trial in json.loads(path.read_text(encoding="utf-8"))["results"]["trials"]]


def measure(trials: list[Trial], seconds: float) -> None:
    torch.set_num_threads(1)
    training, validation = standard_library_bytes()
    until = time.monotonic() + seconds
    while (wanted := next(next_trials(trials), None)) is not None:
        if time.monotonic() + EXPECTED[wanted[0]] > until:
            print("time is up; call again to go on")
            break
        trials.append(run(*wanted, training, validation))
        print(trials[-1], flush=True)
        results = {
            "model": model_config(64, mup=True).model_dump(exclude_defaults=True),
            "steps": STEPS,
            "warmup": WARMUP,
            "rows": ROWS,
            "length": LENGTH,
            "best": best_rates(trials),
            "trials": [asdict(trial) for trial in trials],
        }
        write_results(NAME, results)


def next_trials(trials: list[Trial]) -> Iterator[tuple[int, bool, int, int]]:
    """What is still to be tried, the first first: (width, mup, exponent, seed)."""
    starts = {True: FIRST, False: FIRST}
    for width in WIDTHS:
        for seed in SEEDS[width]:
            for mup in (True,) if width == BASE else (True, False):
                done = {t.exponent: t.loss for t in trials if (t.width, t.mup, t.seed) == (width, mup, seed)}
                missing = _missing(done, starts[mup], MARGIN[width])
                yield from ((width, mup, exponent, seed) for exponent in missing)
        for mup in starts:
            if (best := _mean_best(trials, width, mup or width == BASE)) is not None:
                starts[mup] = best


def _missing(done: dict[int, float], start: int, margin: int) -> list[int]:
    if not done:
        return [start]
    best = min(done, key=lambda exponent: done[exponent])
    wanted = {best + offset for offset in range(-margin, margin + 1)} | {start}
    return sorted(wanted - done.keys(), key=lambda exponent: abs(exponent - best))


def best_rates(trials: list[Trial]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for mup in (True, False):
        for width in WIDTHS:
            best = _mean_best(trials, width, mup or width == BASE)
            if best is not None:
                found.setdefault("mup" if mup else "standard", {})[str(width)] = 2.0**best
    return found


def curve(trials: list[Trial], width: int, mup: bool) -> dict[int, float]:
    """Exponent of the rate -> validation loss, the mean over the seeds that tried it."""
    losses: dict[int, list[float]] = {}
    for trial in trials:
        if (trial.width, trial.mup) == (width, mup or width == BASE):
            losses.setdefault(trial.exponent, []).append(trial.loss)
    most = max(map(len, losses.values()), default=0)
    return {exponent: sum(each) / len(each) for exponent, each in sorted(losses.items()) if len(each) == most}


def _mean_best(trials: list[Trial], width: int, mup: bool) -> int | None:
    means = curve(trials, width, mup)
    return min(means, key=lambda exponent: means[exponent]) if means else None


def model_config(width: int, *, mup: bool) -> ModelConfig:
    return ModelConfig(
        n_layers=2,
        d_model=width,
        n_heads=width // 16,
        d_ff=3 * width,
        vocab_size=256,
        max_seq_len=LENGTH,
        init_std=INIT_STD,
        mup_base_width=BASE if mup else None,
    )


def run(width: int, mup: bool, exponent: int, seed: int, training: Tensor, validation: Tensor) -> Trial:
    config = RunConfig(
        seed=seed,
        model=model_config(width, mup=mup),
        data=DataConfig(tokenizer="none", seq_len=LENGTH, packing="across"),  # bytes need no tokenizer
        optimizer=OptimizerConfig(lr=2.0**exponent),
        train=TrainConfig(global_batch=ROWS, micro_batch=ROWS, device="cpu", precision="fp32"),
    )
    model = split_model(config, single_process(torch.device("cpu")), dtype=torch.float32)
    optimizer = build_optimizer(model.stored.items(), config.optimizer, model=config.model, split=model.split)
    rate = build_schedule(
        ScheduleConfig(name="cosine"), peak=config.optimizer.lr, total_steps=STEPS, warmup_steps=WARMUP
    )
    model.train()
    losses = []
    for step in range(STEPS):
        batch = draw(training, ROWS, 1_000_003 * seed + step)
        try:
            gradients = compute_gradients(
                model, batch, config, step=step, micro_batch=ROWS, precision=PRECISIONS["fp32"]
            )
            done = apply_gradients(model, optimizer, gradients, config, lr=rate(step))
        except NonFiniteStep:
            losses.append(float("inf"))
            break
        losses.append(done.loss)
    model.train(False)
    batch = draw(validation, VALIDATION_ROWS, 7)
    (part,) = model.parts.values()
    with torch.no_grad():
        hidden = part(batch.tokens, batch.positions, CausalContext())
        nll = vocabulary_loss(hidden, part.head_weight(), batch.targets, batch.loss_weights).nll
    loss = float(nll) / batch.targets.numel()
    loss = min(loss, DIVERGED) if loss == loss else DIVERGED
    return Trial(width, mup, exponent, seed, loss, min(sum(losses[-10:]) / len(losses[-10:]), DIVERGED))


def draw(data: Tensor, rows: int, index: int) -> Batch:
    """Rows of bytes and those that follow, by a generator of their own."""
    generator = torch.Generator().manual_seed(index)
    starts = torch.randint(0, data.numel() - LENGTH - 1, (rows,), generator=generator)
    bytes_ = data[starts[:, None] + torch.arange(LENGTH + 1)]
    positions = torch.arange(LENGTH).repeat(rows, 1)
    ids, weights = torch.zeros(rows, LENGTH, dtype=torch.int32), torch.ones(rows, LENGTH)
    return Batch(bytes_[:, :-1].contiguous(), positions, bytes_[:, 1:].contiguous(), weights, ids)


def plot(trials: list[Trial]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True)
    for axis, mup in zip(axes, (False, True), strict=True):
        for place, width in enumerate(WIDTHS):
            losses = curve(trials, width, mup)
            if not losses:
                continue
            colour = pyplot.get_cmap("viridis")(place / len(WIDTHS))
            rates = [2.0**exponent for exponent in losses]
            axis.plot(rates, list(losses.values()), marker="o", markersize=3, color=colour, label=f"width {width}")
            best = min(losses, key=lambda exponent: losses[exponent])
            axis.plot([2.0**best], [losses[best]], marker="*", markersize=12, color=colour)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="learning rate", title="µP, base width 64" if mup else "standard")
        axis.grid(alpha=0.3)
    lowest = min(trial.loss for trial in trials)
    axes[0].set(ylabel="validation loss, nats a byte", ylim=(lowest - 0.02, lowest + 0.34))
    axes[0].legend()
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    main()
