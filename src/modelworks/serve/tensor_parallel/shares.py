"""Which heads, channels and rows of the vocabulary each rank has when a model is served, also where nothing divides.

Training splits heads evenly or not at all, since a rank with more heads would keep all others waiting at each layer.
Who serves has the machines that he has: a model with 9 query heads and 3 key/value heads runs on two. Query heads are
dealt in order, shares differing by at most one; a rank has the key/value heads that its query heads use, so a head in
the middle may be on two ranks (and its cache twice).

    9 query heads, 3 key/value heads, 2 ranks      queries 0-4 with keys 0, 1;   queries 5-8 with keys 1, 2

Invariant: each query head, channel and row is on exactly one rank; summed over ranks, the outputs are those of one
process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from modelworks.config import ModelConfig, ParallelConfig, UserError
from modelworks.layout import Bounds, Layout, ParameterPlan, ShardSpec, plan_parameters, split_evenly


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank: [first, end) of the model's query heads and of its key/value heads.

    key_of_query: for each own query head the own key/value head that it uses, None where all of these are used by
    equally many, as attention takes it for granted.
    """

    queries: Bounds
    keys: Bounds
    key_of_query: tuple[int, ...] | None

    @classmethod
    def of(cls, n_heads: int, n_kv_heads: int, ranks: int, rank: int) -> HeadShare:
        group = n_heads // n_kv_heads
        first, end = split_evenly(n_heads, ranks, rank)
        keys = (first // group, (end - 1) // group + 1)
        uses = tuple(query // group - keys[0] for query in range(first, end))
        counts = {uses.count(key) for key in range(keys[1] - keys[0])}
        return cls((first, end), keys, None if len(counts) == 1 else uses)

    @property
    def n_kv_heads(self) -> int:
        return self.keys[1] - self.keys[0]


def check_ranks(model: ModelConfig, ranks: int) -> None:
    """Raises UserError where there are more ranks than parts."""
    for key in ("n_heads", "d_ff", "vocab_size"):
        if ranks > (parts := getattr(model, key)):
            raise UserError(f"tp: got {ranks}, expected at most the model's {key} = {parts}")


def serving_plans(model: ModelConfig, ranks: int, rank: int) -> dict[str, ParameterPlan]:
    """What `rank` of `ranks` has of each parameter, by full name: as in training, but for the heads."""
    parallel = ParallelConfig(tp=ranks, sequence_parallel=False)
    plans = plan_parameters(model, Layout.of(parallel), parallel, rank, [list(range(model.n_layers))])
    share = HeadShare.of(model.n_heads, model.n_kv_heads, ranks, rank)
    heads = {"q": (0, share.queries), "k": (0, share.keys), "v": (0, share.keys), "o": (1, share.queries)}
    for name, plan in plans.items():
        *_, owner, matrix, kind = ("", "", *name.split("."))
        if owner == "attention" and matrix in heads and not (matrix == "o" and kind == "bias"):
            dimension, (first, end) = heads[matrix]
            spec = _held(plan.computed, dimension, (first * model.head_dim, end * model.head_dim))
            plans[name] = replace(plan, computed=spec, stored=spec)
    return plans


def vocabulary_shares(vocab_size: int, ranks: int) -> list[int]:
    """Rows of the head on each rank, in their order."""
    ends = [split_evenly(vocab_size, ranks, rank)[1] for rank in range(ranks)]
    return [end - first for first, end in pairwise([0, *ends])]


def _held(spec: ShardSpec, dimension: int, bounds: Bounds) -> ShardSpec:
    return replace(spec, bounds=(*spec.bounds[:dimension], bounds, *spec.bounds[dimension + 1 :]))
