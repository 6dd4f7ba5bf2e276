"""Comparing what was read with its digests, while more is read.

A thread computes the digests of large blocks (which frees the interpreter's lock), so that on a machine with a core to
spare checking costs next to no time. The invariant: a `with` block ends normally only when every block added in it has
been compared.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from modelworks.checkpoint.checksums import Scheme
from modelworks.checkpoint.errors import ADVICE, CorruptedCheckpoint

PENDING = 2  # blocks that may wait for the thread
_SMALL = 1 << 20  # bytes: what is smaller is compared at once, for less than handing it over would cost


class BlockChecks:
    """with BlockChecks(scheme) as checks: checks.add(…). Raises CorruptedCheckpoint, at the latest at its end."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def add(self, block: memoryview, expected: str, where: str, tensor: str, index: int) -> None:
        """`block` must not change before `PENDING` more were added or the `with` ended.

        expected: its digest. where, tensor, index: for the error, the file, the tensor and the block's number in it.
        """
        if len(block) < _SMALL:
            self._compare(block, expected, where, tensor, index)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._pending.append(self._thread.submit(self._compare, block, expected, where, tensor, index))
        if len(self._pending) > PENDING:
            self._pending.popleft().result()

    def __enter__(self) -> BlockChecks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if error is None:
            for check in self._pending:
                check.result()

    def _compare(self, block: memoryview, expected: str, where: str, tensor: str, index: int) -> None:
        if self._scheme.digest(block) != expected:
            raise CorruptedCheckpoint(
                f"{where}: the checksum of tensor `{tensor}` differs (block {index}): bytes on disk have changed; "
                f"{ADVICE}"
            )
