"""Counter-based random numbers: a value is a pure function of (key, counter), never of what was drawn before it.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
ten rounds that mix a 128-bit counter under a 64-bit key into four 32-bit words. An element's counter is its own
index, so any slice of a tensor, on any rank, in any order, gets the values that the whole tensor would.

Invariant: normal values use only additions, multiplications, divisions and square roots in float64. IEEE 754 rounds
those exactly, so vector width, thread count and device do not change a bit; a library `log` or `cos` would.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Elements generated at a time: bounds the working memory (a dozen int64/float64 tensors of a quarter of this size)
# to what fits a core's cache, several times faster than whole tensors.
CHUNK = 1 << 18


class Key(NamedTuple):
    """The 64-bit key of a stream, as two 32-bit words."""

    low: int
    high: int

    @classmethod
    def of(cls, *parts: int | str) -> Key:
        """The key named by `parts`, e.g. `Key.of(seed, "initialise", parameter_name)`."""
        digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))


def philox(counter: Sequence[Tensor | int], key: Key | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (int64 tensors in [0, 2^32)) for each counter.

    counter: four words in [0, 2^32), int64 tensors that broadcast together, or ints; at least one is a tensor.
    key: one for all, or its two words as tensors that broadcast with the counter.
    """
    like = next(word for word in counter if isinstance(word, Tensor))
    c0, c1, c2, c3 = (torch.as_tensor(word, dtype=torch.int64, device=like.device) for word in counter)
    k0, k1 = key
    for _ in range(10):
        # A product of two 32-bit words fills 64 bits: int64 wraps, and masking undoes the sign of the shift.
        low_product, high_product = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((high_product >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((low_product >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = high_product & _MASK, low_product & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(key: Key, start: int, stop: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Elements start..stop-1 of the stream `key`, uniform on the open interval (0, 1): float64, 32 bits each."""
    first_block, last_block = start // 4, -(-stop // 4)
    blocks = torch.arange(first_block, last_block, dtype=torch.int64, device=device)
    words = torch.stack(philox((blocks & _MASK, blocks >> 32, 0, 0), key), dim=-1).flatten()
    return to_uniform(words)[start - 4 * first_block : stop - 4 * first_block]


def uniform_rows(keys: Sequence[Key], starts: Sequence[int], count: int) -> Tensor:
    """Elements starts[r]..starts[r]+count-1 of each stream keys[r]: (R, count) float64, as `uniform` gives them.

    starts and count are multiples of 4.
    """
    blocks = torch.tensor(starts, dtype=torch.int64)[:, None] // 4 + torch.arange(count // 4)
    low, high = torch.tensor(keys, dtype=torch.int64).T[:, :, None]
    words = torch.stack(philox((blocks & _MASK, blocks >> 32, 0, 0), (low, high)), dim=-1)
    return to_uniform(words.flatten(1))


def normal(key: Key, start: int, stop: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Elements start..stop-1 of the stream `key`, standard normal: float64.

    Box-Muller on pairs of the stream's uniforms; element 2i is the cosine and 2i+1 the sine of pair i.
    """
    result = torch.empty(stop - start, dtype=torch.float64, device=device)
    for begin in range(start, stop, CHUNK):
        end = min(begin + CHUNK, stop)
        pair_start, pair_stop = begin // 2 * 2, -(-end // 2) * 2
        pairs = uniform(key, pair_start, pair_stop, device=device).view(-1, 2)
        radius = (_log(pairs[:, 0]) * -2.0).sqrt_()
        cosine, sine = _cosine_and_sine_of_turns(pairs[:, 1])
        values = torch.stack((radius * cosine, radius * sine), dim=-1).flatten()
        result[begin - start : end - start] = values[begin - pair_start : end - pair_start]
    return result


def to_uniform(words: Tensor) -> Tensor:
    """32-bit words -> float64 on (0, 1): the centres of 2^32 equal intervals, so that 0 and 1 never occur."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule; coefficients from the highest power down."""
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result.mul_(x).add_(coefficient)
    return result


_LOG_SERIES = [2.0 / n for n in range(21, 0, -2)]


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal numbers: log m + e log 2, with log m = 2 artanh((m - 1) / (m + 1))."""
    mantissa, exponent = torch.frexp(x)  # m in [1/2, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2, mantissa)  # m in [sqrt(1/2), sqrt(2)): the series converges fast
    exponent = exponent.to(torch.float64) - low.to(torch.float64)
    ratio = (mantissa - 1) / (mantissa + 1)
    return ratio * _polynomial(ratio * ratio, _LOG_SERIES) + exponent * math.log(2.0)


_SINE_SERIES = [(-1) ** n * (2 * math.pi) ** (2 * n + 1) / math.factorial(2 * n + 1) for n in range(9, -1, -1)]
_COSINE_SERIES = [(-1) ** n * (2 * math.pi) ** (2 * n) / math.factorial(2 * n) for n in range(9, -1, -1)]


def _cosine_and_sine_of_turns(turns: Tensor) -> tuple[Tensor, Tensor]:
    """cos(2 pi t), sin(2 pi t): Taylor series within an eighth of a turn of the nearest quarter, then rotated."""
    quarter = (turns * 4).round()
    rest = turns - quarter * 0.25
    square = rest * rest
    cosine, sine = _polynomial(square, _COSINE_SERIES), rest * _polynomial(square, _SINE_SERIES)
    quarter = quarter.to(torch.int64) & 3
    odd = (quarter & 1).bool()
    cosine, sine = torch.where(odd, -sine, cosine), torch.where(odd, cosine, sine)
    half = 1.0 - (quarter & 2).to(torch.float64)
    return cosine * half, sine * half
