"""Seconds of an update of 100M parameters, by optimiser, as ratios in one run; bytes of state beside them.

    python -m benchmarks.optimizers [--parameters 100e6] [--threads 1 2] [--rounds 7] [--peers] [--write]

Tensors are those of a decoder of width 1024 (matrices larger than the cache, and norms), in float32. The contenders
take turns, and of each the fastest round counts: what disturbs makes a round longer. `--peers` adds optimisers of
`pytorch_optimizer` and `bitsandbytes` where they are installed; nothing else imports them. Muon is left out unless it
is asked for by `--only`: its time is that of matrix products. `--write` keeps figures in `results/optimizers.json`.

GB/s are those of an update that read every tensor in each of its passes from memory, and wrote what changes once; to be
compared with those of `a += s b` on as many elements, measured first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks._results import write_results
from modelworks.config import OptimizerConfig
from modelworks.config.optimizers import OptimizerName
from modelworks.optim import build_optimizer

WIDTH = 1024
BOUNDS = {"adamw": ("torch AdamW fused", 1 / 0.95), "lamb": ("adamw", 1.5), "lion": ("adamw", 1.0)}
EIGHT_BIT = {name: ("adamw", 2.0) for name in get_args(OptimizerName) if name.endswith("8bit")}
# Bytes an element that are read and written, over all passes; of float32, where a state of 8 bits has 1.
MOVED = {"sgd": 20, "adam": 28, "adamw": 28, "torch AdamW fused": 28, "lamb": 24 + 16, "lars": 8 + 20, "lion": 20,
         "adafactor": 4 + 4 + 4 + 12, "adam8bit": 16, "adamw8bit": 16, "lion8bit": 14}  # fmt: skip


def shapes(parameters: float) -> dict[str, tuple[int, ...]]:
    """Layers of 12 WIDTH^2 parameters until there are enough."""
    made: dict[str, tuple[int, ...]] = {}
    for layer in range(max(1, round(parameters / (12 * WIDTH**2)))):
        for kind in "qkvo":
            made[f"blocks.{layer}.attention.{kind}.weight"] = (WIDTH, WIDTH)
        made[f"blocks.{layer}.feed_forward.up.weight"] = (4 * WIDTH, WIDTH)
        made[f"blocks.{layer}.feed_forward.down.weight"] = (WIDTH, 4 * WIDTH)
        made[f"blocks.{layer}.attention_norm.weight"] = (WIDTH,)
    return made


class Contender:
    """parameters are its own; gradients are shared by all."""

    def __init__(self, name: str, gradients: dict[str, Tensor], build: Callable[[dict[str, Tensor]], Any]) -> None:
        self.name = name
        self._step, self.bytes = build({n: torch.ones_like(g).requires_grad_() for n, g in gradients.items()})
        self.seconds: list[float] = []

    def run(self) -> None:
        started = time.perf_counter()
        self._step()
        self.seconds.append(time.perf_counter() - started)


def ours(name: str, gradients: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    def build(parameters: dict[str, Tensor]) -> Any:
        optimizer = build_optimizer(parameters.items(), OptimizerConfig(name=name))  # type: ignore[arg-type]
        return lambda: optimizer.step(gradients, 1e-4), optimizer.state_bytes()

    return build


def others(make: Callable[[list[Any]], Any], gradients: dict[str, Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    def build(parameters: dict[str, Tensor]) -> Any:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer = make([{"params": list(parameters.values())}])
        return optimizer.step, None

    return build


def peers() -> dict[str, Callable[[list[Any]], Any]]:
    found: dict[str, Callable[[list[Any]], Any]] = {}
    try:
        import pytorch_optimizer as other

        found |= {f"pytorch-optimizer {n}": getattr(other, n) for n in ("Lamb", "Lion", "LARS", "AdaFactor")}
    except ImportError:
        print("pytorch_optimizer is not installed")
    try:
        from bitsandbytes import optim

        found |= {f"bitsandbytes {n}": getattr(optim, n) for n in ("AdamW8bit", "Lion8bit", "AdamW32bit")}
    except ImportError:
        print("bitsandbytes is not installed")
    return found


def bandwidth(elements: int, rounds: int) -> float:
    """Bytes a second of a += s b: two are read, one is written."""
    a, b = torch.ones(elements), torch.ones(elements)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        a.add_(b, alpha=0.5)
        seconds.append(time.perf_counter() - started)
    return 12 * elements / min(seconds)


def measure(arguments: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    wanted = shapes(arguments.parameters)
    generator = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=generator) for name, shape in wanted.items()}
    elements = sum(gradient.numel() for gradient in gradients.values())
    makers = {"torch AdamW fused": others(lambda g: torch.optim.AdamW(g, fused=True), gradients)}
    usual = [name for name in get_args(OptimizerName) if name != "muon"]
    makers |= {name: ours(name, gradients) for name in arguments.only or usual}
    makers |= {name: others(make, gradients) for name, make in (peers() if arguments.peers else {}).items()}
    memory = bandwidth(elements, arguments.rounds)
    print(f"{threads} threads  a += s b: {memory / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = [{"optimizer": "a += s b", "threads": threads, "bytes_per_second": memory}]
    for name, build in makers.items():  # each beside AdamW, so that drift of the machine cancels
        pair = [Contender(name, gradients, build)]
        if name != "torch AdamW fused":
            base = "torch AdamW fused" if name == "adamw" else "adamw"
            pair.append(Contender(base, gradients, makers.get(base, makers["torch AdamW fused"])))
        try:
            for _ in range(arguments.rounds + 1):
                for contender in pair:
                    contender.run()
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{name}: does not run here: {error}")
            continue
        best = [min(contender.seconds[1:]) for contender in pair]  # the first compiles and makes state
        against = best[0] / best[-1]
        speed = MOVED[name] * elements / best[0] if name in MOVED else None
        row: dict[str, Any] = {
            "optimizer": name, "threads": threads, "seconds": best[0], "against": pair[-1].name, "ratio": against,
            "bytes_per_parameter": pair[0].bytes / elements if pair[0].bytes is not None else None,
        }  # fmt: skip
        bound = (BOUNDS | EIGHT_BIT).get(name)
        row["bound"] = bound[1] if bound else None
        row["bytes_per_second"] = speed
        rows.append(row)
        met = "" if not bound else f"  bound {bound[1]:.2f} {'met' if against <= bound[1] else 'MISSED'}"
        size = "" if row["bytes_per_parameter"] is None else f"{row['bytes_per_parameter']:6.3f} B/parameter"
        moved = "" if speed is None else f"{speed / 1e9:5.1f} GB/s  "
        took = f"{best[0] * 1e3:8.1f} ms  {moved}{against:5.2f} x {pair[-1].name}"
        print(f"{threads} threads  {name:28} {took}{met}  {size}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="optimisers of ours, by name")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = [row for threads in arguments.threads for row in measure(arguments, threads)]
    if arguments.write:
        print(write_results("optimizers", {"parameters": arguments.parameters, "rows": rows}))


if __name__ == "__main__":
    main()
