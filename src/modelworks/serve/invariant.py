"""Batch invariance: a request's numbers do not depend on what else is in the batch, to the last bit.

A row of a matrix product is always the same sum, but libraries choose the order of its terms by the number of rows: few
of them go to another kernel than many. So greedy decoding may tip over where two tokens are nearly as likely, depending
on who else is served at that moment. What it takes to prevent that on a CPU:

    products     rows are filled up to a multiple of ROWS, from where on the kernels that torch calls give each row the
                 same bits however many there are. That is a property of theirs that no one promises, so
                 `check_products` tries it out for each shape of a model's weights before any of it is relied on
    attention    over tiles of KEYS keys that begin at multiples of KEYS in the sequence (see `PagedContext`)
    the rest     works row by row

(The problem, and fixed orders of summation as its answer: He 2025, "Defeating nondeterminism in LLM inference".)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from modelworks.config import UserError

ROWS = 4
KEYS = 512  # torch's attention on CPUs sums over as many at a time
_TRIED_ROWS = 68  # ROWS · 17: a number that neither 8 nor 16 divides


class InvariantProducts(TorchFunctionMode):
    """While active, every linear map (also of experts) has its rows filled up to a multiple of ROWS."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return self.linear(*args, **(kwargs or {}))
        if func is torch.ops.modelworks.grouped_mm:
            return self.grouped(*args)
        return func(*args, **(kwargs or {}))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., d_in) -> (..., d_out)."""
        rows = x.reshape(-1, x.shape[-1])
        n = len(rows)
        if n % ROWS:
            rows = F.pad(rows, (0, 0, 0, -n % ROWS))
        return F.linear(rows, weight, bias)[:n].view(*x.shape[:-1], -1)

    def grouped(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """See `modelworks.models.layers.grouped`: each expert's rows by themselves."""
        sizes = counts.tolist()
        parts = torch.split(rows, [*sizes, len(rows) - sum(sizes)])[:-1]
        outputs = [self.linear(part, each) for part, each in zip(parts, weight, strict=True) if len(part)]
        return torch.cat([*outputs, rows.new_zeros(len(rows) - sum(sizes), weight.shape[1])])


class _Recorder(InvariantProducts):
    """Notes a weight of each shape that is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.weights.setdefault((*weight.shape, int(bias is None)), (weight, bias))
        return super().linear(x, weight, bias)


@torch.inference_mode()
def check_products(run: Callable[[], object]) -> None:
    """Raise UserError where products with the weights that `run` multiplies by, filled up, still depend on the number
    of rows."""
    with _Recorder() as recorder:
        run()
    generator = torch.Generator().manual_seed(0)
    for weight, bias in recorder.weights.values():
        x = torch.randn(_TRIED_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
        whole = F.linear(x, weight, bias)
        for start, n in ((0, ROWS), (3, ROWS), (5, 2 * ROWS), (9, 3 * ROWS), (1, 9 * ROWS)):
            part = slice(start, start + n)
            if not torch.equal(F.linear(x[part].clone(), weight, bias), whole[part]):
                dtype = str(weight.dtype).removeprefix("torch.")
                raise UserError(
                    f"batch_invariant: on this machine a product with a {dtype} weight of {tuple(weight.shape)} "
                    "depends on the number of its rows; another dtype or number of threads may help"
                )
