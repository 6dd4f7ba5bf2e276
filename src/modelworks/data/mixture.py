"""`Mixture`: which source global sample i comes from, in closed form.

The sources are the leaves of a binary tree. At a node whose left side has share p = a/b, the first i samples that
reach it hold floor((i a + r) / b) for the left, with a phase 0 <= r < b taken from the seed; sample i goes left where
that number grows. Both sides are such sequences again, so that

    counts(i)   samples of each source among the first i
    source(i)   the source of sample i, the one whose count grows

cost one division a level, at any i, with no walk from 0. At each node the count is less than 1 from its ideal
share, and an error shrinks by the share of the side it goes down: every prefix stays within the tree's depth of the
ideal. Weights are taken as the decimal numbers that were written, so that proportions are exact.

A change of weights at sample index c starts a new tree at c; what each source had given by then is a fixed number
to which the new counts are added. No sample is lost or repeated whatever the changes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from modelworks.config import MixtureChange, UserError, nearest

# b below 2^31 keeps every product inside int64.
_LARGEST_TOTAL = 2**30
Counts = NDArray[np.int64]


class Mixture:
    """weights: of each source by name, in order. changes: later weights from a sample index on."""

    def __init__(self, weights: Mapping[str, float], changes: Sequence[MixtureChange] = (), seed: int = 0) -> None:
        self.names = list(weights)
        self._segments: list[_Segment] = []
        given = np.zeros(len(self.names), np.int64)
        for place, (start, shares) in enumerate(_schedule(weights, changes)):
            if self._segments:
                before = self._segments[-1]
                given = given + before.tree.counts(np.array([start - before.start]))[:, 0]
            tree = _Tree([shares[name] for name in self.names], f"{seed}/{place}")
            self._segments.append(_Segment(start, given, tree))
        self._starts = np.array([segment.start for segment in self._segments])

    def counts(self, samples: NDArray[np.int64]) -> Counts:
        """(sources, len(samples)): how many of the first `samples[j]` samples come from each source."""
        samples = np.asarray(samples, np.int64)
        result = np.zeros((len(self.names), len(samples)), np.int64)
        # a sample index that is a segment's start belongs to it: its counts there are `given`
        segment_of = np.searchsorted(self._starts, samples, side="right") - 1
        for place in np.unique(segment_of):
            segment, here = self._segments[place], segment_of == place
            result[:, here] = segment.given[:, None] + segment.tree.counts(samples[here] - segment.start)
        return result

    def draw(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each global sample index its source's number and its own place among that source's samples."""
        samples = np.asarray(samples, np.int64)
        before, after = self.counts(samples), self.counts(samples + 1)
        sources = np.argmax(after - before, axis=0)
        return sources, np.take_along_axis(before, sources[None], axis=0)[0]


@dataclass(frozen=True)
class _Segment:
    start: int
    given: Counts
    tree: _Tree


class _Tree:
    """The shares of one segment."""

    def __init__(self, weights: Sequence[Fraction], key: str) -> None:
        self._totals = _whole(weights)
        self._key = key

    def counts(self, samples: NDArray[np.int64]) -> Counts:
        result = np.zeros((len(self._totals), len(samples)), np.int64)
        used = [place for place, total in enumerate(self._totals) if total]
        self._share_out(used, np.asarray(samples, np.int64), result)
        return result

    def _share_out(self, places: list[int], samples: NDArray[np.int64], result: Counts) -> None:
        if len(places) == 1:
            result[places[0]] = samples
            return
        middle = len(places) // 2
        left, right = places[:middle], places[middle:]
        a, b = sum(self._totals[p] for p in left), sum(self._totals[p] for p in places)
        divisor = math.gcd(a, b)
        a, b = a // divisor, b // divisor
        phase = _phase(f"{self._key}/{places[0]}-{places[-1]}", b)
        whole, rest = np.divmod(samples, b)
        lefts = whole * a + (rest * a + phase) // b  # floor((samples a + phase) / b) without leaving int64
        self._share_out(left, lefts, result)
        self._share_out(right, samples - lefts, result)


def _schedule(weights: Mapping[str, float], changes: Sequence[MixtureChange]) -> list[tuple[int, dict[str, Fraction]]]:
    """Segments as (first sample, share by source), checked."""
    segments = [(0, {name: Fraction(str(weight)) for name, weight in weights.items()})]
    for number, change in enumerate(changes):
        where = f"data.mixture_changes.{number}"
        for name in change.weights:
            if name not in weights:
                near = nearest(name, weights)
                hint = f" (did you mean `{near}`?)" if near else ""
                raise UserError(f"{where}: no source `{name}`, there are {', '.join(weights)}{hint}")
        missing = [name for name in weights if name not in change.weights]
        if missing:
            raise UserError(f"{where}: name every source; missing {', '.join(missing)} (0 switches a source off)")
        if not any(change.weights.values()):
            raise UserError(f"{where}: at least one weight must be above 0")
        if number and change.at <= changes[number - 1].at:
            raise UserError(f"{where}: `at` must grow from one change to the next, got {change.at}")
        shares = {name: Fraction(str(change.weights[name])) for name in weights}
        if change.at == 0:
            segments = []
        segments.append((change.at, shares))
    return segments


def _whole(weights: Sequence[Fraction]) -> list[int]:
    """Whole numbers in the same proportion; beyond 2^30 together they are rounded, 1e-9 of the whole at most."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole)
    whole = [number // divisor for number in whole]
    total = sum(whole)
    if total > _LARGEST_TOTAL:
        whole = [max(1, round(number * _LARGEST_TOTAL / total)) if number else 0 for number in whole]
    return whole


def _phase(key: str, below: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % below
