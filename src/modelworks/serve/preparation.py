"""Structures compiled beside the engine's steps: one thread, which takes one after the other.

Compiling may take a second where somebody means ill, and the engine's thread has everybody's next token to see to. The
library works without Python's lock, so steps go on meanwhile. One thread, however many ask: compiling then takes one
core at most from the model, and those who wait for it are such as ask for structures that are not known yet.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from modelworks.config import UserError
from modelworks.data import Tokenizer
from modelworks.serve.params import Structure
from modelworks.serve.structured import Compiler, Constraint


class Preparation:
    """Constraints over one vocabulary, see `structured.Compiler`. tokenizer: None refuses every structure."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        self._compiler: Compiler | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def constraint(self, structure: Structure) -> Constraint:
        """At the beginning of an output, now. Raises UserError where the structure is wrong or too costly."""
        return self._made().constraint(structure)

    def begin(self, structure: Structure) -> Constraint | Future[Constraint]:
        """The same without waiting: what is not known yet is compiled in the thread, and the future may raise."""
        if self._tokenizer is None:
            raise _no_tokenizer()
        if self._compiler is not None and (known := self._compiler.kept(structure)) is not None:
            return known
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="modelworks-structures")
        return self._pool.submit(self.constraint, structure)

    def warm_up(self) -> None:
        """Make now what the first structure would need, so that it holds up nobody: reading a vocabulary is Python's
        work, beside which steps are slow."""
        if self._tokenizer is not None and self._end_ids:
            self._made()

    def close(self) -> None:
        """Nothing more is begun. What is being compiled ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _made(self) -> Compiler:
        """The compiler, which takes a second to make: it reads the whole vocabulary."""
        if self._tokenizer is None:
            raise _no_tokenizer()
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(self._tokenizer, self._vocab_size, self._end_ids)
        return self._compiler


def _no_tokenizer() -> UserError:
    return UserError("structure: it is of text, but the model has no tokeniser")
