"""What the forward pass of one micro-batch shows of every block: the size of its output, and the largest logit of its
attention.

    activation RMS     root mean square of the residual stream behind the block, all tokens of the micro-batch
    attention logit    max of q k / sqrt(head_dim) over every query of the first `ROWS` rows, all keys that it may see
                       and all heads

Both are of the first micro-batch of each data-parallel rank. Logits are made a block of queries at a time beside the
attention itself, whose kernels do not show them. Under context parallelism the keys of the other ranks are gathered for
it, uncounted in the traffic of the run. What is recomputed in the backward pass is not looked at again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modelworks.models import AttentionContext
from modelworks.parallel import Mesh, ShownContext, sequence_columns

ROWS = 4
_QUERIES = 128  # at a time


class ForwardProbe:
    """Of one rank. n_layers: of the whole model. After the pass `largest` (n_layers,) has the largest logit of each
    layer that is here, -inf elsewhere, and `squares` (n_layers, 2) sums of squares and how many."""

    def __init__(self, mesh: Mesh, n_layers: int, cp_mode: str) -> None:
        self._mesh, self._n_layers, self._cp_mode = mesh, n_layers, cp_mode
        self.begin()

    def begin(self) -> None:
        device = self._mesh.device
        self.largest = torch.full((self._n_layers,), -math.inf, dtype=torch.float64, device=device)
        self.squares = torch.zeros(self._n_layers, 2, dtype=torch.float64, device=device)
        self._seen: set[int] = set()

    def after_block(self, layer: int, x: Tensor) -> None:
        """x: what the block gave, of this rank's tokens."""
        x = x.detach()
        norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
        self.squares[layer, 0] += norm.double().square()
        self.squares[layer, 1] += x.numel()

    def context(self, inner: AttentionContext, documents: Tensor | None, columns: Tensor | None) -> AttentionContext:
        """`inner`, which shows its queries and keys. documents: int (rows, this rank's columns); columns: which they
        are, None for all."""
        return ShownContext(inner, lambda *shown: self._attention(documents, columns, *shown))

    @torch.no_grad()
    def _attention(
        self,
        documents: Tensor | None,
        columns: Tensor | None,
        layer: int,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        window: int | None,
    ) -> None:
        if layer in self._seen:  # recomputed
            return
        self._seen.add(layer)
        q, k = q_BTHK.detach()[:ROWS], k_BTGK.detach()[:ROWS]
        own = torch.arange(q.shape[1], device=q.device) if columns is None else columns
        theirs, seen_by = own, None if documents is None else documents[:ROWS]
        key_documents = seen_by
        if columns is not None:
            group = self._mesh.group("cp")
            length = group.size * len(columns)
            with self._mesh.traffic.uncounted():
                k = group.all_gather(k, dim=1)
                key_documents = None if seen_by is None else group.all_gather(seen_by, dim=1)
            pieces = [sequence_columns(length, group.size, place, self._cp_mode) for place in range(group.size)]  # type: ignore[arg-type]
            theirs = torch.cat(pieces).to(q.device)
        found = largest_logit(q, k, own, theirs, seen_by, key_documents, window)
        self.largest[layer] = found.masked_fill(found.isnan(), math.inf)  # a maximum over ranks may lose a NaN


def largest_logit(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    queries: Tensor,
    keys: Tensor,
    query_documents: Tensor | None,
    key_documents: Tensor | None,
    window: int | None,
) -> Tensor:
    """The largest visible logit, a float64 scalar, -inf where none is.

    queries (T,), keys (S,): columns of the row, ascending or not. *_documents: int (B, T) and (B, S), equal where
    tokens may attend to each other. Heads are grouped: H is a multiple of G.
    """
    rows, _, n_heads, head_dim = q_BTHK.shape
    exact = torch.float64 if q_BTHK.dtype == torch.float64 else torch.float32
    largest = torch.full((), -math.inf, dtype=exact, device=q_BTHK.device)
    shared = n_heads // k_BSGK.shape[2]
    with torch.autocast(q_BTHK.device.type, enabled=False):
        for row in range(rows):
            k_GKS = k_BSGK[row].to(exact).permute(1, 2, 0)
            for start in range(0, len(queries), _QUERIES):
                some = slice(start, start + _QUERIES)
                here = queries[some]
                # Keys after the last of these queries are seen by none: with columns in order, half of the work.
                end = int((keys <= here.max()).nonzero().max()) + 1
                q_tGRK = q_BTHK[row, some].to(exact).reshape(len(here), -1, shared, head_dim) / math.sqrt(head_dim)
                scores = q_tGRK.permute(1, 2, 0, 3).flatten(1, 2) @ k_GKS[:, :, :end]
                scores_tS = scores.view(-1, len(here), end).amax(0)
                visible = keys[:end] <= here[:, None]
                if window is not None:
                    visible &= keys[:end] > here[:, None] - window
                if query_documents is not None and key_documents is not None:
                    visible &= query_documents[row, some][:, None] == key_documents[row, :end]
                largest = torch.maximum(largest, scores_tS.masked_fill(~visible, -math.inf).amax())
    return largest.double()
