"""Moments in 8 bits in one pass: decode a tile, update, measure its largest magnitude, encode it again.

A tile is at most 256 elements, and what it decodes to stays in the first-level cache; beside codes and scales nothing
is written but the weights. Tiles and tables are those of `modelworks.optim.codec`, whose operations give the same
codes.

Encoding takes one look-up an element. Floats sort as integers do once negative ones are turned round, and their upper
16 bits leave two codes at most. The table holds, for these bits, what added to all bits carries into the code above
exactly where the value lies above the limit between the two: code = (table[bits >> 16] + bits) >> 16, in its lower 8
bits.

Integers are cast back to 32 bits at each operation, which numba would widen to 64: half as many fit a vector.
"""

from __future__ import annotations

import numpy as np

from modelworks.optim.kernels import Array, kernel

Geometry = tuple[int, int, int, int, int, int, int, int, int]

_TILE = 256
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_LARGEST = np.int32(0x7F7FFFFF)  # the largest finite float32, as bits


def carry_table(lower: Array, limits: Array) -> Array:
    """lower: by the upper 16 bits of a float, plus 2^15, the code of the least float with these bits. limits: above
    which the next code is nearer. Returns int32, by the upper 16 bits, unsigned, of a float turned round."""
    upper = np.arange(1 << 16, dtype=np.int64)
    signed = np.where(upper < 1 << 15, upper, upper - (1 << 16))
    codes = lower[np.where(signed < 0, -1 - signed - (1 << 15), signed) + (1 << 15)].astype(np.int64)
    bits = turned_round(limits.view(np.int32)).astype(np.int64)
    first = signed << 16
    inside = (codes < 255) & (bits[codes] >= first) & (bits[codes] < first + (1 << 16))
    least_above = np.where(inside, bits[codes] - first + 1, 1 << 16)
    return ((codes << 16) + (1 << 16) - least_above - first).astype(np.uint32).view(np.int32)


def turned_round(bits: Array) -> Array:
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@kernel
def adam_tiles(
    value: Array, gradient: Array, codes1: Array, scales1: Array, codes2: Array, scales2: Array, largest1: Array,
    largest2: Array, agreed: bool, writes: bool, first_unit: int, last_unit: int, geometry: Geometry, values1: Array,
    values2: Array, carries1: Array, carries2: Array, weight1: float, weight2: float, keep2: float, scale1: float,
    scale2: float, eps: float, lr: float, keep: float, decay: float,
) -> None:  # fmt: skip
    """Rows of tiles from first_unit to last_unit. Adam's settings as in `kernels.lamb_moments`; decay: through the
    gradient; keep: 1 - lr times decay of the weights.

    geometry: `Blocks.geometry`. largest1, largest2: of each tile, the largest magnitude; read where they are agreed on,
    written otherwise. writes: codes and scales; without, only weights and largest magnitudes.
    """
    m, v, found = np.empty(_TILE, np.float32), np.empty(_TILE, np.float32), np.empty(_TILE, np.int32)
    m_bits, v_bits, m_upper, v_upper = m.view(np.int32), v.view(np.int32), m.view(np.uint16), v.view(np.uint16)
    dtype = value.dtype.type
    wide = geometry[8]
    for unit in range(first_unit, last_unit):
        for column in range(wide):
            tile = unit * wide + column
            start, height, width, stride = _rectangle(unit, column, geometry)
            top1, top2 = scales1[tile], scales2[tile]
            for row in range(height):
                at, to = start + row * stride, row * width
                p_row, g_row = value[at : at + width], gradient[at : at + width]
                m_row, v_row = m[to : to + width], v[to : to + width]
                _decode(codes1[at : at + width], values1, m_row)
                _decode(codes2[at : at + width], values2, v_row)
                for i in range(width):
                    g = g_row[i] + decay * p_row[i]
                    first = dtype(m_row[i] * top1)
                    first = first + (g - first) * weight1
                    second = dtype(v_row[i] * top2) * keep2 + (weight2 * g) * g
                    m_row[i], v_row[i] = np.float32(first), np.float32(second)
                    direction = first * scale1 / (np.sqrt(second) * scale2 + eps)
                    p_row[i] = p_row[i] * keep - lr * direction
            n = height * width
            if not agreed:
                largest1[tile], largest2[tile] = _largest(m_bits, n, found), _largest(v_bits, n, found)
            if writes:
                scales1[tile], scales2[tile] = largest1[tile], largest2[tile]
                _encode(m, m_bits, m_upper, largest1[tile], carries1, found, n)
                _put(found, m_bits, codes1, start, height, width, stride)
                _encode(v, v_bits, v_upper, largest2[tile], carries2, found, n)
                _put(found, v_bits, codes2, start, height, width, stride)


@kernel
def lion_tiles(
    value: Array, gradient: Array, codes: Array, scales: Array, largest: Array, agreed: bool, writes: bool,
    first_unit: int, last_unit: int, geometry: Geometry, values: Array, carries: Array, lr: float, keep: float,
    ahead: float, weight: float,
) -> None:  # fmt: skip
    """As `adam_tiles`, with Lion's settings as in `kernels.lion`."""
    m, found = np.empty(_TILE, np.float32), np.empty(_TILE, np.int32)
    m_bits, m_upper = m.view(np.int32), m.view(np.uint16)
    dtype = value.dtype.type
    zero = dtype(0)
    wide = geometry[8]
    for unit in range(first_unit, last_unit):
        for column in range(wide):
            tile = unit * wide + column
            start, height, width, stride = _rectangle(unit, column, geometry)
            top = scales[tile]
            for row in range(height):
                at, to = start + row * stride, row * width
                p_row, g_row, m_row = value[at : at + width], gradient[at : at + width], m[to : to + width]
                _decode(codes[at : at + width], values, m_row)
                for i in range(width):
                    average = dtype(m_row[i] * top)
                    apart = g_row[i] - average
                    direction = average + apart * ahead
                    step = lr if direction > zero else (-lr if direction < zero else zero)
                    p_row[i] = p_row[i] * keep - step
                    m_row[i] = np.float32(average + apart * weight)
            n = height * width
            if not agreed:
                largest[tile] = _largest(m_bits, n, found)
            if writes:
                scales[tile] = largest[tile]
                _encode(m, m_bits, m_upper, largest[tile], carries, found, n)
                _put(found, m_bits, codes, start, height, width, stride)


@kernel
def _rectangle(unit: int, column: int, geometry: Geometry) -> tuple[int, int, int, int]:
    """Where a tile's first element is, its rows and columns as far as they are here, and from row to row."""
    _, rows, columns, height, width, above, left, tall, _ = geometry
    stack, tile_row = unit // tall, unit % tall
    top, bottom = max(0, tile_row * height - above), min(rows, (tile_row + 1) * height - above)
    first, last = max(0, column * width - left), min(columns, (column + 1) * width - left)
    return (stack * rows + top) * columns + first, bottom - top, last - first, columns


@kernel
def _decode(codes: Array, values: Array, into: Array) -> None:
    for i in range(codes.size):
        into[i] = values[codes[i]]


@kernel
def _largest(bits: Array, n: int, scratch: Array) -> float:
    """As `Blocks.largest`: infinity counts as the largest float32, and not a number wins."""
    top = np.int32(0)
    for i in range(n):
        top = max(top, np.int32(bits[i] & _MAGNITUDE))
    scratch[0] = _LARGEST if top == _INFINITY else top
    largest: float = scratch.view(np.float32)[0]
    return largest


@kernel
def _encode(scaled: Array, bits: Array, upper: Array, scale: float, carries: Array, found: Array, n: int) -> None:
    """Leaves in `found` and `bits` what `_put` adds."""
    divisor = scale if scale != np.float32(0) else np.float32(1)
    for i in range(n):
        scaled[i] = scaled[i] / divisor
    for i in range(n):
        bits[i] = np.int32(bits[i] ^ (np.int32(bits[i] >> 31) & _MAGNITUDE))
    for i in range(n):
        found[i] = carries[upper[2 * i + 1]]


@kernel
def _put(found: Array, bits: Array, codes: Array, start: int, height: int, width: int, stride: int) -> None:
    for row in range(height):
        at, to = start + row * stride, row * width
        code, entry, own = codes[at : at + width], found[to : to + width], bits[to : to + width]
        for i in range(width):
            code[i] = np.uint8(np.int32(entry[i] + own[i]) >> 16)
