"""Whether torch.compile pays for a decode step in torch on a CPU: compiled for one number of sequences, against the
executor as it is.

    python -m benchmarks.serve_compiled

whole: from tokens to logits in one graph, attention and the cache's update in it. between: attention and cache stay as
they are, and what lies between two of them is a graph. Both with constant weights (`freezing`), which the compiler
packs as `modelworks.models.weights.PACKED` does. A model of SmolLM2-135M's shape with 6 layers of 30, since compiling
takes long, and random weights; 160 keys a sequence; in turns, the best of 20.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor

from benchmarks._results import write_results
from benchmarks.serve_kv import BLOCK, decoding
from modelworks.config import ModelConfig
from modelworks.models import Transformer, initialize
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.paged import PagedContext
from modelworks.serve.torch_executor import TorchExecutor

SHAPE = {"n_layers": 6, "d_model": 576, "n_heads": 9, "n_kv_heads": 3, "d_ff": 1536, "vocab_size": 49152}


class Ready(PagedContext):
    """Prepared before the compiled step, since that asks tensors for numbers."""

    def prepare(self, *arguments: Any) -> None:
        pass


class Apart(Ready):
    @torch._dynamo.disable
    def attend(self, *arguments: Any, **options: Any) -> Tensor:
        return super().attend(*arguments, **options)


def main() -> None:
    torch.set_num_threads(2)
    torch._inductor.config.freezing = True
    torch._dynamo.config.recompile_limit = 64
    rows: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = Transformer(ModelConfig(**SHAPE, tie_embeddings=True, max_seq_len=2048))
        initialize(model, seed=0)
        model = model.to(dtype).eval().requires_grad_(False)
        executor = TorchExecutor(model, n_blocks=32 * 10, block_size=BLOCK)
        for n in (1, 8, 32):
            for name, context in (("between", Apart), ("whole", Ready)):
                key = f"{str(dtype).removeprefix('torch.')} decode {n} {name}"
                rows[key] = compared(model, executor, decoding(n), context, dtype)
                print(key, rows[key], flush=True)
    print(write_results("serve_compiled", {"shape": SHAPE, "threads": 2, "steps": rows}))


@torch.no_grad()
def compared(
    model: Transformer, executor: TorchExecutor, batch: RaggedBatch, kind: type[Ready], dtype: torch.dtype
) -> dict[str, float]:
    torch._dynamo.reset()
    context = kind(executor._cache, batch)
    tokens, positions = batch.tokens[None], batch.positions[None]

    @torch.compile(dynamic=False)
    def forward(tokens: Tensor, positions: Tensor) -> Tensor:
        return model.logits(model(tokens, positions, context)[0]).float()

    def compiled() -> Tensor:
        PagedContext.prepare(context, len(batch.tokens), None, dtype, torch.device("cpu"))
        return forward(tokens, positions)

    started = time.perf_counter()
    compiled()
    took = time.perf_counter() - started
    steps: dict[str, Callable[[], Tensor]] = {"eager": lambda: executor.run(batch), "compiled": compiled}
    best = dict.fromkeys(steps, math.inf)
    for turn in range(21):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return {
        "eager_ms": 1e3 * best["eager"],
        "compiled_ms": 1e3 * best["compiled"],
        "speedup": best["eager"] / best["compiled"],
        "compile_s": took,
        "largest_difference": float((executor.run(batch) - compiled()).abs().max()),
    }


if __name__ == "__main__":
    main()
