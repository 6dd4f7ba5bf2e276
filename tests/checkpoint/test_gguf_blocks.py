"""Every storage type against its block formula, written out one value at a time, on random bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from modelworks.checkpoint.formats.gguf import KINDS, dequantized
from modelworks.checkpoint.formats.gguf_header import GgufHeader, GgufTensor


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(b: bytes) -> list[float]:
    d, q = half(b, 0), b[2:]
    return [d * ((v & 15) - 8) for v in q] + [d * ((v >> 4) - 8) for v in q]


def q4_1(b: bytes) -> list[float]:
    d, m, q = half(b, 0), half(b, 2), b[4:]
    return [d * (v & 15) + m for v in q] + [d * (v >> 4) + m for v in q]


def q5_bits(high: int, q: bytes) -> list[int]:
    low = [v & 15 for v in q] + [v >> 4 for v in q]
    return [v | ((high >> i & 1) << 4) for i, v in enumerate(low)]


def q5_0(b: bytes) -> list[float]:
    return [half(b, 0) * (v - 16) for v in q5_bits(int.from_bytes(b[2:6], "little"), b[6:])]


def q5_1(b: bytes) -> list[float]:
    return [half(b, 0) * v + half(b, 2) for v in q5_bits(int.from_bytes(b[4:8], "little"), b[8:])]


def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * signed(v) for v in b[2:]]


def q2_k(b: bytes) -> list[float]:
    scales, q, d, dmin = b[:16], b[16:80], half(b, 80), half(b, 82)
    out = []
    for i in range(256):
        part, inside = divmod(i, 128)
        shift, place = divmod(inside, 32)
        scale = scales[i // 16]
        out.append(d * (scale & 15) * (q[32 * part + place] >> 2 * shift & 3) - dmin * (scale >> 4))
    return out


def q3_k(b: bytes) -> list[float]:
    mask, q, packed, d = b[:32], b[32:96], b[96:108], half(b, 108)
    low = [v & 15 for v in packed[:8]] + [v >> 4 for v in packed[:8]]
    scales = [(low[k] | (packed[8 + k % 4] >> 2 * (k // 4) & 3) << 4) - 32 for k in range(16)]
    out = []
    for i in range(256):
        part, inside = divmod(i, 128)
        shift, place = divmod(inside, 32)
        high = mask[place] >> (4 * part + shift) & 1
        out.append(d * scales[i // 16] * ((q[32 * part + place] >> 2 * shift & 3) - (0 if high else 4)))
    return out


def scale_and_minimum(s: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def q4_k(b: bytes) -> list[float]:
    d, dmin, s, q = half(b, 0), half(b, 2), b[4:16], b[16:]
    out = []
    for i in range(256):
        group, place = divmod(i, 32)
        scale, minimum = scale_and_minimum(s, group)
        out.append(d * scale * (q[32 * (group // 2) + place] >> 4 * (group % 2) & 15) - dmin * minimum)
    return out


def q5_k(b: bytes) -> list[float]:
    d, dmin, s, high, q = half(b, 0), half(b, 2), b[4:16], b[16:48], b[48:]
    out = []
    for i in range(256):
        group, place = divmod(i, 32)
        scale, minimum = scale_and_minimum(s, group)
        value = (q[32 * (group // 2) + place] >> 4 * (group % 2) & 15) + 16 * (high[place] >> group & 1)
        out.append(d * scale * value - dmin * minimum)
    return out


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], b[192:208], half(b, 208)
    out = []
    for i in range(256):
        part, inside = divmod(i, 128)
        quarter, place = divmod(inside, 32)
        four = low[64 * part + 32 * (quarter % 2) + place] >> 4 * (quarter // 2) & 15
        value = (four | (high[32 * part + place] >> 2 * quarter & 3) << 4) - 32
        out.append(d * signed(scales[i // 16]) * value)
    return out


FORMULAS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda b: [struct.unpack("<f", b)[0]],
    "F16": lambda b: [half(b, 0)],
    "BF16": lambda b: [struct.unpack("<f", b"\0\0" + b)[0]],
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
# Where a block holds half-precision scales: random bits there would mostly be huge or not a number.
SCALES = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82]}
SCALES |= {"Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


def blocks(kind: GGMLQuantizationType, count: int) -> Iterator[bytes]:
    random = np.random.default_rng(kind)
    for _ in range(count):
        if kind.name in ("F32", "BF16"):
            whole = struct.pack("<f", random.normal())
            yield whole if kind.name == "F32" else whole[2:]
            continue
        block = bytearray(random.bytes(GGML_QUANT_SIZES[kind][1]))
        for at in SCALES[kind.name]:
            struct.pack_into("<e", block, at, random.normal())
        yield bytes(block)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_block_formula(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
    rows, per_row = 3, 2
    data = list(blocks(kind, rows * per_row))
    assert all(len(block) == bytes_per_block for block in data)
    (tmp_path / "file").write_bytes(b"before" + b"".join(data))
    shape = (rows, per_row * values_per_block)
    tensor = GgufTensor("t", shape, kind, 6, len(data) * bytes_per_block)
    found = dequantized(GgufHeader(tmp_path / "file", {}, {"t": tensor}), "t")
    expected = torch.tensor([v for block in data for v in FORMULAS[kind.name](block)], dtype=torch.float64)
    assert found.dtype == torch.float32
    assert found.shape == shape
    torch.testing.assert_close(found.double(), expected.reshape(shape), rtol=1e-6, atol=1e-6)


def test_every_type_has_a_formula() -> None:
    assert {kind.name for kind in KINDS} == set(FORMULAS)
