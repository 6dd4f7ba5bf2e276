"""The vocabulary loss: head, log-softmax and their gradients, a chunk of tokens at a time.

The logits of a batch are its largest tensor by far (tokens x vocabulary), and the usual loss holds them three
times over. Here the forward pass walks over chunks of tokens and computes, for each, the loss *and* the gradient
of the hidden states and of the head; logits exist for one chunk only. The backward pass is then a multiplication
by the incoming scalar. The idea is that of Cut Cross-Entropy (Wijmans et al. 2024, 2411.09009) and Liger Kernel
(Hsu et al. 2024, 2410.10989), without a kernel of its own.

With logits z, target t, weight w, vocabulary V, smoothing e and z-loss coefficient c (de Brebisson & Vincent 2016):

    objective = w [ lse(z) - (1 - e) z_t - (e / V) sum z + c lse(z)^2 ]
    d / dz    = w [ (1 + 2 c lse) softmax(z) - (1 - e) onehot(t) - e / V ]

Vocabulary parallel (Shoeybi et al. 2019, 1909.08053): each rank of a group has some rows of the head and makes the
logits of those entries only. What a softmax needs of the others are four numbers a token: the largest logit, and then
in one sum the exponentials, the target's logit and the mean. Logits are never gathered. One process is the case of
all rows and nobody to ask.

Invariant: what is returned is a weighted *sum*. Dividing by the weight of the global batch is the step's business,
once, so that micro-batches of unequal target counts add up exactly.
Legend: N tokens, D model width, V vocabulary (of this rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modelworks.layout import ShardSpec
from modelworks.layout.loss_chunks import loss_chunk_tokens
from modelworks.parallel import Group
from modelworks.parallel.vocabulary import VocabularyRows

# float32 logits that a softmax works on at once on a CPU: within a core's second-level cache, and enough for a few.
SOFTMAX_BYTES = 2 * 2**20


class VocabularyLoss(NamedTuple):
    """objective: `scale` times the sum to differentiate. nll: the plain sum of w * -log p(target), unscaled and
    without a graph. Both are scalars, float32, or float64 where the hidden states are."""

    objective: Tensor
    nll: Tensor


def vocabulary_loss(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    targets_N: Tensor,
    weights_N: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
    chunk_tokens: int | None = None,
    group: Group | None = None,
    vocabulary: ShardSpec | None = None,
) -> VocabularyLoss:
    """Weighted sums over N tokens. Leading dimensions are flattened; a token of weight 0 counts nothing.

    scale: multiplies the objective *before* its gradients are rounded to the compute dtype, which is what keeps
    fp16 gradients from underflowing (loss scaling, Micikevicius et al. 2017, 1710.03740).

    Matrix products run in the autocast dtype where autocast is on, else in the dtype of `hidden_ND`; all sums are
    in float32 (float64 for float64 hidden states). Targets must be valid ids even where the weight is 0.

    group, vocabulary: the ranks that share the vocabulary, and the spec of the head's weight that says which rows
    this rank has (ValueError where they do not fit the weight). All ranks pass the same tokens and get the same sums.
    The gradient of `hidden_ND` is then only this rank's part of it, from its entries: the sum over ranks belongs to
    whoever spread the hidden states (`gather_from`, `copy_to`), who may want it scattered.
    """
    whole = ShardSpec.whole("head", tuple(head_weight_VD.shape))
    rows = VocabularyRows.of(vocabulary or whole)
    ranks = group.size if group is not None else 1
    if rows.end - rows.first != head_weight_VD.shape[0] or rows.all_here != (ranks == 1):
        raise ValueError(f"the loss over {ranks} ranks was given {head_weight_VD.shape[0]} rows of the head for {rows}")
    device = hidden_ND.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    chunk = chunk_tokens or loss_chunk_tokens(rows.total, ranks, compute.itemsize)
    objective = _Objective(label_smoothing, z_loss, scale, rows, group if ranks > 1 else None)
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    return VocabularyLoss(
        *_ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_ND, head_weight_VD, targets_N.reshape(-1), weights_N.reshape(-1), objective, chunk, compute
        )
    )


@dataclass(frozen=True)
class _Objective:
    """What is computed of the logits. rows: the entries of the vocabulary that are here; group: who has the others."""

    smoothing: float
    z_loss: float
    scale: float
    rows: VocabularyRows
    group: Group | None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        objective: _Objective,
        chunk: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        exact = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        # Autocast would cast the head anew for every chunk; here it is cast once.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            head = head_VD.to(compute)
            hidden_gradient = torch.empty_like(hidden_ND) if wants_hidden else None
            head_gradient = torch.zeros_like(head_VD, dtype=exact) if wants_head else None
            value = torch.zeros((), dtype=exact, device=hidden_ND.device)
            nll = torch.zeros_like(value)
            # One buffer for all chunks: fresh memory of this size costs more than what is written to it.
            buffer_NV = head.new_empty(min(chunk, hidden_ND.shape[0]), head.shape[0])
            for start in range(0, hidden_ND.shape[0], chunk):
                part = slice(start, start + chunk)
                hidden = hidden_ND[part].to(compute)
                logits_NV = torch.mm(hidden, head.T, out=buffer_NV[: len(hidden)])
                sums = _become_gradient(logits_NV, targets_N[part], weights_N[part].to(exact), objective)
                gradient_NV = logits_NV
                value += sums[0]
                nll += sums[1]
                if hidden_gradient is not None:
                    hidden_gradient[part] = gradient_NV @ head
                if head_gradient is None:
                    continue
                if compute == exact:
                    head_gradient.addmm_(gradient_NV.T, hidden)
                else:
                    head_gradient += gradient_NV.T @ hidden
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(nll)
        return objective.scale * value, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * incoming.to(hidden_gradient.dtype)
        if head_gradient is not None:
            head_gradient = (head_gradient * incoming).to(ctx.head_dtype)
        return (hidden_gradient, head_gradient, *([None] * 5))


def _become_gradient(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, objective: _Objective
) -> tuple[Tensor, Tensor]:
    """Turn the logits, in place, into the gradient of `scale` times the objective; returns objective and nll.

    In the dtype of `weights_N`, and a few tokens at a time, so that the many passes of a softmax stay in the cache; all
    at once where there is no such cache, or where ranks must ask each other.
    """
    exact = weights_N.dtype
    value, nll = weights_N.new_zeros(()), weights_N.new_zeros(())
    few = logits_NV.is_cpu and objective.group is None
    at_once = max(1, SOFTMAX_BYTES // (exact.itemsize * logits_NV.shape[1])) if few else len(logits_NV)
    smoothing, z_loss, n_entries = objective.smoothing, objective.z_loss, objective.rows.total
    place_N, here_N = objective.rows.places(targets_N)
    for narrow_NV, place, here, weights in zip(
        *(torch.split(x, at_once) for x in (logits_NV, place_N, here_N, weights_N)), strict=True
    ):
        z_NV = narrow_NV.to(exact)  # itself, where it has that dtype already
        sum_N, largest_N, target_logit_N, total_N = _become_exponentials(z_NV, place, here, objective)
        lse_N = largest_N + sum_N.log()
        nll_N = lse_N - target_logit_N
        value_N = nll_N + z_loss * lse_N.square() if z_loss else nll_N
        if smoothing:
            value_N = value_N + smoothing * (target_logit_N - total_N / n_entries)
        value += weights @ value_N
        nll += weights @ nll_N
        factor_N = objective.scale * weights
        z_NV *= (factor_N * (1.0 + 2.0 * z_loss * lse_N) / sum_N)[:, None]
        if smoothing:
            z_NV -= (factor_N * smoothing / n_entries)[:, None]
        z_NV.scatter_add_(1, place[:, None], (factor_N * here * (smoothing - 1.0))[:, None])
        if z_NV is not narrow_NV:
            narrow_NV.copy_(z_NV)
    return value, nll


def _become_exponentials(
    z_NV: Tensor, place_N: Tensor, here_N: Tensor, objective: _Objective
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn logits, in place, into their exponentials relative to the largest. Returns, of each token and over the
    entries of all ranks: the exponentials' sum, the largest logit, the target's, and (for smoothing) the logits' sum.
    """
    group = objective.group
    target_logit_N = z_NV.gather(1, place_N[:, None]).squeeze(1) * here_N
    total_N = z_NV.sum(dim=-1) if objective.smoothing else torch.zeros_like(target_logit_N)
    largest_N = z_NV.amax(dim=-1)
    if group is not None:
        group.all_reduce_(largest_N, "max")
    sum_N = z_NV.sub_(largest_N[:, None]).exp_().sum(dim=-1)
    if group is not None:
        sum_N, target_logit_N, total_N = group.all_reduce_(torch.stack((sum_N, target_logit_N, total_N)))
    return sum_N, largest_N, target_logit_N, total_N
