"""Why residual connections: gradients at initialisation and loss after training, with and without, by depth.

    python -m benchmarks.residual_depth            # measures, writes results/residual_depth.json and the plot
    python -m benchmarks.residual_depth --plot     # draws the plot again from the written results

The same small byte-level model is trained on the Python standard library's own source text at depths 4 to 64, once
with `residual: true` and once with `residual: false`; nothing else differs, the initial weights included.
"""

from __future__ import annotations

import json
import math
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F

from benchmarks._results import DIRECTORY, write_results
from modelworks.config import ModelConfig
from modelworks.models import CausalContext, Transformer, initialize

DEPTHS = (4, 8, 16, 32, 64)
STEPS, WARMUP, ROWS, LENGTH, LEARNING_RATE = 100, 20, 16, 64, 2e-3
GRADIENT_SEEDS = (0, 1, 2)
PLOT = Path(__file__).parent.parent / "docs" / "images" / "residual_depth.png"


def main() -> None:
    if "--plot" not in sys.argv:
        write_results("residual_depth", measure())
    plot(json.loads((DIRECTORY / "residual_depth.json").read_text(encoding="utf-8"))["results"])


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    training, validation = standard_library_bytes()
    runs = []
    with Progress() as progress:
        # A step costs about as much as its layers.
        task = progress.add_task("training", total=2 * sum(DEPTHS) * STEPS)
        for depth in DEPTHS:
            for residual in (True, False):
                gradients = [gradient_norms(build(depth, residual, seed), training) for seed in GRADIENT_SEEDS]
                start = time.perf_counter()
                loss, diverged = train(
                    build(depth, residual, seed=0), training, validation, lambda n=depth: progress.advance(task, n)
                )
                runs.append(
                    {
                        "depth": depth,
                        "residual": residual,
                        # root mean square over the seeds, one number a block
                        "gradient_norm_by_layer": torch.tensor(gradients).square().mean(0).sqrt().tolist(),
                        "validation_loss": loss,
                        "diverged": diverged,
                        "seconds": round(time.perf_counter() - start, 1),
                    }
                )
    return {
        "config": build(4, True, 0).config.model_dump(),
        "steps": STEPS,
        "rows": ROWS,
        "length": LENGTH,
        "learning_rate": LEARNING_RATE,
        "unigram_loss": unigram_loss(training, validation),
        "runs": runs,
    }


def standard_library_bytes(limit: int = 4_000_000) -> tuple[Tensor, Tensor]:
    """Source text as bytes: the first files by name to train on, and later, different files to validate."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    cut = len(files) * 9 // 10
    texts = [b"".join(file.read_bytes() for file in part)[:limit] for part in (files[:cut], files[cut:])]
    training, validation = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts)
    return training, validation


def build(depth: int, residual: bool, seed: int) -> Transformer:
    """init_std = 1/sqrt(d_model) and a tiny norm_eps keep the signal's scale through any number of layers, so that what
    is seen without residual connections is not merely small weights or the norm's epsilon."""
    config = ModelConfig(
        n_layers=depth,
        d_model=48,
        n_heads=3,
        d_ff=128,
        vocab_size=256,
        max_seq_len=LENGTH,
        residual=residual,
        init_std=48**-0.5,
        norm_eps=1e-8,
    )
    model = Transformer(config)
    initialize(model, seed)
    with torch.no_grad():
        # First predictions near uniform, whatever the depth.
        model.head.weight.mul_(0.1)
    return model


def batch(data: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Batch `index`: rows of bytes and the bytes that follow, drawn by a generator of its own."""
    generator = torch.Generator().manual_seed(index)
    starts = torch.randint(0, data.numel() - LENGTH - 1, (ROWS,), generator=generator)
    rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    logits = model.logits(model(tokens, positions, CausalContext()))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradient_norms(model: Transformer, data: Tensor) -> list[float]:
    """The 2-norm of the loss's gradient over all parameters of each block, before any update."""
    loss_of(model, *batch(data, index=0)).backward()
    return [
        math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in block.parameters()))
        for block in model.blocks.values()
    ]


def train(model: Transformer, training: Tensor, validation: Tensor, advance: Any) -> tuple[float, bool]:
    """Validation loss (nats/byte) after STEPS steps of AdamW with warmup and clipping; and whether it blew up."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP)
        loss = loss_of(model, *batch(training, index=1 + step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        advance()
    with torch.no_grad():
        losses = [float(loss_of(model, *batch(validation, index=10_000 + i))) for i in range(16)]
    mean = sum(losses) / len(losses)
    return mean, not math.isfinite(mean)


def unigram_loss(training: Tensor, validation: Tensor) -> float:
    """What guessing by byte frequency alone costs on the validation text, nats/byte."""
    frequencies = (torch.bincount(training, minlength=256) + 1).double()
    return float(-(frequencies / frequencies.sum()).log()[validation].mean())


def plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colors = pyplot.get_cmap("viridis")
    for run in results["runs"]:
        depth, norms = run["depth"], run["gradient_norm_by_layer"]
        color = colors(DEPTHS.index(depth) / len(DEPTHS))
        style = "-" if run["residual"] else "--"
        where = [(layer + 0.5) / depth for layer in range(depth)]
        left.semilogy(where, norms, style, color=color, label=f"{depth} layers" if run["residual"] else None)
    left.set(xlabel="layer / depth", ylabel="gradient norm of the block", title="At initialisation")
    left.plot([], [], "-", color="gray", label="residual")
    left.plot([], [], "--", color="gray", label="no residual")
    left.legend(fontsize=8)
    for residual, style, label in ((True, "o-", "residual"), (False, "s--", "no residual")):
        chosen = [run for run in results["runs"] if run["residual"] == residual]
        right.plot([run["depth"] for run in chosen], [run["validation_loss"] for run in chosen], style, label=label)
    right.axhline(results["unigram_loss"], color="gray", linestyle=":", label="byte frequencies alone")
    right.set_xscale("log", base=2)
    right.set_xticks(DEPTHS, [str(depth) for depth in DEPTHS])
    title = f"After {results['steps']} steps"
    right.set(xlabel="layers", ylabel="validation loss (nats/byte)", title=title)
    right.legend(fontsize=8)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    main()
