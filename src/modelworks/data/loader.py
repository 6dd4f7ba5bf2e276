"""`TrainLoader`: the batch of global step s, a function of (seed, s) and of what the run skipped.

The rows of a step are the samples that follow those of the steps before it (`BatchSizes`), moved on by what was left
out before (`Skips`). Any rank or micro-batch asks for the rows it needs and gets the ones that everybody else would
get; its state is one integer, the next step, and any step is reached at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.config import BatchSizes, DataConfig, UserError, nearest
from modelworks.data.batch import Batch
from modelworks.data.dataset import Dataset, SourceData
from modelworks.data.mixture import Mixture
from modelworks.data.objectives import next_token
from modelworks.data.order import SampleOrder, Windows
from modelworks.data.skips import Skips


class TrainLoader:
    """Training batches of `dataset` under a config's mixture, packing and order. Raises UserError.

    global_batch: sequences of each optimiser step, over all ranks; a number where all have as many. skips: what is left
    out; changed only while nothing iterates.
    """

    def __init__(self, dataset: Dataset, data: DataConfig, seed: int, global_batch: int | BatchSizes) -> None:
        self.batches = BatchSizes.constant(global_batch) if isinstance(global_batch, int) else global_batch
        self.seq_len = data.seq_len
        self.skips = Skips()
        self._packing = data.packing
        self._sources = [_source(dataset, source.name) for source in data.sources]
        windows = [Windows(len(source.train), data.seq_len) for source in self._sources]
        mixture = Mixture({source.name: source.weight for source in data.sources}, data.mixture_changes, seed)
        self._order = SampleOrder(mixture, windows, seed=seed, shuffle=data.shuffle)

    @property
    def samples_per_epoch(self) -> int:
        """Samples in one pass over every source: an epoch, whatever the mixture draws them at."""
        return sum(windows.count for windows in self._order.windows)

    @property
    def left_out(self) -> dict[str, int]:
        """Training tokens of each source that fill no window."""
        return {source.name: w.left_out for source, w in zip(self._sources, self._order.windows, strict=True)}

    def first_sample(self, step: int) -> int:
        """Of global step `step` (from 0), its place in the order of all samples."""
        return self.batches.first_sample(step) + self.skips.before(step)

    def consumed(self, steps: int) -> int:
        """Samples that are behind a run after so many steps: trained on, or left out between them."""
        return self.batches.first_sample(steps) + sum(end - first for first, end in self.skips.within(steps))

    def tokens(self, steps: int) -> int:
        """Tokens that the first `steps` steps are trained on, padding included."""
        return self.batches.first_sample(steps) * self.seq_len

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of global step `step` (from 0), or some of its rows. Tensors are (rows, seq_len), on the CPU."""
        numbers = np.arange(self.batches.rows(step), dtype=np.int64)[rows or slice(None)]
        sources, starts = self._order.places(self.first_sample(step) + numbers)
        length = self.seq_len + 1
        tokens = np.empty((len(numbers), length), np.uint32)
        begins = np.zeros((len(numbers), length), bool)
        for row, (source, start) in enumerate(zip(sources.tolist(), starts.tolist(), strict=True)):
            stream = self._sources[source].train
            tokens[row] = stream.read(start, start + length)
            first, last = np.searchsorted(stream.starts, [start, start + length])
            begins[row, stream.starts[first:last] - start] = True
        return next_token(tokens, begins, self._packing)

    def samples(self, steps: int) -> dict[str, int]:
        """Samples drawn from each source by the first `steps` steps."""
        left_out = self.skips.within(steps)
        edges = np.array([self.consumed(steps), *(edge for span in left_out for edge in span)])
        signs = np.array([1, *(sign for _ in left_out for sign in (1, -1))])  # a span from `first` to `end`
        counts = self._order.mixture.counts(edges) @ signs
        return dict(zip(self._order.mixture.names, counts.tolist(), strict=True))

    def passes(self, steps: int) -> dict[str, float]:
        """How often the first `steps` steps go over each source."""
        windows = {source.name: w.count for source, w in zip(self._sources, self._order.windows, strict=True)}
        return {name: count / windows[name] for name, count in self.samples(steps).items()}

    def places(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each row of a step the number of its source and its first token: names the data of a bad step."""
        return self._order.places(self.first_sample(step) + np.arange(self.batches.rows(step), dtype=np.int64))

    def documents(self, step: int, rows: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """What the rows of a step are cut from: {sample, source, documents: [first, last]}, documents by their number
        in the source's training stream. rows: some of them, in the order wanted."""
        sources, starts = self.places(step)
        found = []
        for row in rows if rows is not None else range(self.batches.rows(step)):
            source, start = self._sources[int(sources[row])], int(starts[row])
            first, last = np.searchsorted(source.train.starts, [start, start + self.seq_len], side="right") - 1
            last = min(int(last), source.train.n_documents - 1)
            found.append(
                {
                    "sample": self.first_sample(step) + row,
                    "source": source.name,
                    "documents": [int(first), last],
                }
            )
        return found

    def iterate(
        self, start_step: int = 0, rows: Callable[[int], slice] | None = None, *, ahead: int = 4
    ) -> Iterator[Batch]:
        """Batches from `start_step` on, without end, made ahead of need by a thread. rows: of a step, those wanted.

        Errors of the thread are raised here. Closing the iterator (or dropping it) ends the thread.
        """
        ready: queue.Queue[Batch | BaseException] = queue.Queue(ahead)
        stopped = threading.Event()
        maker = threading.Thread(
            target=self._make, args=(start_step, rows, ready, stopped), name="modelworks-loader", daemon=True
        )
        maker.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            maker.join()

    def _make(
        self,
        step: int,
        rows: Callable[[int], slice] | None,
        ready: queue.Queue[Batch | BaseException],
        stopped: threading.Event,
    ) -> None:
        item: Batch | BaseException
        while not stopped.is_set():
            try:
                item = self.batch(step, rows(step) if rows else None)
            except BaseException as error:
                item = error
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1


def _source(dataset: Dataset, name: str) -> SourceData:
    by_name = {source.name: source for source in dataset.sources}
    if name not in by_name:
        near = nearest(name, by_name)
        hint = f" (did you mean `{near}`?)" if near else ""
        raise UserError(f"the data set {dataset.directory} has no source `{name}`, it has {', '.join(by_name)}{hint}")
    return by_name[name]
