"""The vocabulary loss: head, log-softmax and their gradients, a chunk of tokens at a time.

The logits of a batch are its largest tensor by far (tokens x vocabulary), and the usual loss holds them three
times over. Here the forward pass walks over chunks of tokens and computes, for each, the loss *and* the gradient
of the hidden states and of the head; logits exist for one chunk only. The backward pass is then a multiplication
by the incoming scalar. The idea is that of Cut Cross-Entropy (Wijmans et al. 2024, 2411.09009) and Liger Kernel
(Hsu et al. 2024, 2410.10989), without a kernel of its own.

With logits z, target t, weight w, vocabulary V, smoothing e and z-loss coefficient c (de Brebisson & Vincent 2016):

    objective = w [ lse(z) - (1 - e) z_t - (e / V) sum z + c lse(z)^2 ]
    d / dz    = w [ (1 + 2 c lse) softmax(z) - (1 - e) onehot(t) - e / V ]

Invariant: what is returned is a weighted *sum*. Dividing by the weight of the global batch is the step's business,
once, so that micro-batches of unequal target counts add up exactly.
Legend: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits of one chunk, in the dtype of the products, and the fewest tokens in it: the head's gradient is read and
# written once a chunk, which costs more than the products when chunks are short.
CHUNK_BYTES = 32 * 2**20
LEAST_TOKENS = 512
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
) -> VocabularyLoss:
    """Weighted sums over N tokens. Leading dimensions are flattened; a token of weight 0 counts nothing.

    scale: multiplies the objective *before* its gradients are rounded to the compute dtype, which is what keeps
    fp16 gradients from underflowing (loss scaling, Micikevicius et al. 2017, 1710.03740).

    Matrix products run in the autocast dtype where autocast is on, else in the dtype of `hidden_ND`; all sums are
    in float32 (float64 for float64 hidden states). Targets must be valid ids even where the weight is 0.
    """
    device = hidden_ND.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    chunk = chunk_tokens or max(LEAST_TOKENS, CHUNK_BYTES // (compute.itemsize * head_weight_VD.shape[0]))
    arguments = (targets_N.reshape(-1), weights_N.reshape(-1), label_smoothing, z_loss, scale, chunk, compute)
    hidden_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    return VocabularyLoss(*_ChunkedLoss.apply(hidden_ND, head_weight_VD, *arguments))  # type: ignore[no-untyped-call]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        smoothing: float,
        z_loss: float,
        scale: float,
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
            objective = torch.zeros((), dtype=exact, device=hidden_ND.device)
            nll = torch.zeros_like(objective)
            # One buffer for all chunks: fresh memory of this size costs more than what is written to it.
            buffer_NV = head.new_empty(min(chunk, hidden_ND.shape[0]), head.shape[0])
            for start in range(0, hidden_ND.shape[0], chunk):
                part = slice(start, start + chunk)
                hidden = hidden_ND[part].to(compute)
                logits_NV = torch.mm(hidden, head.T, out=buffer_NV[: len(hidden)])
                weights = weights_N[part].to(exact)
                sums = _become_gradient(logits_NV, targets_N[part], weights, smoothing, z_loss, scale)
                gradient_NV = logits_NV
                objective += sums[0]
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
        return scale * objective, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * incoming.to(hidden_gradient.dtype)
        if head_gradient is not None:
            head_gradient = (head_gradient * incoming).to(ctx.head_dtype)
        return (hidden_gradient, head_gradient, *([None] * 7))


def _become_gradient(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, smoothing: float, z_loss: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Turn the logits, in place, into the gradient of `scale` times the objective; returns objective and nll.

    A few tokens at a time and in the dtype of `weights_N`: the many passes of a softmax then stay in the cache.
    """
    exact = weights_N.dtype
    objective, nll = weights_N.new_zeros(()), weights_N.new_zeros(())
    rows = max(1, SOFTMAX_BYTES // (exact.itemsize * logits_NV.shape[1])) if logits_NV.is_cpu else len(logits_NV)
    for narrow_NV, targets, weights in zip(
        torch.split(logits_NV, rows), torch.split(targets_N, rows), torch.split(weights_N, rows), strict=True
    ):
        z_NV = narrow_NV.to(exact)  # itself, where it has that dtype already
        target_logit_N = z_NV.gather(1, targets[:, None]).squeeze(1)
        mean_N = z_NV.mean(dim=-1) if smoothing else None
        largest_N = z_NV.amax(dim=-1)
        z_NV.sub_(largest_N[:, None]).exp_()
        sum_N = z_NV.sum(dim=-1)
        lse_N = largest_N + sum_N.log()
        nll_N = lse_N - target_logit_N
        objective_N = nll_N + z_loss * lse_N.square() if z_loss else nll_N
        if mean_N is not None:
            objective_N = objective_N + smoothing * (target_logit_N - mean_N)
        objective += weights @ objective_N
        nll += weights @ nll_N
        factor_N = scale * weights
        z_NV *= (factor_N * (1.0 + 2.0 * z_loss * lse_N) / sum_N)[:, None]
        if smoothing:
            z_NV -= (factor_N * smoothing / z_NV.shape[1])[:, None]
        z_NV.scatter_add_(1, targets[:, None], (factor_N * (smoothing - 1.0))[:, None])
        if z_NV is not narrow_NV:
            narrow_NV.copy_(z_NV)
    return objective, nll
