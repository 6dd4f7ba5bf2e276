"""The cosine of a step's gradient with the one before it: near 1 where steps go on, below 0 where they undo each other.

    cos = s s' / (|s| |s'|)         s, s': sketches of the two gradients, before clipping

Of a gradient a count sketch is kept (Charikar, Chen, Farach-Colton 2002): the model's elements, numbered through in its
order, are cut into pieces of `width`, and the pieces added up, each with a sign drawn for it. Products of two sketches
are those of the gradients, plus products of different pieces, whose signs make them cancel out: a deviation of about
sqrt((1 + cos^2) / width), whatever few elements the gradients are large in (a sample would miss or hit those). The
width is a prime, so that the columns of a matrix stand elsewhere in each piece.

Numbers of elements do not depend on how the model is split, so the sum of the ranks' sketches is that of the whole, and
every layout has the same. A model of no more than `LEAST` elements is its own sketch, and its cosine exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim import Split
from modelworks.train.health.elements import row_numbers

LEAST, MOST = 4096, 65_536  # numbers of a sketch; the first unless the model is smaller
SHARE = 0.008  # of the parameters' bytes, between these
_AT_ONCE = 1 << 20  # elements of a part that is scattered over the whole tensor


class ConsecutiveCosine:
    """Of one rank. split: how the parameters lie in the whole model. itemsize: bytes of one of their elements. `keep` a
    step's gradients, then `compare` the next one's."""

    def __init__(self, split: Split, itemsize: int) -> None:
        sizes = [math.prod(shape) for shape in split.shapes.values()]
        self._first = dict(zip(split.shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self._specs = {name: spec for name, spec in split.specs.items() if spec.counted and spec.n_local}
        self.width = _width(sum(sizes), itemsize)
        draw = torch.Generator().manual_seed(0)
        n_pieces = -(-sum(sizes) // self.width)
        self._signs = 2 * torch.randint(2, (n_pieces,), generator=draw, dtype=torch.int8) - 1
        self._kept: tuple[int, Tensor] | None = None
        self.sketches = torch.zeros(2, self.width, dtype=torch.float64)

    def keep(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """gradients: of the shards, unscaled, before clipping."""
        self._kept = (step, self._sketch(gradients))

    def compare(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """`sketches` then has this rank's summands of both, (2, width); zeros where the step before was not kept."""
        self.sketches = torch.zeros(2, self.width, dtype=torch.float64)
        if self._kept is not None and self._kept[0] == step - 1:
            self.sketches[0], self.sketches[1] = self._kept[1], self._sketch(gradients)

    @property
    def n_bytes(self) -> int:
        """Held between two steps."""
        return self._signs.nbytes + (self._kept[1].nbytes if self._kept else 0)

    def _sketch(self, gradients: Mapping[str, Tensor]) -> Tensor:
        held = [(name, gradients[name]) for name in self._specs if name in gradients]
        if not held:
            return torch.zeros(self.width)
        first = held[0][1]
        sketch = first.new_zeros(self.width, dtype=torch.promote_types(first.dtype, torch.float32))
        for name, gradient in held:
            spec, start = self._specs[name], self._first[name]
            if all(bounds == (0, size) for bounds, size in list(zip(spec.bounds, spec.shape, strict=True))[1:]):
                above = spec.bounds[0][0] * math.prod(spec.shape[1:]) if spec.shape else 0
                self._add_run(sketch, gradient.reshape(-1).to(sketch.dtype), start + above)
            else:
                self._add_rows(sketch, gradient.reshape(-1, gradient.shape[-1]), spec, start)
        return sketch

    def _add_run(self, sketch: Tensor, flat: Tensor, start: int) -> None:
        """flat: elements that follow each other, the first of them number `start`."""
        signs, width = self._signs, self.width
        piece, place = divmod(start, width)
        head = min(len(flat), width - place) if place else 0
        if head:
            sketch[place : place + head].add_(flat[:head], alpha=int(signs[piece]))
            piece += 1
        whole = (len(flat) - head) // width
        if whole:
            of_pieces = signs[piece : piece + whole].to(sketch)
            sketch.add_(of_pieces @ flat[head : head + whole * width].view(whole, width))
        rest = flat[head + whole * width :]
        if len(rest):
            sketch[: len(rest)].add_(rest, alpha=int(signs[piece + whole]))

    def _add_rows(self, sketch: Tensor, rows: Tensor, spec: ShardSpec, start: int) -> None:
        """rows: parts of rows of the whole tensor."""
        numbers, signs = row_numbers(spec).to(rows.device), self._signs.to(rows.device)
        columns = torch.arange(*spec.bounds[-1], device=rows.device)
        for part in range(0, len(rows), many := max(1, _AT_ONCE // len(columns))):
            number = (start + numbers[part : part + many, None] * spec.shape[-1] + columns).reshape(-1)
            piece = torch.div(number, self.width, rounding_mode="floor")
            signed = rows[part : part + many].reshape(-1).to(sketch) * signs[piece]
            sketch.index_add_(0, number - piece * self.width, signed)


def cosine(sketches: Tensor) -> float | None:
    """sketches: (2, width), over all ranks. None where a gradient is zero or not finite, or there was none before."""
    before, now = sketches.double().cpu()
    scale = float(before.norm() * now.norm())
    found = float(before @ now) / scale if scale and math.isfinite(scale) else math.nan
    return found if math.isfinite(found) else None


def _width(size: int, itemsize: int) -> int:
    """A prime, but for a model that is its own sketch."""
    if size <= LEAST:
        return size
    wanted = max(LEAST, min(MOST, int(SHARE * size * itemsize / 4)))
    return next(n for n in range(wanted, 1, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
