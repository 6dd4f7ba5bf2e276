"""The blocks of the KV cache: who holds which, and which still hold a prefix that somebody may want again.

A block is room for the keys and values of `block_size` tokens in every layer. A sequence holds a table of blocks, and
sequences share blocks (a common prefix, a fork); a block is free when nobody holds it. Free blocks keep what they hold
until they are taken for something else, the one that was freed longest ago first, so that a prefix outlives the request
that computed it (as in vLLM; Kwon et al. 2023, 2309.06180).

Invariant: every block is held by `references > 0` holders or is in the free list, never both; a block is in the index
under at most one key. There is one way to give blocks back, `release`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to n_blocks - 1. Holds no keys or values: those lie in tensors of the same numbering."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"expected at least one block of at least one token, got {n_blocks} of {block_size}")
        self.n_blocks, self.block_size = n_blocks, block_size
        self._references = [0] * n_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))  # freed longest ago first
        self._keys: list[bytes | None] = [None] * n_blocks
        self._by_key: dict[bytes, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """`count` free blocks, held once each, whatever they held forgotten. The caller has asked `n_free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.forget(block)
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder of each; a free one that is still known is free no more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less of each. Of a table of blocks the last is free first, so that it is also taken first: a
        prefix is of use without its end, an end without its beginning is not."""
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released, but nobody holds it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:  # of no use to anybody: taken before those that may be
                    self._free.move_to_end(block, last=False)

    def remember(self, block: int, key: bytes) -> None:
        """The block is full and computed; whoever has the same key may share it. The first block under a key stays."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def forget(self, block: int) -> None:
        """Nobody shall find the block by its key any more: it is about to hold something else."""
        if (key := self._keys[block]) is not None:
            del self._by_key[key]
            self._keys[block] = None

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of `keys` that are all known."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def n_free_of(self, blocks: Iterable[int]) -> int:
        """How many of these are free: sharing them takes so many from `n_free`."""
        return sum(self._references[block] == 0 for block in blocks)

    def problems(self) -> list[str]:
        """What contradicts the invariant, in words; empty where all is well. For tests and for a metric."""
        wrong = [
            f"block {block} is held {count} times and is {'' if block in self._free else 'not '}free"
            for block, count in enumerate(self._references)
            if (count == 0) != (block in self._free) or count < 0
        ]
        wrong += [
            f"block {block} is indexed as another" for key, block in self._by_key.items() if self._keys[block] != key
        ]
        known = sum(key is not None for key in self._keys)
        if known != len(self._by_key):
            wrong.append(f"{known} blocks have a key, {len(self._by_key)} are in the index")
        return wrong
