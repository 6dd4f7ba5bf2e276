"""Bits per byte: every token of every document is paid for once, and all its bytes are counted."""

from __future__ import annotations

import bz2
import lzma
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import DataConfig, TokenizerTraining, UserError
from modelworks.data import (
    Dataset,
    ScoredText,
    Tokenizer,
    build_dataset,
    compression_baselines,
    scored_texts,
    text_batches,
    validation_batches,
)
from modelworks.data.tokenizers.training import train_tokenizer

Configs = Callable[..., DataConfig]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["some words and more of them, naïve"] * 3, TokenizerTraining(vocab_size=280))


def scored(text: ScoredText) -> list[int]:
    """The targets that count, in order."""
    return [int(t) for batch in text for t in batch.targets[batch.loss_weights == 1]]


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=8).filter(any),
    seq_len=st.integers(1, 40),
    rows=st.integers(1, 5),
    packing=st.sampled_from(["within-document", "across"]),
)
@settings(max_examples=120, deadline=None)
def test_each_token_is_a_target_once(
    tokenizer: Tokenizer, texts: list[str], seq_len: int, rows: int, packing: str
) -> None:
    text = text_batches(texts, tokenizer, seq_len=seq_len, rows=rows, packing=packing)  # type: ignore[arg-type]
    expected = [i for t in texts if t for i in tokenizer.encode_document(t)[1:].tolist()]
    assert scored(text) == expected
    assert text.n_targets == len(expected)
    assert text.n_bytes == sum(len(t.encode()) for t in texts)
    batches = list(text)
    assert len(batches) == len(text)
    assert all(batch.n_rows == rows for batch in batches[:-1])
    assert all(set(batch.loss_weights.unique().tolist()) <= {0.0, 1.0} for batch in batches)
    assert scored(text) == expected  # again: it can be iterated any number of times


def test_the_first_token_of_a_document_is_predicted_from_its_start_alone(tokenizer: Tokenizer) -> None:
    text = text_batches(["ab", "cd"], tokenizer, seq_len=64, rows=1)
    batch = next(iter(text))
    first = len(tokenizer.encode_document("ab"))
    assert batch.tokens[0, first] == tokenizer.start_id
    assert batch.loss_weights[0, first] == 1
    assert batch.positions[0, first] == 0
    assert batch.document_ids[0, first] != batch.document_ids[0, first - 1]
    assert batch.loss_weights[0, first - 1] == 0  # the start itself is given


def test_padding_is_no_target_and_no_document_of_the_row(tokenizer: Tokenizer) -> None:
    batch = next(iter(text_batches(["ab"], tokenizer, seq_len=50, rows=4)))
    length = len(tokenizer.encode_document("ab")) - 1
    assert batch.loss_weights.sum() == length
    assert (batch.loss_weights[0, length:] == 0).all()


@pytest.fixture
def dataset(data_config: Configs) -> Dataset:
    return build_dataset(data_config(), progress=False)


def test_the_whole_validation_split_is_scored(dataset: Dataset) -> None:
    text = validation_batches(dataset, seq_len=16, rows=3)
    streams = [source.validation for source in dataset.sources]
    documents = [stream.document(i)[1:].tolist() for stream in streams for i in range(stream.n_documents)]
    assert Counter(scored(text)) == Counter(i for document in documents for i in document)
    assert text.n_bytes == sum(len(t.encode()) for t in dataset.validation_texts(10**6))
    assert text.n_documents == len(documents)


def test_a_limited_part_is_always_the_same_and_counts_its_own_bytes(dataset: Dataset) -> None:
    whole = scored(validation_batches(dataset, seq_len=16, rows=3))
    for limit in (2, 3, 50, 101, 10**9):
        text = validation_batches(dataset, seq_len=16, rows=3, max_tokens=limit)
        ids = scored(text)
        assert ids == whole[: len(ids)]
        assert len(ids) == len(whole) if limit == 10**9 else limit - text.n_documents <= len(ids) <= limit
        shown = b"".join(map(dataset.tokenizer.token_bytes, (i for i in ids if i != dataset.tokenizer.eos_id)))
        assert text.n_bytes == len(shown)


def test_baselines_are_those_of_the_compressors_and_are_kept(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [s.validation.text(i).encode() for s in dataset.sources for i in range(s.validation.n_documents)]
    together, size = b"".join(texts), sum(map(len, texts))
    found = compression_baselines(dataset, progress=False)
    assert found["bz2"].concatenated == 8 * len(bz2.compress(together, 9)) / size
    assert found["xz"].concatenated == 8 * len(lzma.compress(together, preset=9 | lzma.PRESET_EXTREME)) / size
    assert found["bz2"].per_document == 8 * sum(len(bz2.compress(text, 9)) for text in texts) / size
    assert found["xz"].best == min(found["xz"].concatenated, found["xz"].per_document)
    monkeypatch.setattr("modelworks.data.compression._measure", None)  # measuring again would fail
    assert compression_baselines(dataset, progress=False) == found


def test_baselines_are_on_the_text_that_is_scored(dataset: Dataset) -> None:
    limit = 60
    scored = validation_batches(dataset, seq_len=16, rows=3, max_tokens=limit)
    found = compression_baselines(dataset, max_tokens=limit, progress=False)
    assert found["bz2"].n_bytes == scored.n_bytes < compression_baselines(dataset, progress=False)["bz2"].n_bytes
    text = b"".join(scored_texts(dataset, limit))
    assert found["bz2"].concatenated == 8 * len(bz2.compress(text, 9)) / len(text)
    whole = [t.encode() for t in dataset.validation_texts(10**6)]
    assert all(any(t.startswith(part) for t in whole) for part in scored_texts(dataset, limit))


def test_nothing_to_score_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no text to score"):
        text_batches(["", ""], tokenizer, seq_len=8, rows=1)
