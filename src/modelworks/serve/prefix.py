"""Keys of blocks: equal keys mean equal keys and values in the cache.

    key_0 = H(tag, tokens of block 0),   key_i = H(key_(i-1), tokens of block i)

H is BLAKE2b with 32 bytes: nobody can make two prompts collide, and so read the cache of another (vLLM's CVE-2025-25183
came from a hash that could be). The tag holds all that decides keys and values beside the tokens: the model's identity,
the dtype of the cache, an adapter, a user's salt. Each entry is written with its name and length, so that no two sets
of entries have the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

_SIZE = 32


def tag(extras: Mapping[str, str]) -> bytes:
    """The root of a chain. extras: by name; names in no particular order."""
    root = blake2b(digest_size=_SIZE, person=b"mw-kv-root")
    for name, value in sorted(extras.items()):
        for text in (name.encode(), value.encode()):
            root.update(len(text).to_bytes(8, "little"))
            root.update(text)
    return root.digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds `tokens` after what `parent` stands for (a block's key, or a tag)."""
    chain = blake2b(parent, digest_size=_SIZE, person=b"mw-kv-block")
    chain.update(array("q", tokens).tobytes())
    return chain.digest()


class PrefixKeys:
    """The keys of a growing sequence's full blocks, each computed once."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root, self._block_size = root, block_size
        self._keys: list[bytes] = []

    def upto(self, tokens: Sequence[int], n_blocks: int) -> list[bytes]:
        """Keys of the first `n_blocks` blocks of `tokens`, which begin as in earlier calls and fill these blocks."""
        while len(self._keys) < n_blocks:
            start = len(self._keys) * self._block_size
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(next_key(parent, tokens[start : start + self._block_size]))
        return self._keys[:n_blocks]

    def copy(self) -> PrefixKeys:
        """For a sequence that goes on where this one's is: what was computed is not computed again."""
        copied = PrefixKeys(self._root, self._block_size)
        copied._keys = list(self._keys)
        return copied
