"""`Routing`: what layers of experts need of a training micro-batch, and what they note of it.

Everything is defined per sequence (a row of the global batch), so that no split of a batch into micro-batches, ranks
or columns changes it. With T tokens in a row, k choices of each and E experts:

    auxiliary loss of a row   coefficient · E · sum_e f_e P_e      f_e: share of the row's T·k choices that fell on e
                              (Fedus et al. 2021, 2101.03961)      P_e: mean over the row of the router's probability
    z-loss                    coefficient · mean of logsumexp(router logits)^2   (Zoph et al. 2022, 2202.08906)
    capacity                  ceil(factor · T·k / E) choices of a row for each expert, in the order of the row

The objective is the token loss plus, for each layer, the mean of both over the rows of the global batch. f_e counts,
and has no gradient, so the auxiliary loss is linear in each token's own probabilities once f_e is known. That is why
a layer can add its gradient where the probabilities are made: no loss has to be carried to the end of the model, and
of other ranks only counts are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

SumCounts = Callable[[Tensor], Tensor]


class RoutingNote(NamedTuple):
    """What one layer did with its local tokens. loads: int64 (E,), choices of each expert before any is dropped.
    dropped: int64, of them. auxiliary_loss, z_loss: sums over rows, of the share that falls to the local tokens."""

    loads: Tensor
    dropped: Tensor
    auxiliary_loss: Tensor
    z_loss: Tensor


class Routing:
    """One micro-batch's training context for the layers with experts. Without one they neither drop nor balance.

    scale: weight in the objective of one row's losses: loss scale / rows of the global batch (/ ranks that compute
    the same tokens, whose gradients are summed).
    row_length: tokens of a whole row. columns: int64 (length,), the column in its row of each local token; None where
    a row is here from its start to its end.
    sum_counts: adds up an integer tensor over the ranks that hold the other columns of these rows.
    Each layer notes once what it did; running a block again for its backward pass changes nothing.
    """

    def __init__(
        self, scale: float, row_length: int, *, columns: Tensor | None = None, sum_counts: SumCounts | None = None
    ) -> None:
        self.scale, self.row_length, self.columns = scale, row_length, columns
        self.sum_counts: SumCounts = sum_counts or (lambda counts: counts)
        self.notes: dict[int, RoutingNote] = {}

    def check(self, length: int) -> None:
        """Raise ValueError where a layer gets other tokens than those that this describes."""
        expected = self.row_length if self.columns is None else len(self.columns)
        if length != expected:
            raise ValueError(f"a Routing of {expected} local columns was used for {length} tokens a row")

    def note(self, layer: int, note: RoutingNote) -> None:
        self.notes[layer] = note
