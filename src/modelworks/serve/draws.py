"""Tokens drawn from rows of logits, and tokens forbidden in them: by compiled code on a CPU, by torch anywhere else.

Both are the mathematics of `models/sampling.py`, and a row's result is a function of that row alone. Where a
distribution has weights that only differ in the last bits of a double, the two may draw differently.
"""

from __future__ import annotations

import ctypes
import logging
import math
from ctypes import c_int64, c_void_p
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
    if not len(rows):
        return np.empty(0, np.int64)
    compiled = compiled_for(logits) if native else None
    if compiled is None:
        return _draw_torch(logits, rows, settings, uniforms)
    tokens = np.empty(len(rows), np.int64)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(settings.min_p)
    given = settings.temperature, settings.top_k, settings.top_p, log_min_p, settings.typical_p, uniforms
    call_on_rows(compiled.draw_rows, logits, rows, *given, tokens)
    return tokens


def forbid(logits: Tensor, rows: NDArray[np.int64], allowed: NDArray[np.int32], *, native: bool = True) -> None:
    """-inf, in place, in each of `rows` of logits (R, V) for the tokens whose bit in `allowed` (rows, words) is 0.

    A word has the bits of 32 tokens, the lowest first.
    """
    compiled = compiled_for(logits) if native else None
    if compiled is not None:
        call_on_rows(compiled.forbid_rows, logits, rows, allowed, allowed.shape[1])
        return
    bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[-1]]
    places = torch.from_numpy(rows).to(logits.device)
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[places] = logits[places].masked_fill(forbidden, -math.inf)


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
    for function in (library.draw_rows, library.forbid_rows, library.report_rows):
        function.restype = None
    return library


def compiled_for(logits: Tensor) -> ctypes.CDLL | None:
    """The compiled code, where it can work on these."""
    return library() if logits.device.type == "cpu" and logits.stride(-1) == 1 else None


def call_on_rows(function: Any, logits: Tensor, rows: NDArray[np.int64], *given: NDArray[Any] | int) -> None:
    """A function of the compiled code on `rows` of logits (R, V) float32. It gets the addresses of arrays, which must
    be of the types that it expects, and writes into the last ones; whole numbers as they are."""
    assert logits.dtype == torch.float32
    held = [each if isinstance(each, int) else np.ascontiguousarray(each) for each in (rows, *given)]
    handed = [c_int64(each) if isinstance(each, int) else c_void_p(each.ctypes.data) for each in held]
    sizes = map(c_int64, (logits.stride(0), logits.shape[1], len(rows)))
    function(c_void_p(logits.data_ptr()), *sizes, *handed)
