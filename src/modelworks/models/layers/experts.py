"""Mixture of experts (Shazeer et al. 2017, 1701.06538; Fedus et al. 2021, 2101.03961; Jiang et al. 2024, 2401.04088).

A router gives each token a probability for every expert; the k largest are chosen, and the token's output is the sum
of what those experts make of it, weighted by their probabilities:

    x (B, T, d) -> router -> choices, weights (N = B·T, k)
    every (token, choice) pair sorted by expert -> one product an expert on contiguous rows -> back, weighted, summed

Choices beyond an expert's capacity (see `modelworks.models.routing`) are dropped: the token then passes by the residual
connection alone. They stay in the arrays as rows after the last expert's, which no product touches, so that shapes
depend on nothing but N and k.

The router computes in float32 (float64 for float64 inputs), also under autocast: its softmax decides, and rounding
would make neighbours of equal experts. Of equal scores the lower expert wins.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.config import ModelConfig
from modelworks.config.mup import width_growth
from modelworks.models.context import AttentionContext
from modelworks.models.layers.deferred import DeferredWeights
from modelworks.models.layers.feed_forward import ACTIVATIONS
from modelworks.models.layers.grouped import grouped_linear
from modelworks.models.layers.token_order import dispatch, restore
from modelworks.models.routing import Routing, RoutingNote


class Exchange(Protocol):
    """Runs experts that are not all here: `experts(rows, counts)` of the whole model, for rows of this device."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor: ...


class MixtureOfExperts(nn.Module):
    """x (rows, length, d_model) -> the same shape, through `experts_per_token` of `n_experts` feed-forwards.

    exchange: set where experts are spread over devices; None where all are here.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = Router(config)
        self.experts = Experts(config)
        self.exchange: Exchange | None = None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        weights_Nk, choices_Nk, kept_Nk = self.router(x, self.layer, context.routing)
        n_experts, k = self.router.weight.shape[0], choices_Nk.shape[1]
        # A dropped choice belongs to no expert: it sorts behind all of them.
        expert_of = choices_Nk if kept_Nk is None else torch.where(kept_Nk, choices_Nk, n_experts)
        order = expert_of.flatten().argsort(stable=True)
        counts_E = _counts(expert_of.flatten(), n_experts + 1)[:n_experts]
        rows = dispatch(x.flatten(0, 1), order, k)
        outputs = self._run_experts(rows, counts_E)
        outputs_Nkd = restore(outputs, order).view(-1, k, outputs.shape[-1])
        return (outputs_Nkd * weights_Nk[..., None].to(outputs.dtype)).sum(1).view(x.shape)  # type: ignore[no-any-return]

    def _run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.exchange is None:
            return self.experts(rows, counts)  # type: ignore[no-any-return]
        return self.exchange(self.experts, rows, counts)


class Router(nn.Module):
    """Which experts each token goes to, and with what weights. weight: (E, d_model).

    bias: float32 (E,) or None, added to the probabilities for the choice alone; no gradient reaches it. It is neither
    a parameter nor a buffer: a cast of the model would round it, and `to_empty` would lose it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_chosen, self.normalize = config.experts_per_token, config.router_normalize
        self.auxiliary, self.z = config.router_aux_loss, config.router_z_loss
        self.capacity, self.bias_rate = config.expert_capacity, config.router_bias_rate
        self.width_growth = width_growth(config)
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.d_model))
        self.bias = torch.zeros(config.n_experts, dtype=torch.float32, device="cpu") if config.router_bias else None

    def forward(self, x: Tensor, layer: int, routing: Routing | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (B, T, d) -> weights (N, k) of wide dtype, experts int64 (N, k), which are kept: bool (N, k) or None."""
        logits_BTE = self.scores(x)
        if routing is not None and self.z:
            logits_BTE = _with_z_loss(logits_BTE, routing, self.z)
        probabilities_BTE = logits_BTE.softmax(-1)
        scores = probabilities_BTE.detach()
        if self.bias is not None:
            if self.bias.device != x.device:
                self.bias = self.bias.to(x.device)
            scores = scores + self.bias
        # A stable sort: of equal scores the lower expert comes first, which top-k does not promise.
        choices_BTk = scores.sort(stable=True, dim=-1, descending=True).indices[..., : self.n_chosen]
        kept = None
        if routing is not None:
            kept, probabilities_BTE = self._balanced(logits_BTE, probabilities_BTE, choices_BTk, layer, routing)
        weights_BTk = probabilities_BTE.gather(-1, choices_BTk)
        if self.normalize:
            weights_BTk = weights_BTk / weights_BTk.sum(-1, keepdim=True)
        return weights_BTk.flatten(0, 1), choices_BTk.flatten(0, 1), kept

    def scores(self, x: Tensor) -> Tensor:
        """Logits (B, T, E) of wide dtype. Under µP, as sums over the width, they are divided by its growth."""
        logits_BTE = _wide_product(x, self.weight)
        return logits_BTE if self.width_growth == 1.0 else logits_BTE / self.width_growth

    def _balanced(
        self, logits_BTE: Tensor, probabilities_BTE: Tensor, choices_BTk: Tensor, layer: int, routing: Routing
    ) -> tuple[Tensor | None, Tensor]:
        """(kept choices, probabilities whose gradient holds the auxiliary loss's), with a note of what was done."""
        n_experts = self.weight.shape[0]
        routing.check(choices_BTk.shape[1])
        with torch.no_grad():
            loads_BE = _row_counts(choices_BTk, n_experts)
            kept = self._within_capacity(choices_BTk, routing)
            dropped = loads_BE.new_zeros(()) if kept is None else (~kept).sum()
            auxiliary, z = probabilities_BTE.new_zeros(()), probabilities_BTE.new_zeros(())
            length = routing.row_length
            if self.auxiliary:
                shares_BE = routing.sum_counts(loads_BE).to(probabilities_BTE.dtype) / (length * self.n_chosen)
                slope_BE = (self.auxiliary * n_experts / length) * shares_BE
                auxiliary = (slope_BE * probabilities_BTE.sum(1)).sum()
            if self.z:
                z = self.z / length * logits_BTE.logsumexp(-1).square().sum()
            routing.note(layer, RoutingNote(loads_BE.sum(0), dropped, auxiliary, z))
        if self.auxiliary:
            gradient = (routing.scale * slope_BE)[:, None].expand_as(probabilities_BTE)
            probabilities_BTE = _AddToGradient.apply(probabilities_BTE, gradient)  # type: ignore[no-untyped-call]
        return kept, probabilities_BTE

    def _within_capacity(self, choices_BTk: Tensor, routing: Routing) -> Tensor | None:
        """bool (N, k): the choices that are among the first of their row for their expert, by column and then rank."""
        if self.capacity is None:
            return None
        n_experts = self.weight.shape[0]
        limit = row_capacity(self.capacity, routing.row_length, self.n_chosen, n_experts)
        whole, columns = choices_BTk, routing.columns
        if columns is not None:
            # Zeros where another rank has the column: the sum over ranks is the whole row.
            rows, _, k = choices_BTk.shape
            whole = choices_BTk.new_zeros(rows, routing.row_length, k).index_copy_(1, columns, choices_BTk)
            whole = routing.sum_counts(whole)
        flat_BS = whole.flatten(1)
        # Place of each choice among those of its row and expert: sorted by expert, less where the expert starts.
        order_BS = flat_BS.argsort(stable=True, dim=1)
        starts_BE = _row_counts(whole, n_experts).cumsum(1).roll(1, 1)
        starts_BE[:, 0] = 0
        sorted_BS = flat_BS.gather(1, order_BS)
        place_BS = torch.arange(flat_BS.shape[1], device=flat_BS.device) - starts_BE.gather(1, sorted_BS)
        kept_BTk = torch.empty_like(place_BS).scatter_(1, order_BS, place_BS).view(whole.shape) < limit
        return (kept_BTk if columns is None else kept_BTk[:, columns]).flatten(0, 1)


class Experts(nn.Module):
    """Feed-forwards side by side: rows (N, d_model) sorted by expert -> the same shape; see `grouped_linear`.

    gate, up: (E, d_expert, d_model); down: (E, d_model, d_expert). A device may hold some of the experts, or some of
    their channels: it computes with what its weights' shapes say.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.feed_forward]
        self.gate = Stacked(config.n_experts, config.d_model, config.d_expert) if config.gated else None
        self.up = Stacked(config.n_experts, config.d_model, config.d_expert)
        self.down = Stacked(config.n_experts, config.d_expert, config.d_model)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """counts: int64 (local experts,), rows of each; rows after the last expert's give zeros."""
        if self.gate is None:
            return self.down(self.activation(self.up(rows, counts)), counts)  # type: ignore[no-any-return]
        gate, up = self.gate(rows, counts), self.up(rows, counts)
        return self.down(self.activation(gate) * up, counts)  # type: ignore[no-any-return]


class Stacked(nn.Module):
    """One linear map an expert, without biases. weight: (E, d_out, d_in)."""

    def __init__(self, n_experts: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, d_out, d_in))
        self.deferred: DeferredWeights | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(rows, self.weight, counts, self.deferred)


def row_capacity(factor: float, row_length: int, experts_per_token: int, n_experts: int) -> int:
    """Choices of one row that an expert takes: a `factor` times what is its share, rounded up."""
    # Rounded first to what a float can say: 1.1 * 40 / 4 is a little more than 11.
    return math.ceil(round(factor * row_length * experts_per_token / n_experts, 9))


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32 or float64, whatever autocast says."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return F.linear(x.to(wide), weight.to(wide))
    return F.linear(x.to(wide), weight.to(wide))


def _with_z_loss(logits_BTE: Tensor, routing: Routing, coefficient: float) -> Tensor:
    """The logits, whose gradient gains that of the z-loss: 2 · logsumexp · softmax."""
    with torch.no_grad():
        slope = 2 * coefficient * routing.scale / routing.row_length
        gradient = slope * logits_BTE.logsumexp(-1, keepdim=True) * logits_BTE.softmax(-1)
    return _AddToGradient.apply(logits_BTE, gradient)  # type: ignore[no-any-return, no-untyped-call]


def _counts(indices: Tensor, size: int) -> Tensor:
    """How often each of 0 … size - 1 occurs in a flat int64 tensor: int64 (size,)."""
    return indices.new_zeros(size).scatter_add_(0, indices, torch.ones_like(indices))


def _row_counts(choices_BTk: Tensor, n_experts: int) -> Tensor:
    """Choices of each expert in each row: int64 (B, E)."""
    flat_BS = choices_BTk.flatten(1)
    return flat_BS.new_zeros(flat_BS.shape[0], n_experts).scatter_add_(1, flat_BS, torch.ones_like(flat_BS))


class _AddToGradient(torch.autograd.Function):
    """x as it is; `extra` is added to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.save_for_backward(extra)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (extra,) = ctx.saved_tensors
        return gradient + extra, None
