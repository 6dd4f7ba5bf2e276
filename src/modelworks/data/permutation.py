"""A keyed pseudo-random permutation of [0, n): shuffling a corpus of any size without holding its order.

A balanced Feistel network permutes the smallest [0, 4^h) that holds n (Luby and Rackoff 1988); a value that falls
outside [0, n) is sent through again until it falls inside ("cycle walking", Black and Rogaway 2002), which keeps it a
bijection. The square is less than 4n + 4, so that four passes are enough on average.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_U64 = np.uint64


def permute(indices: NDArray[np.int64], n: int, key: str) -> NDArray[np.int64]:
    """Where each of `indices`, in [0, n), goes under the permutation named by `key`. int64, same shape."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    result = indices.astype(_U64)
    outside = np.ones(result.shape, bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, round_keys)
        outside = result >= _U64(n)
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: int, round_keys: NDArray[Any]) -> NDArray[np.uint64]:
    shift, mask = _U64(half), _U64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014): every bit of the input moves every bit of the output."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    return values ^ (values >> _U64(31))
