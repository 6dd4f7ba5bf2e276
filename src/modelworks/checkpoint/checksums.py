"""Checksums of what a checkpoint stores: one digest for every block of a piece, so that a reader checks what it reads.

The idea: a digest of a whole file can only be checked by reading the whole file, which a rank that wants a slice should
not have to do. So each piece of a tensor (its bytes in one file) is cut into blocks of a fixed size, counted from
the piece's first byte, and each block has a digest of its own; the last block may be shorter, an empty piece has none.

xxh3-64 is no protection against someone who forges a file on purpose; it finds damage, at memory's speed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's bytes are checked. digest: bytes-like -> hexadecimal text of `digits` digits."""

    name: str
    digits: int
    block_bytes: int
    digest: Callable[[Any], str]

    def of_blocks(self, data: memoryview) -> str:
        """The digests of a piece's blocks in order, one after the other."""
        step = self.block_bytes
        return "".join(self.digest(data[start : start + step]) for start in range(0, len(data), step))

    def of_block(self, digests: str, index: int) -> str:
        """The digest of block `index` from what `of_blocks` returned."""
        return digests[index * self.digits : (index + 1) * self.digits]


def digest(data: Any) -> str:
    """xxh3-64 of bytes, as 16 hexadecimal digits. Releases the interpreter's lock while it works."""
    return xxhash.xxh3_64_hexdigest(data)


# Of 2 MiB: a slice reads little beside itself, and the digests are a hundred-thousandth of the data.
XXH3 = Scheme("xxh3-64", digits=16, block_bytes=1 << 21, digest=digest)
# Format version 1: one digest for each piece, however large.
CRC32 = Scheme("crc32", digits=8, block_bytes=1 << 62, digest=lambda data: f"{zlib.crc32(data):08x}")
