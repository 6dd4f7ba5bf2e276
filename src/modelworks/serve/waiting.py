"""The queue of sequences that hold no blocks: by priority, first come first served, and nobody waits for ever.

A sequence's effective priority falls by one for every `age` seconds that it has waited, so that however many urgent
ones arrive, it is first at last. Bounded in sequences and in tokens; what is over the bound is refused at once instead
of waiting without hope.
"""

from __future__ import annotations

from collections.abc import Iterator

from modelworks.serve.sequence import Sequence


class Overloaded(Exception):
    """The queue is full: try again later. retry_after: seconds, a guess."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WaitingQueue:
    """max_sequences, max_tokens: of those that wait, at most. age: seconds of waiting worth one step of priority."""

    def __init__(self, *, max_sequences: int, max_tokens: int, age: float) -> None:
        self.max_sequences, self.max_tokens, self.age = max_sequences, max_tokens, age
        self._waiting: dict[str, Sequence] = {}
        self._held: set[str] = set()  # ids of those that may not be admitted yet
        self._n_tokens = 0
        self._n_added = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that may be admitted, in no order that means anything."""
        return (sequence for sequence in self._waiting.values() if sequence.id not in self._held)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._waiting.get(sequence.id) is sequence

    @property
    def n_ready(self) -> int:
        """Sequences that may be admitted."""
        return len(self._waiting) - len(self._held)

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    def add(self, sequence: Sequence, *, retry_after: float = 1.0) -> None:
        """A new sequence. Raises Overloaded where the queue is full; an empty queue takes any."""
        if self._waiting:
            if len(self._waiting) + 1 > self.max_sequences:
                raise Overloaded(f"{len(self._waiting)} requests are waiting, which is the limit", retry_after)
            if self._n_tokens + sequence.n_tokens > self.max_tokens:
                raise Overloaded(f"{self._n_tokens} tokens are waiting, the limit is {self.max_tokens}", retry_after)
        self._n_added += 1
        sequence.order = self._n_added
        self._put(sequence)

    def hold(self, sequence: Sequence) -> None:
        """It keeps its place, and is passed over until `let_go`: something that it needs is not ready."""
        self._held.add(sequence.id)

    def let_go(self, sequence: Sequence) -> None:
        self._held.discard(sequence.id)

    def put_back(self, sequence: Sequence) -> None:
        """One that was running. It keeps its place in the order, and no bound applies: it was promised an answer."""
        self._put(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.id]
        self._held.discard(sequence.id)
        self._n_tokens -= sequence.n_tokens

    def by_urgency(self, now: float) -> Iterator[Sequence]:
        """Those that may be admitted, the most urgent first."""
        yield from sorted(self, key=lambda sequence: self.urgency(sequence, now))

    def urgency(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """Smaller is more urgent; the same of running ones, so that who waits and who runs can be compared."""
        return sequence.priority - max(now - sequence.arrived, 0.0) // self.age, sequence.order

    def expired(self, now: float) -> list[Sequence]:
        return [sequence for sequence in self._waiting.values() if sequence.deadline <= now]

    def _put(self, sequence: Sequence) -> None:
        self._waiting[sequence.id] = sequence
        self._n_tokens += sequence.n_tokens
