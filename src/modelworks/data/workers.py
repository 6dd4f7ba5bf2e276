"""Tokenising by several processes, in order.

The result depends on the documents alone: parts of documents go out in groups of about a megabyte and come back in
the order they went, a bounded number at a time. Workers leave Ctrl-C to the parent and end when it ends, however
that happens.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.data.documents import Document
from modelworks.data.tokenizers.pieces import GROUP, Part, document_parts
from modelworks.data.tokenizers.tokenizer import Tokenizer

Ids = NDArray[np.uint32]


def tokenised(documents: Iterable[Document], tokenizer_directory: Path, workers: int) -> Iterator[tuple[Document, Ids]]:
    """Each document with its ids, start and end included. workers: processes; 1 tokenises in this one."""
    tokenizer = Tokenizer.load(tokenizer_directory)
    start, end = np.array([tokenizer.start_id], np.uint32), np.array([tokenizer.eos_id], np.uint32)
    ids: list[Ids] = []
    groups = _groups(documents)
    results = _encode_here(groups, tokenizer) if workers == 1 else _encode_apart(groups, tokenizer_directory, workers)
    for places, arrays in results:
        for (document, last), array in zip(places, arrays, strict=True):
            ids.append(array)
            if last:
                yield document, np.concatenate([start, *ids, end])
                ids = []


Place = tuple[Document, bool]  # the document a part belongs to, and whether it is the document's last
Group = tuple[list[Place], list[Part]]


def _groups(documents: Iterable[Document]) -> Iterator[Group]:
    places: list[Place] = []
    parts: list[Part] = []
    size = 0
    for document in documents:
        left = len(document.text)
        for part in document_parts(document.text):
            left -= len(part.text)
            places.append((document, left == 0))
            parts.append(part)
            size += len(part.text)
            if size >= GROUP:
                yield places, parts
                places, parts, size = [], [], 0
    if parts:
        yield places, parts


def _encode_here(groups: Iterable[Group], tokenizer: Tokenizer) -> Iterator[tuple[list[Place], list[Ids]]]:
    for places, parts in groups:
        yield places, tokenizer.encode_parts(parts)


def _encode_apart(
    groups: Iterable[Group], tokenizer_directory: Path, workers: int
) -> Iterator[tuple[list[Place], list[Ids]]]:
    context = multiprocessing.get_context("spawn")  # fork is unsafe once threads run
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(str(tokenizer_directory),))
    waiting: deque[tuple[list[Place], Future[list[Ids]]]] = deque()
    try:
        for places, parts in groups:
            waiting.append((places, _submit(pool, parts)))
            if len(waiting) > 2 * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenises died, most likely for want of memory: lower data.workers "
            "(in a script of your own, build under `if __name__ == '__main__':`)"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, parts: list[Part]) -> Future[list[Ids]]:
    """Submitting starts the workers, which inherit the blocked signal: Ctrl-C is the parent's alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_encode, parts)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_tokenizer: Tokenizer | None = None  # of a worker process


def _start(tokenizer_directory: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = Tokenizer.load(tokenizer_directory)


def _encode(parts: list[Part]) -> list[Ids]:
    assert _tokenizer is not None
    return _tokenizer.encode_parts(parts)


def _end_with_parent() -> None:
    """A killed parent cannot tell its workers; the pipe that it held then closes."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    os._exit(1)
