"""A small mixed corpus and the config that builds it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from modelworks.config import DataConfig, SourceConfig

LINE = "the of and model token value self return import for in if not λ ß 日本 🤗 x = 1 ( ) 42 'tis don't"


def write_corpus(directory: Path, documents: int, seed: int) -> None:
    chance = random.Random(seed)
    directory.mkdir(parents=True)
    for number in range(documents):
        lines = [
            " ".join(chance.choices([*LINE.split(), "\t", ""], k=chance.randint(1, 12)))
            for _ in range(chance.randint(1, 12))
        ]
        (directory / f"{number:03d}.txt").write_bytes("\n".join([str(number), *lines]).encode())


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """Two sources, `a` and `b`, of 60 and 30 documents; keyword arguments change the config."""
    write_corpus(tmp_path / "a", 60, seed=1)
    write_corpus(tmp_path / "b", 30, seed=2)

    def make(**changes: object) -> DataConfig:
        values: dict[str, object] = {
            "sources": [
                SourceConfig(name="a", type="text", path=str(tmp_path / "a" / "*.txt"), weight=3),
                SourceConfig(name="b", type="text", path=str(tmp_path / "b" / "*.txt"), weight=1),
            ],
            "tokenizer": {"train": "bpe", "vocab_size": 400},
            "seq_len": 16,
            "validation": "10%",
            "cache": str(tmp_path / "cache"),
        }
        return DataConfig.model_validate({**values, **changes})

    return make
