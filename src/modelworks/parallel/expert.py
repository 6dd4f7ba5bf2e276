"""Expert parallelism: each rank of an `ep` group holds some of the experts, and tokens travel to theirs and back.

    rows of this rank, sorted by expert      [e0 e0 e1 | e2 e3 e3]         (| between ranks: E / ep experts each)
    counts, then rows, by all-to-all         from rank 0 [e2 e3 e3], from rank 1 [e2 e2], …
    sorted by expert, computed, put back     [e2 e2 e2 e3 e3]
    outputs by all-to-all, the other way     in the order in which the rows left

(GShard, Lepikhin et al. 2021, 2006.16668.) How many rows arrive differs from rank to rank and may be none. The weights
of choices are applied where the token is, so all that travels is rows of d_model.

An expert's gradient is the plain sum over the rows that it saw: the ranks of its group have given it theirs already,
and what is left is a sum over `expert_shard` and `expert_replicate`, whose ranks hold the same experts and saw other
tokens. Nothing is divided: losses carry the weights of the global batch.

For one layer and micro-batch a rank sends the counts (8 bytes for each expert of others) and, once forward and once
backward, the rows that go to others' experts and those that it computed for others: with T local tokens and a balanced
load 4 · (1 - 1 / ep) · T · k · d_model elements in all, counted as `all_to_all` on the axis `ep`.

The router is whole on every rank. Its auxiliary loss is of whole rows; under context parallelism the ranks of `cp` add
up their counts. Under tensor parallelism all tp ranks see the same tokens and their router's gradients are summed, so
each adds its share of the auxiliary gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modelworks.layout import ParameterPlan
from modelworks.models import Routing, RoutingTotals, Transformer, routed_layers
from modelworks.models.layers.experts import Experts
from modelworks.models.layers.token_order import permute, restore
from modelworks.parallel.collectives import Group, all_to_all
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.untraced import not_traced


def shard_experts(part: Transformer, plans: Mapping[str, ParameterPlan], mesh: Mesh) -> None:
    """Make `part` hold this rank's experts alone, in place, and send tokens to the others'.

    After `shard_tensor`, before anything wraps the part. Parameters keep name, dtype and device; values where there
    were some. Does nothing where `ep` is 1.
    """
    group = mesh.group("ep")
    if group.size == 1:
        return
    for layer, mixture in routed_layers(part):
        for name, parameter in list(mixture.experts.named_parameters()):
            spec = plans[f"blocks.{layer}.feed_forward.experts.{name}"].computed
            owner, _, own_name = name.rpartition(".")
            if parameter.shape[0] == spec.shape[0]:
                local = parameter.detach()[spec.slices[0]].clone()
                setattr(mixture.experts.get_submodule(owner), own_name, nn.Parameter(local, parameter.requires_grad))
        mixture.exchange = ExpertExchange(group)


def build_routing(mesh: Mesh, *, loss_scale: float, rows: int, row_length: int, columns: Tensor | None) -> Routing:
    """The `Routing` of one micro-batch on this rank.

    rows: of the global batch. columns: int64, those of a row that this rank's tokens are under context parallelism
    (before sequence parallelism splits them, as experts see the tokens of all tp ranks); None where rows are whole.
    """
    context = mesh.group("cp")

    @not_traced
    def sum_counts(counts: Tensor) -> Tensor:
        return counts if context.size == 1 else context.all_reduce_(counts.clone())

    scale = loss_scale / rows / mesh.size("tp")
    return Routing(scale, row_length, columns=columns, sum_counts=sum_counts)


def reduce_totals_(totals: RoutingTotals, mesh: Mesh) -> RoutingTotals:
    """Sum over the ranks that saw other tokens, in place: after it, every rank of a stage has the whole batch's."""
    mesh.group("data").all_reduce_(totals.values)
    return totals


class ExpertExchange:
    """Runs the experts of all ranks of `ep` for the rows of this rank; see `MixtureOfExperts.exchange`."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @not_traced
    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (N, d) sorted by expert; counts int64 (E,), with a sum of at most N: the rest stays here, as zeros."""
        size = self.group.size
        arriving = self.group.all_to_all(counts, *[[len(counts) // size] * size] * 2).view(size, -1)
        sent, received = counts.view(size, -1).sum(1).tolist(), arriving.sum(1).tolist()
        n_sent = sum(sent)
        here = all_to_all(rows[:n_sent], self.group, received, sent)
        order = by_expert(arriving)
        outputs = restore(experts(permute(here, order), arriving.sum(0)), order)
        back = all_to_all(outputs, self.group, sent, received)
        return torch.cat((back, back.new_zeros(rows.shape[0] - n_sent, back.shape[1])))


def by_expert(arriving: Tensor) -> Tensor:
    """The order that sorts rows by expert, which have come from each rank in turn sorted by expert.

    arriving: int64 (ranks, experts), rows of each. Returns int64 (rows,); rows of one expert stay in order of ranks.
    """
    n_ranks, n_experts = arriving.shape
    expert_of = torch.arange(n_experts, device=arriving.device).repeat(n_ranks)
    return expert_of.repeat_interleave(arriving.flatten()).argsort(stable=True)
