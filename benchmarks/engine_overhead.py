"""What the engine costs a token beside the model: scheduling, batch, sampling, text, deltas.

    python -m benchmarks.engine_overhead [--sequences N] [--steps N]

An executor that computes nothing gives the same logits at every step, by a power law (-1.5 log rank, tokens in random
order), as the probabilities of a language's next token are in the rough. So the time of a step is all that is not the
model's. Microseconds a token: the median over steps, divided by the running sequences. The small vocabulary shows
what Python does, the large one (SmolLM2's) adds what sampling does with the logits. Text comes from a tokeniser of 300
tokens in each case: a token that it does not know has no text, and costs a little less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks._results import write_results
from modelworks.config import ModelConfig, TokenizerTraining
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.serve import EngineOptions, Request, SamplingParams
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.core import EngineCore

TEXT = "The quick brown fox doesn't jump over 12,345 lazy dogs. naïve café\n"
PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "greedy, two stop strings": {"temperature": 0.0, "stop": ("\n\n", "###")},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


class Idle:
    """An executor without a model."""

    name, kv_dtype, bytes_per_block, n_blocks, block_size = "idle", "fp32", 1, 100_000, 16

    def __init__(self, vocab_size: int, rows: int) -> None:
        self.config = ModelConfig(n_layers=1, d_model=8, n_heads=1, vocab_size=vocab_size, max_seq_len=1 << 20)
        self.seconds = 0.0  # of the last step, its own
        by_rank = -1.5 * torch.arange(1, vocab_size + 1).log()
        random = torch.Generator().manual_seed(0)
        self._logits = torch.stack([by_rank[torch.randperm(vocab_size, generator=random)] for _ in range(rows)])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def run(self, batch: RaggedBatch) -> Tensor:
        began = time.perf_counter()
        logits = self._logits[: len(batch.wanted)].clone()  # whoever samples may overwrite them
        self.seconds = time.perf_counter() - began
        return logits

    def close(self) -> None: ...


def microseconds_a_token(vocab_size: int, parameters: dict[str, Any], sequences: int, steps: int) -> float:
    tokenizer = train_tokenizer([TEXT] * 60, TokenizerTraining(vocab_size=300))
    options = EngineOptions(max_running=sequences, token_budget=max(512, 2 * sequences))
    executor = Idle(vocab_size, sequences)
    engine = EngineCore(executor, options, max_model_len=1 << 20, tokenizer=tokenizer)
    for number in range(sequences):
        params = SamplingParams(max_tokens=None, ignore_eos=True, seed=number, **parameters)
        engine.submit(Request(str(number), [5] * 50, params))
    seconds = []
    for number in range(steps + 20):
        began = time.perf_counter()
        deltas = engine.step()
        if number >= 20:  # all prompts are computed
            assert len(deltas) == sequences
            seconds.append(time.perf_counter() - began - executor.seconds)
    return round(statistics.median(seconds) / sequences * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"sequences": arguments.sequences, "steps": arguments.steps}
    for vocab_size in (1000, 49152):
        results[f"microseconds a token, vocabulary {vocab_size}"] = {
            name: microseconds_a_token(vocab_size, parameters, arguments.sequences, arguments.steps)
            for name, parameters in PARAMETERS.items()
        }
    print(results)
    print(write_results("engine_overhead", results))


if __name__ == "__main__":
    main()
