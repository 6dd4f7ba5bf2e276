"""Tensor and sequence parallelism: every layer's matrices split over the `tp` ranks, which see the same tokens.

Attention is split by heads and the feed-forward by channels, so that a column-split product, what lies between, and a
row-split product need one exchange before and one after (Megatron, Shoeybi et al. 2019, 1909.08053). With sequence
parallelism (Korthikanti et al. 2022, 2205.05198) each rank keeps a part of the tokens everywhere else:

    stream              (rows, length, d)     the same on all ranks        (rows, length / tp, d)   other tokens
    norm, dropout       all tokens                                         own tokens
    enter               copy_to    (backward: all-reduce)                  gather_from  (all-gather; reduce-scatter)
    q k v, gate up      column-split: some heads, some channels
    o, down             row-split: partial sums over the ranks
    leave               reduce_from (all-reduce)                           scatter_to   (reduce-scatter; all-gather)
    bias of o, down     added once, after the sum

The embedding is split by vocabulary: each rank looks up what it has, and `leave` adds the rest. Final hidden states
`enter` once more, because every rank uses all of them with its part of the head: `vocabulary_loss` gives each rank's
part of their gradient, which the backward pass of `enter` sums.

Everything is computed on plain local tensors; model code knows nothing of it. Invariant: parameters keep their names,
and gradients, summed over the groups that their plans name, are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.layout import ParameterPlan, ShardSpec
from modelworks.models import DropoutKey, Transformer
from modelworks.models.layers.deferred import DeferredWeights, linear
from modelworks.models.layers.packed import Linear
from modelworks.parallel.collectives import Group, copy_to, gather_from, reduce_from, scatter_to
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.vocabulary import VocabularyRows

Exchange = Callable[[Tensor], Tensor]
_TOKENS = 1  # the dimension of (rows, length, …) that sequence parallelism splits


def shard_tensor(part: Transformer, plans: Mapping[str, ParameterPlan], mesh: Mesh, *, sequence_parallel: bool) -> None:
    """Make `part` this rank's share of itself, in place; every rank of `tp` calls it, before anything wraps the part.

    Each parameter becomes a plain tensor of the slice that its plan computes with: its old values where it had some,
    still unset on the meta device (`initialize_slice` fills it). Names, dtype and device stay. The part takes whole
    tokens and positions (rows, length) as before, and gives whole hidden states if it is the last; between parts,
    under sequence parallelism, goes the stream of this rank's tokens, (rows, length / tp, d_model).
    """
    _keep_slices(part, plans)
    group = mesh.group("tp")
    if group.size == 1:
        return
    enter, leave = _exchanges(group, sequence_parallel)
    if part.embedding is not None:
        part.embedding = VocabularyEmbedding(  # type: ignore[assignment]  # the same parameter, called the same way
            part.embedding.weight, plans["embedding.weight"].computed, leave
        )
    if part.position_embedding is not None and sequence_parallel:
        part.position_embedding.register_forward_pre_hook(_on_input(lambda positions: _own_tokens(positions, group)))
    for block in part.blocks.values():
        _split_attention(block, enter, leave)
        _split_feed_forward(block, enter, leave)
    if part.final_norm is not None:
        part.final_norm.register_forward_hook(_on_output(enter))


def dropout_keys(
    key: DropoutKey, mesh: Mesh, n_heads: int, *, sequence_parallel: bool
) -> tuple[DropoutKey, DropoutKey]:
    """(key of the residual stream's masks, key of the attention weights' masks) for this tp rank.

    key: of the tokens that all ranks of the tp group share, with their `columns` where those are not a row's all.
    n_heads: of the whole model. The masks are then those of one process, whatever the split.
    """
    group = mesh.group("tp")
    attention = replace(key, first_channel=group.index * (n_heads // group.size))
    if group.size == 1 or not sequence_parallel:
        return key, attention
    columns = torch.arange(key.row_length, device=mesh.device) if key.columns is None else key.columns
    return replace(key, columns=columns.chunk(group.size)[group.index]), attention


class RowLinear(nn.Module):
    """The sum over ranks of x W^T, then + b. weight: (d_out, this rank's part of d_in); bias: (d_out,) or absent."""

    deferred: DeferredWeights | None = None

    def __init__(self, whole: Linear, leave: Exchange) -> None:
        super().__init__()
        self.weight, self.bias, self._leave = whole.weight, whole.bias, leave

    def forward(self, x: Tensor) -> Tensor:
        y = self._leave(linear(x, self.weight, None, self.deferred))
        return y if self.bias is None else y + self.bias.to(y.dtype)


class VocabularyEmbedding(nn.Module):
    """int64 (rows, length) -> the stream. weight: this rank's rows of the table; the others' tokens come as zeros."""

    def __init__(self, weight: nn.Parameter, spec: ShardSpec, leave: Exchange) -> None:
        super().__init__()
        self.weight, self._rows, self._leave = weight, VocabularyRows.of(spec), leave

    def forward(self, tokens: Tensor) -> Tensor:
        places, here = self._rows.places(tokens)
        return self._leave(F.embedding(places, self.weight).masked_fill(~here[..., None], 0.0))


def _exchanges(group: Group, sequence_parallel: bool) -> tuple[Exchange, Exchange]:
    """(enter, leave): from the stream to what every rank uses with its weights, and from partial sums to the stream."""
    if sequence_parallel:
        return (lambda x: gather_from(x, group, _TOKENS)), (lambda x: scatter_to(x, group, _TOKENS))
    return (lambda x: copy_to(x, group)), (lambda x: reduce_from(x, group))


def _keep_slices(part: nn.Module, plans: Mapping[str, ParameterPlan]) -> None:
    for name, parameter in list(part.named_parameters()):
        spec = plans[name].computed
        if tuple(parameter.shape) != spec.shape:
            raise ValueError(f"{name}: has shape {tuple(parameter.shape)}, expected the whole {spec.shape} to split")
        if not spec.is_whole:
            owner, _, own_name = name.rpartition(".")
            local = nn.Parameter(parameter.detach()[spec.slices].clone(), requires_grad=parameter.requires_grad)
            setattr(part.get_submodule(owner), own_name, local)


def _split_attention(block: nn.Module, enter: Exchange, leave: Exchange) -> None:
    """q, k and v have some of the heads by their shapes alone, and the attention works on those that there are."""
    attention: Any = block.attention
    attention.register_forward_pre_hook(_on_input(enter))
    attention.o = RowLinear(attention.o, leave)


def _split_feed_forward(block: nn.Module, enter: Exchange, leave: Exchange) -> None:
    """One that ends in a linear map sums there, before the bias; any other (experts) sums what comes out of it."""
    feed_forward: Any = block.feed_forward
    feed_forward.register_forward_pre_hook(_on_input(enter))
    last = dict(feed_forward.named_children()).get("down")
    if isinstance(last, Linear):
        feed_forward.down = RowLinear(last, leave)
    else:
        feed_forward.register_forward_hook(_on_output(leave))


def _on_input(exchange: Exchange) -> Callable[..., tuple[Any, ...]]:
    """A forward pre-hook: `exchange` on the first argument."""
    return lambda module, arguments: (exchange(arguments[0]), *arguments[1:])


def _on_output(exchange: Exchange) -> Callable[..., Tensor]:
    """A forward hook: `exchange` on the result."""
    return lambda module, arguments, result: exchange(result)


def _own_tokens(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, _TOKENS)[group.index]
