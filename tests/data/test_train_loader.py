"""The loader: a step's batch depends on nothing but (seed, step); packing keeps documents apart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import DataConfig, SourceConfig, UserError
from modelworks.data import Batch, Dataset, Skip, Skips, TrainLoader, build_dataset
from modelworks.data.objectives import next_token

Configs = Callable[..., DataConfig]
FIELDS = ("tokens", "positions", "targets", "loss_weights", "document_ids")


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in FIELDS)


def part(batch: Batch, rows: slice) -> Batch:
    return Batch(*(getattr(batch, name)[rows] for name in FIELDS))


@pytest.fixture
def dataset(data_config: Configs) -> Dataset:
    return build_dataset(data_config(), progress=False)


def test_a_step_is_the_same_alone_in_parts_and_in_any_loader(dataset: Dataset, data_config: Configs) -> None:
    loader = TrainLoader(dataset, data_config(), 7, 12)
    again = TrainLoader(dataset, data_config(), 7, 12)
    for step in (1000, 0, 3, 10**9):
        whole = loader.batch(step)
        assert same(whole, again.batch(step))
        for rows in (slice(0, 5), slice(5, 12), slice(1, 12, 4), slice(3, 3)):  # micro-batches, ranks, none
            assert same(loader.batch(step, rows), part(whole, rows))
    assert not same(loader.batch(0), TrainLoader(dataset, data_config(), 8, 12).batch(0))


def test_rows_are_global_samples_whatever_the_batch(dataset: Dataset, data_config: Configs) -> None:
    small, large = (TrainLoader(dataset, data_config(), 0, size) for size in (4, 12))
    for row in range(3):
        assert same(small.batch(row), part(large.batch(0), slice(4 * row, 4 * row + 4)))


def test_shapes_types_and_targets(dataset: Dataset, data_config: Configs) -> None:
    loader = TrainLoader(dataset, data_config(), 0, 6)
    batch = loader.batch(2)
    assert {name: getattr(batch, name).dtype for name in FIELDS} == {
        "tokens": torch.int64,
        "positions": torch.int64,
        "targets": torch.int64,
        "loss_weights": torch.float32,
        "document_ids": torch.int32,
    }
    assert all(getattr(batch, name).shape == (6, 16) for name in FIELDS)
    sources, starts = loader.places(2)
    for row, (source, start) in enumerate(zip(sources, starts, strict=True)):
        window = dataset.sources[source].train.read(int(start), int(start) + 17).tolist()
        assert batch.tokens[row].tolist() == window[:-1]
        assert batch.targets[row].tolist() == window[1:]


def brute_force(tokens: list[int], begins: list[bool]) -> list[tuple[int, int, int, float]]:
    """(token, position, document, weight) of each input, by walking."""
    rows, position, document = [], 0, 0
    for i, token in enumerate(tokens[:-1]):
        if begins[i] and i > 0:
            position, document = 0, document + 1
        rows.append((token, position, document, 0.0 if begins[i + 1] else 1.0))
        position += 1
    return rows


@given(st.lists(st.booleans(), min_size=2, max_size=40))
@settings(max_examples=200, deadline=None)
def test_packing_within_documents(begins: list[bool]) -> None:
    tokens = list(range(100, 100 + len(begins)))
    batch = next_token(np.array([tokens], np.uint16), np.array([begins]), "within-document")
    columns = (batch.tokens, batch.positions, batch.document_ids, batch.loss_weights)
    found = list(zip(*(column[0].tolist() for column in columns), strict=True))
    assert found == brute_force(tokens, begins)


@given(st.lists(st.booleans(), min_size=2, max_size=40))
@settings(max_examples=50, deadline=None)
def test_packing_across_documents(begins: list[bool]) -> None:
    batch = next_token(np.arange(len(begins), dtype=np.uint16)[None], np.array([begins]), "across")
    length = len(begins) - 1
    assert batch.positions[0].tolist() == list(range(length))
    assert batch.document_ids[0].tolist() == [0] * length
    assert batch.loss_weights[0].tolist() == [1.0] * length


def test_only_targets_that_begin_a_document_weigh_nothing(dataset: Dataset, data_config: Configs) -> None:
    loader = TrainLoader(dataset, data_config(), 0, 8)
    eos, start = dataset.tokenizer.eos_id, dataset.tokenizer.start_id
    seen = 0
    for batch in islice(loader.iterate(), 40):
        ends = batch.loss_weights == 0
        seen += int(ends.sum())
        assert (batch.tokens[ends] == eos).all()
        assert (batch.targets[ends] == start).all()
        changes = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
        assert torch.equal(changes, ends[:, :-1])
        assert (batch.positions[:, 1:][changes] == 0).all()
    assert seen > 50


def test_one_epoch_takes_every_window_of_a_source_once(data_config: Configs) -> None:
    one = [data_config().sources[0]]
    config = data_config(sources=one)
    dataset = build_dataset(config, progress=False)
    loader = TrainLoader(dataset, config, 0, 5)
    stream = dataset.sources[0].train
    places = np.concatenate([loader.places(step)[1] for step in range(loader.samples_per_epoch // 5 + 1)])
    windows = (len(stream) - 1) // 16
    assert loader.samples_per_epoch == windows
    assert sorted(places[:windows].tolist()) == [16 * i for i in range(windows)]
    assert loader.left_out == {"a": (len(stream) - 1) % 16}


def test_counts_follow_the_weights(dataset: Dataset, data_config: Configs) -> None:
    loader = TrainLoader(dataset, data_config(), 0, 8)
    assert loader.samples(100) == pytest.approx({"a": 600, "b": 200}, abs=1)
    drawn = np.concatenate([loader.places(step)[0] for step in range(100)])
    assert loader.samples(100) == {"a": int((drawn == 0).sum()), "b": int((drawn == 1).sum())}
    assert loader.passes(100)["b"] == pytest.approx(
        loader.samples(100)["b"] / ((len(dataset.sources[1].train) - 1) // 16)
    )


def test_prefetching_gives_the_same_batches_and_ends_its_thread(dataset: Dataset, data_config: Configs) -> None:
    loader = TrainLoader(dataset, data_config(), 0, 8)
    iterator = loader.iterate(5, lambda step: slice(2, 6), ahead=2)
    for step in range(5, 15):
        assert same(next(iterator), loader.batch(step, slice(2, 6)))
    names = [thread.name for thread in threading.enumerate()]
    assert "modelworks-loader" in names
    iterator.close()  # type: ignore[attr-defined]
    assert "modelworks-loader" not in [thread.name for thread in threading.enumerate()]


def test_errors_of_the_thread_are_raised(
    dataset: Dataset, data_config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = TrainLoader(dataset, data_config(), 0, 8)
    make = loader.batch

    def failing(step: int, rows: slice | None = None) -> Batch:
        if step == 2:
            raise OSError("disk gone")
        return make(step, rows)

    monkeypatch.setattr(loader, "batch", failing)
    iterator = loader.iterate()
    next(iterator)
    next(iterator)
    with pytest.raises(OSError, match="disk gone"):
        next(iterator)
    assert "modelworks-loader" not in [thread.name for thread in threading.enumerate()]


def test_what_does_not_fit_is_refused(dataset: Dataset, data_config: Configs) -> None:
    with pytest.raises(UserError, match=r"do not fill one sample of 100001: lower data.seq_len"):
        TrainLoader(dataset, data_config(seq_len=100_000), 0, 8)
    other = [SourceConfig(name="aa", type="python-stdlib")]
    with pytest.raises(UserError, match=r"no source `aa`, it has a, b \(did you mean `a`"):
        TrainLoader(dataset, data_config(sources=other), 0, 8)


def test_what_is_left_out_moves_the_later_batches_on(dataset: Dataset, data_config: Configs) -> None:
    """Against a list of samples cut by hand; the second skip goes back behind the first, the third does not."""
    loader, plain = (TrainLoader(dataset, data_config(), 0, 4) for _ in range(2))
    order = list(range(400))
    skips = [(9, 5, 3), (7, 3, 0), (20, 15, 2)]  # (step of the spike, good steps, batches after it that go too)
    for spike, good, more in skips:
        first = loader.consumed(good)
        end = loader.first_sample(spike - 1) + 4 * (1 + more)
        assert order[4 * (spike - 1)] == loader.first_sample(spike - 1)
        loader.skips.add(Skip(spike, good, first, end))
        order = order[: 4 * good] + [sample for sample in range(400) if sample >= end]
        again = TrainLoader(dataset, data_config(), 0, 4)
        again.skips.load_state(json.loads(json.dumps(loader.skips.state())))
        for step in (0, good - 1, good, good + 1, 30):
            samples = order[4 * step : 4 * step + 4]
            rows = [part(plain.batch(sample // 4), slice(sample % 4, sample % 4 + 1)) for sample in samples]
            assert all(same(part(loader.batch(step), slice(row, row + 1)), one) for row, one in enumerate(rows))
            assert same(again.batch(step), loader.batch(step))
            assert [found["sample"] for found in loader.documents(step)] == samples
            drawn = [int(plain.places(sample // 4)[0][sample % 4]) for sample in order[: 4 * step]]
            assert loader.samples(step) == {source.name: drawn.count(i) for i, source in enumerate(dataset.sources)}


@pytest.mark.parametrize("row", [[1, 1, 0, 4], [2, 1, 8, 8], [2, 1, 4], [2, 1, 4, 8.0], ["2", 1, 4, 8]])
def test_a_skip_that_makes_no_sense_is_refused(row: list[object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Skips().load_state([row])
