"""Suspects where the forward pass and the loss agree and gradients do not.

Three kinds of evidence. Which rows of the batch are in the gradients: they are a sum over rows, so the wrong one may be
a sum with other coefficients (0: left out, 2: counted twice). Which kinds of parameters are wrong: each kind is summed
over other groups. And where the backward pass, which runs from the head to the embedding, first goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from modelworks.config import ParallelConfig, RunConfig
from modelworks.layout import AXES, placement
from modelworks.verify.observed import Observed
from modelworks.verify.runs import row_gradients


def gradient_suspects(
    whole: Observed, split: Observed, config: RunConfig, errors: Mapping[str, float], bound: float
) -> list[str]:
    """errors: of the first step's gradients. Most telling first; never empty."""
    wrong = [name for name, error in errors.items() if not error <= bound]
    ours, theirs = split.gradients[0], whole.gradients[0]
    if bad := [name for name in wrong if not bool(ours[name].isfinite().all())]:
        return [f"backward pass: the gradient of {bad[-1]} is not finite in the split run, in one process it is"]
    alive = [name for name in theirs if float(theirs[name].norm()) > 0]
    everything = len(wrong) > 0.9 * len(alive)
    suspects = []
    factor = _common_factor(ours, theirs, wrong)
    if factor is not None:
        axis = degree_of(factor, config.parallel) or "no axis has this degree"
        suspects.append(
            f"{_kind(wrong, config.parallel)}: every wrong gradient is {factor:.6g} times the right one, {axis}"
        )
    elif rows := _by_rows(ours, config, wrong):
        suspects.append(rows)
    if everything:
        axes = [axis for axis in ("dp_replicate", "dp_shard", "cp") if getattr(config.parallel, axis) > 1]
        suspects.append(
            f"data axes: all gradients are wrong: a reduction over {', '.join(axes) or 'no axis'} is missing, repeated "
            "or scaled, or the denominator of the loss is wrong"
        )
    elif factor is None:
        suspects.append(f"{_kind(wrong, config.parallel)}: {len(wrong)} gradients are wrong, the rest are right")
    suspects.append(_first_in_backward(list(theirs), wrong, config))
    return suspects


def degree_of(factor: float, parallel: ParallelConfig) -> str | None:
    """The axes whose degree such a factor points to."""
    found = []
    for axis in (*AXES, "ep"):
        degree = getattr(parallel, axis)
        for wrong, why in ((degree, "summed once too often"), (1.0 / degree, "averaged, or not summed")):
            if degree > 1 and abs(factor - wrong) < 1e-9 * wrong:
                found.append(f"{axis}={degree} ({why})")
    return " or ".join(found) or None


def _kind(wrong: Sequence[str], parallel: ParallelConfig) -> str:
    """What parameters that are wrong have in common, and so which sum over ranks they do not share with the rest."""
    kinds = {placement(name) for name in wrong}
    if kinds <= {"expert_column", "expert_row"}:
        return "expert parallel (only experts: their dispatch, or their sum over expert_shard and expert_replicate)"
    if parallel.tp > 1 and all(name.endswith((".o.bias", ".down.bias")) for name in wrong):
        return "tensor parallel (only biases after a row-split product: to be added once, not on each tp rank)"
    if parallel.tp > 1 and kinds <= {"replicated", "per_head"}:
        return "tensor/sequence parallel (only weights that every tp rank holds whole: their sum over tp)"
    if kinds <= {"kv_heads"}:
        return "keys and values (their sum over ranks that hold copies of a head, kv)"
    if kinds <= {"vocabulary"}:
        return "embedding and head (a tied weight's sum between its two owners, or the vocabulary-parallel part)"
    return "backward pass"


def _by_rows(ours: Mapping[str, Tensor], config: RunConfig, wrong: Sequence[str]) -> str | None:
    """The rows of the batch that the wrong gradients hold other than once; None where no such sum explains them."""
    rows = row_gradients(config)
    parts = torch.stack([torch.cat([gradients[name].flatten() for name in wrong]) for gradients in rows], dim=1)
    target = torch.cat([ours[name].flatten() for name in wrong])
    used = parts.norm(dim=0) > 0  # a row without targets adds nothing
    found = torch.linalg.lstsq(parts[:, used], target[:, None]).solution.squeeze(1)
    if float((parts[:, used] @ found - target).norm()) > 1e-8 * float(target.norm()):
        return None
    times = torch.ones(len(rows), dtype=torch.float64)
    times[used] = found
    odd: dict[str, list[int]] = {}
    for row, count in enumerate(times.tolist()):
        if abs(count - 1.0) > 1e-6:
            odd.setdefault(f"{count:.4g}" if abs(count) > 1e-6 else "0", []).append(row)
    if not odd:
        return None
    said = "; ".join(f"rows {', '.join(map(str, which))} are there {count} times" for count, which in odd.items())
    whose = _whose({row for which in odd.values() for row in which}, used, config)
    return f"rows: each belongs into the gradients once, and {said}: {whose}"


def _whose(odd: set[int], used: Tensor, config: RunConfig) -> str:
    """Whether they are all that some ranks have, or the same micro-batches of every rank."""
    data = config.parallel.dp_replicate * config.parallel.dp_shard
    numbers = torch.arange(len(used)).view(data, -1)
    causes = []
    if data > 1 and (places := _made_of(odd, numbers, used)):
        causes.append(f"all of data-parallel place {places}: a sum over data ranks, or a rank's own denominator")
    if turns := _made_of(odd, numbers.T, used):
        causes.append(f"micro-batch {turns} of every rank: accumulation over micro-batches")
    return ", or ".join(causes) or "accumulation over micro-batches, or how rows are shared out"


def _made_of(odd: set[int], sets: Tensor, used: Tensor) -> str:
    """The sets of rows that `odd` is exactly made of, rows without targets aside; empty where it is not."""
    in_use = [{row for row in rows if bool(used[row])} for rows in sets.tolist()]
    chosen = [number for number, rows in enumerate(in_use) if rows and rows <= odd]
    union = {row for number in chosen for row in in_use[number]}
    return ", ".join(map(str, chosen)) if union == odd and len(chosen) < len(sets) else ""


# The steps of a layer's backward pass, by the names of the weights that get their gradient in each.
_BACKWARD = (
    ("feed_forward.experts.", "the experts' backward: dispatch, and sums over tp"),
    (
        "feed_forward.router.",
        "the router's: weights of choices, auxiliary losses (each tp rank's share), counts over cp",
    ),
    ("feed_forward.", "the feed-forward's backward"),
    ("feed_forward_norm.", "what reaches the feed-forward's norm: the sum over tp of its inputs' gradients"),
    ("attention.o.", "what reaches the attention's output"),
    (
        "attention.",
        "the attention's backward: with cp the ring's gradients of keys and values, with tp copies of heads",
    ),
    ("attention_norm.", "what reaches the attention's norm: the sum over tp of its inputs' gradients"),
)


def _first_in_backward(names: Sequence[str], wrong: Sequence[str], config: RunConfig) -> str:
    """Where the backward pass, from head to embedding, first goes wrong."""
    layers = [int(name.split(".")[1]) for name in wrong if name.startswith("blocks.")]
    ends = [name for name in wrong if name.startswith(("head.", "final_norm."))]
    if ends:
        return f"backward pass: wrong from {ends[-1]} on: the head's gradient, and the sum over tp of hidden states'"
    if not layers:
        return f"backward pass: wrong in {wrong[0]} alone: the embedding's own part"
    layer = max(layers)
    here = [name.split(".", 2)[2] for name in wrong if name.startswith(f"blocks.{layer}.")]
    start, cause = next((start, cause) for start, cause in _BACKWARD if any(name.startswith(start) for name in here))
    first = [name for name in here if name.startswith(start)]
    return f"backward pass: wrong from layer {layer} on, first in {', '.join(first)}: {cause}"


def _common_factor(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], wrong: Sequence[str]) -> float | None:
    """The k with split = k whole for all wrong gradients alike; None where there is none."""
    factors = [_factor(ours[name], theirs[name]) for name in wrong]
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
