"""Which layers each pipeline stage holds.

A step takes as long as its slowest stage, so layers are placed, in order, such that the costliest stage costs as
little as possible; among such partitions, the most even one (the least sum of squares). Costs are FLOPs: those of a
layer, and of the head for the last stage, which for a large vocabulary is worth several layers. Looking up embeddings
costs no arithmetic. A first or last stage may hold no layer at all: only the embedding or the head.

Exact: for layers that all cost the same, by trying how many the last stage has (`equal_layers`); for any other costs,
and where stages may not have any number of layers, by dynamic programming over (stages, layers) (`least_maximum`),
which `modelworks.plan.partition` asks.
Invariant: the stages' layers, one after the other, are 0, 1, …, n_layers - 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from modelworks.config import ModelConfig, RunConfig, UserError, training_flops_per_token
from modelworks.layout.layout import Layout
from modelworks.layout.placement import stages_of


def stage_layers(config: RunConfig) -> list[list[int]]:
    """The layers of each (virtual) stage of a run, in order. One stage with all of them where pp is 1."""
    parallel, model = config.parallel, config.model
    if parallel.pp == 1:
        return [list(range(model.n_layers))]
    n_stages = sum(len(stages_of(Layout(pp=parallel.pp), parallel, rank)) for rank in range(parallel.pp))
    if parallel.pp_partition == "auto":
        return partition_layers(model, config.data.seq_len, n_stages)
    counts = parallel.pp_partition
    if len(counts) != n_stages or sum(counts) != model.n_layers:
        raise UserError(
            f"parallel.pp_partition: got {counts} ({len(counts)} stages, {sum(counts)} layers), expected {n_stages} "
            f"stages with {model.n_layers} layers in all"
        )
    return _consecutive(counts)


def partition_layers(model: ModelConfig, seq_len: int, stages: int) -> list[list[int]]:
    """The layers of each of `stages` stages, least costly for the costliest. Raises UserError for too many stages."""
    if stages > model.n_layers + 2:
        raise UserError(
            f"parallel.pp: {stages} stages for {model.n_layers} layers, expected at most {model.n_layers + 2} "
            "(embedding and head may stand alone)"
        )
    layers, head = layer_costs(model, seq_len)
    return _consecutive(equal_layers(len(layers), stages, last=head / layers[0]))


def layer_costs(model: ModelConfig, seq_len: int) -> tuple[list[float], float]:
    """FLOPs per token of a forward pass: of each layer, and of the head."""
    flops = training_flops_per_token(model, seq_len)
    head = flops.by_component["head"]
    return [(flops.forward - head) / model.n_layers] * model.n_layers, head


def stage_costs(model: ModelConfig, seq_len: int, stages: Sequence[Sequence[int]]) -> list[float]:
    """FLOPs per token of a forward pass of each stage; backward costs each twice that."""
    layers, head = layer_costs(model, seq_len)
    costs = [sum(layers[layer] for layer in stage) for stage in stages]
    costs[-1] += head
    return costs


def equal_layers(n_layers: int, stages: int, *, last: float = 0.0) -> list[int]:
    """What `least_maximum` answers where all layers cost the same and `last` is counted in layers, at once: with j
    layers on the last stage, the others share the rest evenly, fewer early. Needs stages <= n_layers + 2."""
    if stages == 1:
        return [n_layers]
    others = stages - 1
    choices: list[tuple[float, float, list[int]]] = []
    for ending in range(n_layers - max(0, others - 1) + 1):  # inner stages need one each
        share, rest = divmod(n_layers - ending, others)
        counts = [share] * (others - rest) + [share + 1] * rest
        squares = (others - rest) * share**2 + rest * (share + 1) ** 2 + (ending + last) ** 2
        choices.append((max(counts[-1], ending + last), squares, [*counts, ending]))
    rounding = 1 + 1e-12  # sums that differ by that are the same
    cheapest = min(choices)[0] * rounding
    evenest = min(squares for cost, squares, _ in choices if cost <= cheapest) * rounding
    return min(counts for cost, squares, counts in choices if cost <= cheapest and squares <= evenest)


def least_maximum(costs: Sequence[NDArray[np.float64]]) -> list[int] | None:
    """Layers of each stage (or rank) that make the costliest as cheap as can be, then the sum of squares; fewer early
    among equals. costs: of each, from the layer where it begins (row) to where it ends (column), infinite where it may
    not have those. None where they cannot hold all layers."""
    count = np.arange(len(costs[0]))
    # smallest[e]: the least possible maximum over the stages so far when they hold the first e layers
    smallest = costs[0][0]
    for cost in costs[1:]:
        smallest = np.maximum(smallest[:, None], cost).min(axis=0)
    bound = smallest[-1] * (1 + 1e-12)  # sums that differ by rounding are the same
    if not np.isfinite(bound):
        return None
    # squares[s][b]: the least sum of squares within that bound of stages s and on when they begin at layer b
    within = [np.where(cost <= bound, cost**2, np.inf) for cost in costs]
    squares = [np.where(count == count[-1], 0.0, np.inf)]
    for each in reversed(within):
        squares.append((each + squares[-1][None, :]).min(axis=1))
    squares.reverse()
    counts, begin = [], 0
    for stage, each in enumerate(within):
        sums = each[begin] + squares[stage + 1]
        end = int(np.flatnonzero(sums <= squares[stage][begin] * (1 + 1e-12))[0])
        counts.append(end - begin)
        begin = end
    return counts


def _consecutive(counts: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
