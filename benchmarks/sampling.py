"""What sampling costs a step: 32 sequences, SmolLM2's 49,152 logits each, of real text.

    python -m benchmarks.sampling [--rows N]

Logits are those of SmolLM2-135M-Instruct at the last positions of a text. Microseconds of a whole `Sampler.sample`
call, the best of many, on one thread: compiled, and in torch alone. The peer is transformers' processors on the whole
batch and `torch.multinomial` (`argmax` where it is greedy). Structures: the first twenty steps of an output.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor

from benchmarks._results import write_results
from benchmarks._serving import smollm2
from modelworks.checkpoint import LoadedModel, load_model
from modelworks.models import CausalContext
from modelworks.serve import draws
from modelworks.serve.params import SamplingParams, Structure
from modelworks.serve.sampler import Sampler, SamplingState

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "temperature 0.8, top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1.5, top-p 0.99": {"temperature": 1.5, "top_p": 0.99},
    "min-p 0.05": {"min_p": 0.05},
    "typical 0.9": {"typical_p": 0.9},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
STRUCTURES = {
    "any JSON object": Structure.json_object(),
    "a schema": Structure.json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0},
                "kind": {"enum": ["cat", "dog", "horse"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age", "kind", "tags"],
        }
    ),
    "a date": Structure.regex(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"),
}


def best(call: Callable[[], object], times: int) -> float:
    """Microseconds of the fastest of so many calls."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(min(seconds) * 1e6, 1)


def ours(sampler: Sampler, logits: Tensor, prompt: list[int], settings: dict[str, Any], times: int) -> float:
    states = [sampler.start(SamplingParams(**settings), prompt, seed) for seed in range(len(logits))]
    # Penalties overwrite the logits again and again: their values wander off, at the same cost.
    scratch = logits.clone()
    return best(lambda: sampler.sample(scratch, states), times)


def peer(logits: Tensor, prompt: list[int], settings: dict[str, Any], times: int) -> float | None:
    from transformers.generation import logits_process as hf

    if settings.keys() - {"temperature", "top_k", "top_p", "min_p", "typical_p"}:
        return None
    greedy = settings.get("temperature") == 0.0
    makers = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }
    chain = [] if greedy else [makers[name](value) for name, value in settings.items()]
    tokens = torch.tensor([prompt] * len(logits))

    def call() -> Tensor:
        scores = logits
        for processor in chain:
            scores = processor(tokens, scores)
        return scores.argmax(-1) if greedy else torch.multinomial(scores.softmax(-1), 1)

    return best(call, times)


END = frozenset((0, 2))  # SmolLM2's end tokens


def structured(sampler: Sampler, logits: Tensor, structure: Structure) -> dict[str, float]:
    began = time.perf_counter()
    params = SamplingParams(structure=structure, temperature=1.0)
    states: list[SamplingState] = [sampler.start(params, [1], seed) for seed in range(len(logits))]
    compiled = time.perf_counter() - began
    seconds = []
    for _ in range(20):
        scratch = logits.clone()
        began = time.perf_counter()
        found = sampler.sample(scratch, states)
        seconds.append(time.perf_counter() - began)
        for state, sampled in zip(states, found, strict=True):
            assert sampled.error is None
            state.accept(sampled.token)
        states = [state for state, sampled in zip(states, found, strict=True) if sampled.token not in END]
        logits = logits[: len(states)]
        if not states:
            break
    return {
        "milliseconds of compiling": round(compiled * 1e3, 2),
        "microseconds of the median step": round(sorted(seconds)[len(seconds) // 2] * 1e6, 1),
        "microseconds of the slowest step": round(max(seconds) * 1e6, 1),
    }


def real_logits(loaded: LoadedModel, rows: int) -> tuple[Tensor, list[int]]:
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.encode(__doc__ * 2)[: 10 * rows]
    with torch.inference_mode():
        hidden = loaded.model(torch.tensor([prompt]), torch.arange(len(prompt))[None], CausalContext())
        return loaded.model.logits(hidden[0, -rows:]).float().clone(), prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    loaded = load_model(smollm2())
    logits, prompt = real_logits(loaded, rows)
    sampler = Sampler(logits.shape[1], loaded.tokenizer)
    table: dict[str, dict[str, float | None]] = {
        name: {"compiled": ours(sampler, logits, prompt, settings, 60)} for name, settings in SETTINGS.items()
    }
    sampler.start(SamplingParams(structure=Structure.json_object()), [1], 0)  # the vocabulary is prepared once
    structures = {name: structured(sampler, logits, structure) for name, structure in STRUCTURES.items()}
    draws.library = lambda: None  # as on a machine without a compiler
    for name, settings in SETTINGS.items():
        table[name]["torch alone"] = ours(sampler, logits, prompt, settings, 5)
        table[name]["transformers"] = peer(logits, prompt, settings, 5)
    results = {"rows": rows, "vocabulary": logits.shape[1], "microseconds a step": table, "structures": structures}
    for name, columns in table.items():
        print(f"{name:40}", columns)
    print(structures)
    print(write_results("sampling", results))


if __name__ == "__main__":
    main()
