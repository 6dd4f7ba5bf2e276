"""An attention context that shows queries and keys to somebody who measures, and attends as the one inside it does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from modelworks.models import AttentionContext
from modelworks.parallel.untraced import not_traced


class ShownContext:
    """show: called with (layer, queries (B, T, H, K), keys (B, T, G, K), window) before they are attended to. It
    changes nothing: it is outside of what is compiled and of what recomputation keeps."""

    def __init__(self, inner: AttentionContext, show: Callable[[int, Tensor, Tensor, int | None], None]) -> None:
        self._inner, self._show = inner, show
        self.dropout, self.routing = inner.dropout, inner.routing

    def prepare(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._inner.prepare(length, window, dtype, device)

    @not_traced
    def attend(
        self,
        layer: int,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGK: Tensor,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        with _disable_current_modes():  # selective recomputation would keep the products, and give them out again
            self._show(layer, q_BTHK, k_BTGK, window)
        return self._inner.attend(layer, q_BTHK, k_BTGK, v_BTGK, window=window, dropout=dropout)
