"""Which layers each pipeline stage holds.

A step takes as long as its slowest stage, so layers are placed, in order, such that the costliest stage costs as
little as possible; among such partitions, the most even one (the least sum of squares). Costs are FLOPs: those of a
layer, and of the head for the last stage, which for a large vocabulary is worth several layers. Looking up embeddings
costs no arithmetic. A first or last stage may hold no layer at all: only the embedding or the head.

Exact, by dynamic programming over (stages, layers): n_stages * n_layers^2 / 2 steps.
Invariant: the stages' layers, one after the other, are 0, 1, …, n_layers - 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
    return _consecutive(_least_maximum(layers, stages, last=head))


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


def _least_maximum(layers: Sequence[float], stages: int, last: float) -> list[int]:
    """Layers of each stage. `last`: what the last stage costs besides its layers. Inner stages get one at least."""
    if stages == 1:
        return [len(layers)]
    ends = list(itertools.accumulate(layers, initial=0.0))

    def cost(stage: int, begin: int, end: int) -> float:
        return ends[end] - ends[begin] + (last if stage == stages - 1 else 0.0)

    def least(stage: int) -> int:
        return 0 if stage in (0, stages - 1) else 1

    # smallest[s][e]: the least possible maximum over stages 0..s when they hold the first e layers
    infinite = float("inf")
    smallest = [[cost(0, 0, end) for end in range(len(ends))]]
    for stage in range(1, stages):
        before = smallest[-1]
        smallest.append(
            [
                min(
                    (max(before[begin], cost(stage, begin, end)) for begin in range(end - least(stage) + 1)),
                    default=infinite,
                )
                for end in range(len(ends))
            ]
        )
    bound = smallest[-1][-1] * (1 + 1e-12)  # sums that differ by rounding are the same
    # squares[e]: the least sum of squares within that bound, with the counts that give it; fewer layers early, where
    # most micro-batches are held, among equals
    best: list[tuple[float, list[int]] | None] = [
        (cost(0, 0, end) ** 2, [end]) if cost(0, 0, end) <= bound else None for end in range(len(ends))
    ]
    for stage in range(1, stages):
        following: list[tuple[float, list[int]] | None] = []
        for end in range(len(ends)):
            choices = [
                (known[0] + cost(stage, begin, end) ** 2, [*known[1], end - begin])
                for begin in range(end - least(stage) + 1)
                if (known := best[begin]) is not None and cost(stage, begin, end) <= bound
            ]
            following.append(_least_square(choices))
        best = following
    found = best[-1]
    assert found is not None
    return found[1]


def _least_square(choices: Sequence[tuple[float, list[int]]]) -> tuple[float, list[int]] | None:
    if not choices:
        return None
    smallest = min(square for square, _ in choices)
    return min((choice for choice in choices if choice[0] <= smallest * (1 + 1e-12)), key=lambda choice: choice[1])


def _consecutive(counts: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(counts, initial=0))
    return [list(range(begin, end)) for begin, end in itertools.pairwise(ends)]
