"""Naming the suspect: what is wrong with a layout follows from *which* quantities differ, where, and by what factor.

The rules follow the order in which a step computes, and stop at the first thing that differs, because everything after
it differs too:

    a parameter on no rank                       the partition of layers over pipeline stages
    initial values, or their copies              initialisation
    a place in the first forward pass            what that place does along each axis; which rows and columns say where
    the first loss alone                         the loss, or its denominator
    gradients of the first step                  `modelworks.verify.gradient_suspects`
    their norm alone                             elements counted twice, or not at all
    copies after the last step                   parameters not gathered, or ranks that update differently
    only later steps, or the parameters          clipping, optimiser state, the update

A suspect is where to look first, not a proof: the verdict is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from modelworks.config import RunConfig
from modelworks.layout import placement
from modelworks.layout.pipeline import stage_layers
from modelworks.parallel import sequence_columns
from modelworks.verify.differences import Differences, largest
from modelworks.verify.gradient_suspects import degree_of, gradient_suspects
from modelworks.verify.observed import Observed, Place


def name_suspects(whole: Observed, split: Observed, config: RunConfig, found: Differences, bound: float) -> list[str]:
    """What to look at, most telling first; never empty."""
    if not all(map(math.isfinite, whole.losses + whole.norms)):
        return [f"the run itself: one process gets loss {whole.losses[-1]:g}, so nothing is proven (a smaller lr?)"]
    if found.missing:
        return [f"pipeline partition: {len(found.missing)} parameters are on no rank (first: {found.missing[0]})"]
    if wrong := _above(found.initial, bound):
        return [f"initialisation: {wrong[0]} starts with other values than in one process (shards drawn by rank?)"]
    before, after = found.copies
    if wrong := _above({name: error for name, (error, _) in before.items()}, bound):
        return [f"initialisation: rank {before[wrong[0]][1]} starts with other values of {wrong[0]} than rank 0"]
    if found.place is not None:
        return _forward(found.place, found.wrong_tokens, config)
    if not found.losses[0] <= bound:
        return _loss(split.losses[0] / whole.losses[0], config)
    if not largest(found.gradients[0].values()) <= bound:
        return gradient_suspects(whole, split, config, found.gradients[0], bound)
    if not found.norms[0] <= bound:
        return [_norm(whole, split, float(config.train.grad_clip_norm))]
    if wrong := _above({name: error for name, (error, _) in after.items()}, bound):
        return [
            f"update: rank {after[wrong[0]][1]} has other values of {wrong[0]} than are stored ({len(wrong)} "
            "parameters in all): they are not gathered after the update, or ranks do not update alike"
        ]
    later = [
        "update: the first step's gradients and norm agree, what follows does not: clipping, optimiser state, weight "
        "decay, or (with experts) the bias of routers"
    ]
    if config.batches.ramps:
        rows = config.batches.sizes[0]
        later.append(f"or steps of {rows} rows, as the second is (train.batch_ramp): a rank has fewer micro-batches")
    return later


def _above(errors: dict[str, float], bound: float) -> list[str]:
    return [name for name, error in errors.items() if not error <= bound]


def _forward(place: Place, wrong_tokens: Tensor | None, config: RunConfig) -> list[str]:
    layer, part = place
    name = "the embedding" if place == (0, "input") else f"layer {layer}: {part.replace('_', '-')}"
    causes = list(_causes(layer, part, config))
    return [f"forward pass: {name} is the first that differs{_where(wrong_tokens, config)}; look at {causes[0]}"] + [
        f"or {cause}" for cause in causes[1:]
    ]


def _causes(layer: int, part: str, config: RunConfig) -> Iterable[str]:
    """What the layout does to a part of a layer, the most involved first."""
    model, parallel = config.model, config.parallel
    if part == "input" and layer > 0:
        stage = next(number for number, layers in enumerate(stage_layers(config)) if layer in layers)
        yield f"pipeline: the edge into stage {stage} (a stale or swapped micro-batch, a wrong shape)"
        return
    if part == "attention":
        if parallel.cp > 1:
            how = "the ring's order" if parallel.cp_mode == "ring" else "the all-to-all of heads"
            yield f"context parallel: {how}, or masks of documents and windows over all columns"
        if parallel.tp > 1:
            yield "tensor parallel: which heads (and copies of key heads) are here, or the sum after `o`"
        yield "attention masks and positions of this rank's rows"
    if part == "feed_forward":
        if model.has_experts(layer):
            yield (
                "expert parallel: dispatch to other ranks and the order of what comes back"
                if parallel.ep > 1
                else "experts: routing, capacity, the order of outputs"
            )
        if parallel.tp > 1:
            yield "tensor parallel: the sum after `down`"
    if model.dropout:
        yield "dropout: keys that depend on the rank or the micro-batch"
    if part == "input":
        if parallel.tp > 1:
            yield "tensor parallel: the vocabulary-parallel embedding"
        yield "rows and columns of the batch, and their positions"
    elif part != "attention":
        yield "the residual connection and its norm"


def _where(wrong_tokens: Tensor | None, config: RunConfig) -> str:
    """On which ranks' tokens, where not on everyone's."""
    if wrong_tokens is None or not bool(wrong_tokens.any()):
        return ""
    parallel, length = config.parallel, wrong_tokens.shape[1]
    data = parallel.dp_replicate * parallel.dp_shard
    rows, columns = wrong_tokens.any(1), wrong_tokens.any(0)
    found = [_some("data-parallel place", [bool(part.any()) for part in rows.chunk(data)])]
    micro_batches = rows.view(data, -1)
    found.append(_some("each rank's micro-batch", micro_batches.any(0).tolist()))
    pieces = [sequence_columns(length, parallel.cp, place, parallel.cp_mode) for place in range(parallel.cp)]
    found.append(_some("context-parallel place", [bool(columns[piece].any()) for piece in pieces]))
    text = " and ".join(one for one in found if one)
    return f", only {text}" if text else ""


def _some(what: str, wrong: list[bool]) -> str:
    if all(wrong):
        return ""
    return f"at {what} {', '.join(str(place) for place, here in enumerate(wrong) if here)}"


def _loss(factor: float, config: RunConfig) -> list[str]:
    parallel = config.parallel
    text = f"hidden states agree, the loss is {factor:.6g} times the right one"
    causes = []
    degree = degree_of(factor, parallel)
    if degree:
        causes.append(f"loss: {text}: {degree}")
    if parallel.tp > 1:
        causes.append(f"loss: {text}: sums of the softmax over the vocabulary of all tp ranks")
    causes.append(f"loss: {text}: its denominator (the weight of all ranks' targets), or the sum over ranks")
    return causes


def _norm(whole: Observed, split: Observed, p: float) -> str:
    """Which parameters' elements, counted once more or not at all, explain the norm."""
    text = f"gradient norm: gradients agree, their norm is {split.norms[0] / whole.norms[0]:.6g} times the right one"
    if math.isinf(p):
        return f"{text}: ranks' largest elements are not all compared"
    excess = split.norms[0] ** p - whole.norms[0] ** p
    powers = {name: float(gradient.abs().pow(p).sum()) for name, gradient in whole.gradients[0].items()}
    sets = {name: [name] for name in powers}
    for name in powers:
        sets.setdefault(f"all {placement(name)} weights", []).append(name)
    for label, names in sets.items():
        share = sum(powers[name] for name in names)
        times = excess / share if share > 1e-9 * whole.norms[0] ** p else 0.0
        if round(times) != 0 and abs(times - round(times)) < 1e-6:
            return f"{text}: {label} counted {round(times) + 1} times instead of once"
    return f"{text}: elements are counted {'more than once' if excess > 0 else 'on no rank'}"
