"""Naming the suspect: what is wrong with a layout follows from *which* quantities differ, and by what factor.

A wrong initial value, a layer's output, the loss alone, gradients of certain kinds of parameters, the norm alone or
the update alone each point to another part of the machine. A gradient that is an exact multiple of the right one
points to an axis of that degree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from modelworks.config import ParallelConfig
from modelworks.layout import AXES, placement
from modelworks.verify.observed import Observed


def name_suspects(
    whole: Observed,
    split: Observed,
    parallel: ParallelConfig,
    errors: Mapping[str, float],
    gradient: Mapping[str, float],
    missing: list[str],
    layer: int | None,
    bound: float,
) -> list[str]:
    """What to look at, most telling first. errors: by quantity; gradient: error by parameter; missing: parameters on
    no rank; layer: the first whose output differs."""
    if missing:
        return [f"pipeline partition: {len(missing)} parameters are on no rank (first: {missing[0]})"]
    if not errors["initial"] <= bound:
        name = next(n for n in whole.initial if not float((split.initial[n] - whole.initial[n]).abs().max()) <= bound)
        return [f"initialisation: {name} starts with other values than in one process (shards drawn by rank?)"]
    if layer is not None:
        return [_forward(layer, parallel)]
    if not errors["loss"] <= bound:
        factor = split.losses[0] / whole.losses[0]
        return [f"loss: hidden states agree, the loss is {factor:.6g} times the right one ({_axis(factor, parallel)})"]
    if not errors["gradient"] <= bound:
        return _backward(whole, split, parallel, gradient, bound)
    if not errors["norm"] <= bound:
        factor = split.norms[0] / whole.norms[0]
        return [
            f"gradient norm: gradients agree, their norm is {factor:.6g} times the right one: elements are counted "
            "more than once, or not at all"
        ]
    return ["update: gradients and norm agree: clipping, optimiser state, or gathering parameters after the update"]


def _forward(layer: int, parallel: ParallelConfig) -> str:
    causes = {
        "dropout": True,
        "attention masks": parallel.cp == 1,
        "context parallel (ring order, masks)": parallel.cp > 1,
        "tensor parallel forward": parallel.tp > 1,
        "expert dispatch": parallel.ep > 1,
        "pipeline edges (a stale micro-batch)": parallel.pp > 1,
    }
    where = "the embedding" if layer < 0 else f"layer {layer}"
    likely = ", ".join(cause for cause, possible in causes.items() if possible)
    return f"forward pass: {where} is the first whose output differs; look at {likely}"


_BY_KIND = {
    "experts": "expert parallel: only experts' gradients are wrong: their dispatch, or their reduction over "
    "expert_shard and expert_replicate",
    "whole": "tensor/sequence parallel: only weights that every tensor rank holds whole are wrong: their sum over tp",
    "keys": "tensor or context parallel: only keys and values are wrong: the sum over ranks that hold copies of a head "
    "(kv), or the ring's backward pass",
    "vocabulary": "embedding and head: only vocabulary weights are wrong: the vocabulary-parallel loss, or a tied "
    "weight's sum between its two owners",
}


def _backward(
    whole: Observed, split: Observed, parallel: ParallelConfig, gradient: Mapping[str, float], bound: float
) -> list[str]:
    wrong = [name for name, error in gradient.items() if not error <= bound]
    suspects = []
    factor = _common_factor(whole, split, wrong)
    if factor is not None:
        suspects.append(f"every wrong gradient is {factor:.6g} times the right one: {_axis(factor, parallel)}")
    kinds = {placement(name) for name in wrong}
    alive = [name for name in gradient if float(whole.gradients[0][name].norm()) > 0]
    everything = len(wrong) > 0.9 * len(alive)
    if kinds <= {"expert_column", "expert_row"}:
        suspects.append(_BY_KIND["experts"])
    elif kinds <= {"replicated", "per_head"} and parallel.tp > 1:
        suspects.append(_BY_KIND["whole"])
    elif kinds <= {"kv_heads"}:
        suspects.append(_BY_KIND["keys"])
    elif kinds <= {"vocabulary"}:
        suspects.append(_BY_KIND["vocabulary"])
    elif everything:
        axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(parallel, axis) > 1]
        suspects.append(
            f"data axes: all gradients are wrong: a reduction over {', '.join(axes) or 'no axis'} is missing, repeated "
            "or scaled, or the denominator of the loss is wrong"
        )
    layers = sorted({int(name.split(".")[1]) for name in wrong if name.startswith("blocks.")})
    if layers and not everything:
        suspects.append(f"backward pass: layers with wrong gradients go from {layers[0]} to {layers[-1]}")
    return suspects or [f"backward pass: {len(wrong)} gradients are wrong, first {wrong[0]}"]


def _common_factor(whole: Observed, split: Observed, wrong: list[str]) -> float | None:
    """The k with split = k whole for all wrong gradients alike; None where there is none."""
    factors = [_factor(split.gradients[0][name], whole.gradients[0][name]) for name in wrong]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(wrong) or max(known) - min(known) > 1e-6 * abs(known[0]):
        return None
    return known[0]


def _factor(ours: Tensor, theirs: Tensor) -> float | None:
    square = float((theirs * theirs).sum())
    if square == 0.0:
        return None
    factor = float((ours * theirs).sum()) / square
    return factor if float((ours - factor * theirs).norm()) <= 1e-8 * math.sqrt(square) else None


def _axis(factor: float, parallel: ParallelConfig) -> str:
    """The axis whose degree such a factor points to."""
    for axis in (*AXES, "ep"):
        degree = getattr(parallel, axis)
        for wrong, why in ((degree, "summed once too often"), (1.0 / degree, "averaged, or not summed")):
            if degree > 1 and abs(factor - wrong) < 1e-9 * wrong:
                return f"{axis}={degree}, {why}"
    return "no axis has this degree; look at the denominator of the loss first"
