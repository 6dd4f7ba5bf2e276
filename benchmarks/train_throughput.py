"""Tokens per second of training, against Hugging Face's Trainer, LitGPT and a plain loop over transformers' Llama.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.train_throughput [--precision fp32|bf16] [--rounds N]

A Llama of 15.7M parameters, batches of 16 x 256 tokens, whole steps: forward, loss, backward, clipping, AdamW. Every
contender lives in a process of its own and all take turns, one step at a time, so that a slow minute of the machine
falls on all of them; the median of a contender's steps counts. Each runs as it is and compiled; where a precision has
two forms (pure bfloat16, autocast) both run, and the best of everything a peer can do is what we are compared with.
Ours is what `modelworks train` runs: the same loop and step (`benchmarks/_contenders.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._contenders import CONTENDERS, ROWS, SEQ_LEN, SHAPE, VOCABULARY
from benchmarks._results import write_results
from modelworks.config import ModelConfig, count_parameters, training_flops_per_token
from modelworks.hardware import Machine, choose_threads, facts, measure_machine, peak_flops

FORMS = {"fp32": ("fp32",), "bf16": ("bf16", "bf16-autocast")}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENS = ROWS * SEQ_LEN
LOSS_CHUNK = 1024  # tokens of one product with the vocabulary


@dataclass
class Contender:
    name: str
    precision: str
    compiled: bool
    process: subprocess.Popen[str] = field(repr=False)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int = 0

    @property
    def ours(self) -> bool:
        return self.name == "modelworks"

    @property
    def tokens_per_second(self) -> float:
        return TOKENS / statistics.median(self.seconds)

    def step(self) -> None:
        answer = self._ask("1\n")
        self.seconds.append(answer["seconds"])
        self.peak_memory = answer["peak_memory"]

    def _ask(self, text: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} {self.precision}: ended with {self.process.wait()}")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=FORMS, action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=5, help="steps of every contender")
    parser.add_argument("--no-results", action="store_true", help="print only, write no file")
    arguments = parser.parse_args()
    threads = int(choose_threads(facts()).value)
    torch.set_num_threads(threads)
    machine = measure_machine()
    model = ModelConfig(family="llama", vocab_size=VOCABULARY, tie_embeddings=True, **SHAPE)
    flops = training_flops_per_token(model, SEQ_LEN).training
    print(f"{count_parameters(model).total:,} parameters, {flops / 1e6:.1f} MFLOP a token, {threads} threads")
    results = {
        "model": SHAPE | {"vocab_size": VOCABULARY, "parameters": count_parameters(model).total},
        "tokens_per_step": TOKENS,
        "flops_per_token": flops,
        "precisions": {
            precision: compare(precision, arguments.rounds, flops, machine)
            for precision in arguments.precision or FORMS
        },
    }
    if not arguments.no_results:
        print(write_results("train_throughput", results, machine=machine))


def compare(precision: str, rounds: int, flops: float, machine: Machine) -> dict[str, Any]:
    """One precision: every contender in all its forms, taking turns."""
    peak = peak_flops(machine, precision).flops
    contenders, failures = start(precision)
    for turn in range(rounds):
        for contender in contenders:
            print(f"\r{precision} round {turn + 1}/{rounds}: {contender.name:12}", end="", flush=True)
            contender.step()
    print()
    for contender in contenders:
        contender.process.kill()
        contender.process.wait()
    shapes = shape_rates(precision)
    ours = max((c for c in contenders if c.ours), key=lambda c: c.tokens_per_second)
    rows = []
    for contender in sorted(contenders, key=lambda c: -c.tokens_per_second):
        rate = contender.tokens_per_second * flops
        form = f"{contender.precision}{', compiled' if contender.compiled else ''}"
        rows.append(
            {
                "contender": contender.name,
                "form": form,
                "tokens_per_second": round(contender.tokens_per_second),
                "gflops": round(rate / 1e9, 1),
                "share_of_gemm_rate": round(rate / peak, 3),
                "share_of_shapes_rate": round(rate / shapes["time_weighted"], 3),
                "peak_memory": contender.peak_memory,
                "step_seconds": [round(value, 4) for value in contender.seconds],
            }
        )
        print(
            f"  {contender.name:10} {form:25} {contender.tokens_per_second:6.0f} tokens/s {rate / 1e9:6.1f} GFLOP/s "
            f"{rate / peak:6.1%} of GEMM {rate / shapes['time_weighted']:6.1%} of shapes "
            f"{contender.peak_memory / 2**20:6.0f} MiB"
        )
    best = {
        name: max(c.tokens_per_second for c in contenders if c.name == name)
        for name in CONTENDERS
        if name != "modelworks" and any(c.name == name for c in contenders)
    }
    ratios = {name: round(ours.tokens_per_second / speed, 3) for name, speed in best.items()}
    print(f"  ratio to the best form of each: {', '.join(f'{n} {r:.2f}' for n, r in ratios.items())}")
    return {
        "gemm_rate": peak,
        "shape_rates": shapes,
        "contenders": rows,
        "ratios": ratios,
        "ratio_to_best_peer": min(ratios.values(), default=None),
        "failures": failures,
    }


def start(precision: str) -> tuple[list[Contender], dict[str, str]]:
    """All contenders, warmed up one after another; and what did not run, with the end of its complaint."""
    contenders, failures = [], {}
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for name in CONTENDERS:
        for form in FORMS[precision] if name != "modelworks" else FORMS[precision][:1]:
            for mode in ("plain", "compiled"):
                started = time.monotonic()
                command = [sys.executable, "-m", "benchmarks._contenders", name, form, mode]
                complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process lives
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=complaints,
                    text=True,
                    env=environment,
                    cwd=Path(__file__).parent.parent,
                )
                contender = Contender(name, form, mode == "compiled", process)
                try:
                    contender.answer()
                except RuntimeError:
                    complaints.seek(0)
                    failures[f"{name} {form} {mode}"] = complaints.read().strip().splitlines()[-1][:300]
                    print(f"  {name} {form} {mode}: does not run: {failures[f'{name} {form} {mode}']}")
                    continue
                contenders.append(contender)
                print(f"  {name} {form} {mode}: warm after {time.monotonic() - started:.0f} s", flush=True)
    return contenders, failures


def shape_rates(precision: str) -> dict[str, Any]:
    """FLOP/s of the model's own products: forward (y = x W^T), for inputs (dx = dy W), for weights (dW = dy^T x).

    `time_weighted`: all their FLOPs over all their times, the rate that a step of nothing but products would have.
    """
    d, ff = SHAPE["d_model"], SHAPE["d_ff"]
    kv = d // SHAPE["n_heads"] * SHAPE["n_kv_heads"]
    layers, chunks = SHAPE["n_layers"], TOKENS // LOSS_CHUNK
    # name: tokens, in, out, times a step
    products = {
        "q, k, v": (TOKENS, d, d + 2 * kv, layers),
        "o": (TOKENS, d, d, layers),
        "gate, up": (TOKENS, d, 2 * ff, layers),
        "down": (TOKENS, ff, d, layers),
        "head": (LOSS_CHUNK, d, VOCABULARY, chunks),
    }
    rates, operations, seconds = {}, 0.0, 0.0
    for name, (tokens, d_in, d_out, times) in products.items():
        x = torch.randn(tokens, d_in).to(DTYPES[precision])
        weight = torch.randn(d_out, d_in).to(DTYPES[precision])
        change = torch.randn(tokens, d_out).to(DTYPES[precision])
        flops = 2.0 * tokens * d_in * d_out
        y, dx, dw = torch.empty_like(change), torch.empty_like(x), torch.empty_like(weight)
        rates[name] = {}
        for kind, a, b, out in (
            ("forward", x, weight.T, y),
            ("inputs", change, weight, dx),
            ("weights", change.T, x, dw),
        ):
            took = _median_seconds(a, b, out)
            rates[name][kind] = round(flops / took / 1e9, 1)
            operations, seconds = operations + times * flops, seconds + times * took
    return {"gflops": rates, "time_weighted": operations / seconds}


def _median_seconds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, budget: float = 0.3) -> float:
    times: list[float] = []
    torch.mm(a, b, out=out)
    while sum(times) < budget:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
