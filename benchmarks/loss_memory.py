"""Peak memory of the vocabulary loss: chunked, against logits computed whole.

    python -m benchmarks.loss_memory

Each case runs in a process of its own; the figure is the growth of its peak resident memory over the inputs
(hidden states, head and their gradients included in the growth). Writes results/loss_memory.json.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

CASES = [(4096, 384, 8192), (4096, 576, 49152), (2048, 1024, 128256)]  # tokens, width, vocabulary
PRECISIONS = ["fp32", "bf16"]


def main() -> None:
    from benchmarks._results import write_results

    rows = []
    for tokens, width, vocabulary in CASES:
        for precision in PRECISIONS:
            figures = {}
            for kind in ("chunked", "whole"):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.loss_memory",
                    kind,
                    str(tokens),
                    str(width),
                    str(vocabulary),
                    precision,
                ]
                peak, seconds = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
                figures[kind] = {"peak_bytes": int(peak), "seconds": float(seconds)}
            ratio = figures["whole"]["peak_bytes"] / figures["chunked"]["peak_bytes"]
            rows.append(
                {"tokens": tokens, "width": width, "vocabulary": vocabulary, "precision": precision, **figures,
                 "whole_over_chunked": ratio}
            )  # fmt: skip
            print(
                f"{tokens} tokens x {vocabulary} vocabulary, {precision}: chunked "
                f"{figures['chunked']['peak_bytes'] / 2**20:.0f} MiB in {figures['chunked']['seconds']:.2f} s, whole "
                f"{figures['whole']['peak_bytes'] / 2**20:.0f} MiB in {figures['whole']['seconds']:.2f} s "
                f"({ratio:.1f} x the memory)",
                flush=True,
            )
    print(write_results("loss_memory", rows))


def measure(kind: str, tokens: int, width: int, vocabulary: int, precision: str) -> None:
    """Print the growth of the peak in bytes, and seconds of forward and backward (the second of two)."""
    import torch
    import torch.nn.functional as F

    from modelworks.train import vocabulary_loss

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    head = (0.02 * torch.randn(vocabulary, width)).to(dtype).requires_grad_()
    targets, weights = torch.randint(0, vocabulary, (tokens,)), torch.ones(tokens)

    def run(count: int) -> None:
        part = hidden[:count]
        if kind == "chunked":
            loss = vocabulary_loss(part, head, targets[:count], weights[:count]).objective
        else:
            loss = F.cross_entropy((part @ head.T).float(), targets[:count], reduction="sum")
        loss.backward()
        hidden.grad = head.grad = None

    run(8)  # loads the kernels
    start = _reset_peak()
    run(tokens)
    growth = _status("VmHWM") - start
    begin = time.perf_counter()
    run(tokens)
    print(growth, time.perf_counter() - begin)


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
    else:
        main()
