"""Tokenising by several processes, in order.

The result depends on the documents alone: parts of documents go out in groups of about a megabyte and come back in
the order they went, a bounded number at a time. Workers leave Ctrl-C to the parent and end when it ends, however
that happens. Each has a pipe of its own, so that a death is the end of a file even in the middle of a message (with
one queue for all, as concurrent.futures has, the reader would wait for the rest of the message for ever).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

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


DIED = (
    "a process that tokenises died, most likely for want of memory: lower data.workers "
    "(in a script of your own, build under `if __name__ == '__main__':`)"
)
GROUPS_AHEAD = 2  # for each worker: one that it works on, one that it finds when it is done


def _encode_apart(
    groups: Iterable[Group], tokenizer_directory: Path, workers: int
) -> Iterator[tuple[list[Place], list[Ids]]]:
    started = [_start(tokenizer_directory) for _ in range(workers)]
    waiting: deque[tuple[list[Place], Connection]] = deque()
    try:
        for number, (places, parts) in enumerate(groups):
            if len(waiting) == GROUPS_AHEAD * workers:
                first, connection = waiting.popleft()
                yield first, _received(connection)
            connection = started[number % workers][1]  # in turn: groups are of one size
            _send(connection, parts)
            waiting.append((places, connection))
        while waiting:
            first, connection = waiting.popleft()
            yield first, _received(connection)
    finally:
        for process, connection in started:
            connection.close()
            process.terminate()
        for process, _ in started:
            process.join()


def _send(connection: Connection, parts: list[Part]) -> None:
    try:
        connection.send(parts)
    except OSError:
        raise UserError(DIED) from None


def _received(connection: Connection) -> list[Ids]:
    try:
        result: list[Ids] | Exception = connection.recv()
    except (EOFError, OSError):  # an OSError where the message breaks off
        raise UserError(DIED) from None
    if isinstance(result, Exception):
        raise result
    return result


def _start(tokenizer_directory: Path) -> tuple[BaseProcess, Connection]:
    """A worker, which inherits the blocked signal (Ctrl-C is the parent's alone), and our end of its pipe."""
    context = multiprocessing.get_context("spawn")  # fork is unsafe once threads run
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, str(tokenizer_directory)), daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # held by the worker alone, whose death then closes the pipe
    return process, ours


def _work(connection: Connection, tokenizer_directory: str) -> None:
    """A worker: answers each group of parts by their ids until the pipe closes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    groups: SimpleQueue[list[Part]] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, groups), daemon=True).start()
    tokenizer = Tokenizer.load(tokenizer_directory)
    while True:
        parts = groups.get()
        try:
            connection.send(tokenizer.encode_parts(parts))
        except ConnectionError:
            os._exit(1)
        except Exception as error:
            connection.send(error)


def _read(connection: Connection, groups: SimpleQueue[list[Part]]) -> None:
    """Reads at once what is sent, so that two who write long messages to each other do not wait for each other."""
    try:
        while True:
            groups.put(connection.recv())
    except (EOFError, OSError):  # the parent has closed the pipe, or was killed
        os._exit(1)
