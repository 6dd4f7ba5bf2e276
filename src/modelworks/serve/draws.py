"""Tokens drawn from rows of logits, and tokens forbidden in them: by compiled code on a CPU, by torch anywhere else.

Both are the mathematics of `models/sampling.py`, and a row's result is a function of that row alone. Where a
distribution has weights that only differ in the last bits of a double, the two may draw differently.
"""

from __future__ import annotations

import ctypes
import logging
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.models import Filters, draw_filtered
from modelworks.native import Unavailable, load

IS_NOT_FINITE = -1
NOTHING_ALLOWED = -2


@dataclass(frozen=True)
class Settings:
    """Of some rows, each an array (R,): temperature, top_p, min_p, typical_p float64, top_k int64 (0: all)."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    typical_p: NDArray[np.float64]

    def __getitem__(self, places: NDArray[np.int64]) -> Settings:
        return Settings(*(array[places] for array in vars(self).values()))


def best_tokens(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The most likely token of each row (R, V), the one with the lowest id among equals, and its logit.

    A row that holds a NaN gives a NaN.
    """
    if logits.device.type == "cpu":  # numpy's argmax is vectorised; torch's takes ten times as long
        array = logits.numpy()
        tokens = array.argmax(axis=-1)
        return tokens, array[np.arange(len(array)), tokens]
    values, places = logits.max(dim=-1)
    return places.cpu().numpy(), values.cpu().numpy()


def draw_tokens(
    logits: Tensor, rows: NDArray[np.int64], settings: Settings, uniforms: NDArray[np.float64], *, native: bool = True
) -> NDArray[np.int64]:
    """A token of each of `rows` of logits (R, V) float32; IS_NOT_FINITE or NOTHING_ALLOWED where there is none.

    settings, uniforms (in (0, 1)): one for each of `rows`.
    """
    tokens = np.empty(len(rows), np.int64)
    compiled = library() if native and logits.device.type == "cpu" and logits.stride(-1) == 1 else None
    # Few ask for typical sampling, and it looks at a whole distribution: torch's turn.
    fast = (settings.typical_p >= 1.0) & (compiled is not None)
    for places, function in ((fast.nonzero()[0], _draw_compiled), (np.logical_not(fast).nonzero()[0], _draw_torch)):
        if len(places):
            tokens[places] = function(logits, rows[places], settings[places], uniforms[places])
    return tokens


def forbid(logits: Tensor, rows: NDArray[np.int64], allowed: NDArray[np.int32], *, native: bool = True) -> None:
    """-inf, in place, in each of `rows` of logits (R, V) for the tokens whose bit in `allowed` (rows, words) is 0.

    A word has the bits of 32 tokens, the lowest first.
    """
    compiled = library() if native and logits.device.type == "cpu" and logits.stride(-1) == 1 else None
    if compiled is not None:
        arrays: list[NDArray[Any]] = [np.ascontiguousarray(rows), np.ascontiguousarray(allowed)]
        compiled.forbid_rows(*_matrix(logits), len(rows), *map(_address, arrays), allowed.shape[1])
        return
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[-1]]
    places = torch.from_numpy(rows).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[places] = logits[places].masked_fill(forbidden, -math.inf)


def _draw_compiled(
    logits: Tensor, rows: NDArray[np.int64], settings: Settings, uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    compiled = library()
    assert compiled is not None
    tokens = np.empty(len(rows), np.int64)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(settings.min_p)
    given: tuple[NDArray[Any], ...] = (rows, settings.temperature, settings.top_k, settings.top_p, log_min_p, uniforms)
    arrays = [np.ascontiguousarray(array) for array in given]  # held here: only their addresses are handed over
    compiled.draw_rows(*_matrix(logits), len(rows), *map(_address, arrays), _address(tokens))
    return tokens


def _draw_torch(
    logits: Tensor, rows: NDArray[np.int64], settings: Settings, uniforms: NDArray[np.float64]
) -> NDArray[np.int64]:
    def column(array: NDArray[Any], used: bool) -> Tensor | None:
        return torch.from_numpy(array).to(device)[:, None] if used else None

    device, vocab_size = logits.device, logits.shape[-1]
    chosen = logits[torch.from_numpy(rows).to(device)]
    best = chosen.amax(dim=-1).cpu().numpy()
    filters = Filters(
        torch.from_numpy(settings.temperature).to(device)[:, None],
        column(np.where(settings.top_k == 0, vocab_size, settings.top_k), bool(settings.top_k.any())),
        column(settings.top_p, bool((settings.top_p < 1.0).any())),
        column(settings.min_p, bool((settings.min_p > 0.0).any())),
        column(settings.typical_p, bool((settings.typical_p < 1.0).any())),
    )
    # A row without a finite best has no draw; what is done with it beside the others is thrown away.
    hopeless = torch.from_numpy(~np.isfinite(best)).to(device)[:, None]
    uniforms_there = torch.from_numpy(uniforms).to(device)
    tokens = draw_filtered(chosen.masked_fill(hopeless, 0.0), filters, uniforms_there).cpu().numpy()
    return np.where(best == -np.inf, NOTHING_ALLOWED, np.where(np.isfinite(best), tokens, IS_NOT_FINITE))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code, or None where it cannot be had, which is said once."""
    try:
        # Contraction saves a third of the exponential's instructions; the file asks for no particular rounding.
        library = load("draws", [Path(__file__).with_name("draws.cpp")], flags=("-ffp-contract=fast",))
    except Unavailable as error:
        logging.getLogger(__name__).warning("sampling in torch, which is slower: %s", error)
        return None
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    library.draw_rows.argtypes = [pointer, whole, whole, whole, *[pointer] * 7]
    library.forbid_rows.argtypes = [pointer, whole, whole, whole, pointer, pointer, whole]
    library.draw_rows.restype = library.forbid_rows.restype = None
    return library


def _matrix(logits: Tensor) -> tuple[int, int, int]:
    assert logits.dtype == torch.float32
    return logits.data_ptr(), logits.stride(0), logits.shape[1]


def _address(array: NDArray[Any]) -> int:
    address: int = array.ctypes.data
    return address
