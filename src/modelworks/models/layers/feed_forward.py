"""The position-wise feed-forward: down(act(up x)), or gated, down(act(gate x) * up x) (Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from modelworks.config import ModelConfig
from modelworks.models.layers.packed import Linear, packed_linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """x (rows, length, d_model) -> the same shape, through d_ff channels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.feed_forward_bias
        self.activation = ACTIVATIONS[config.feed_forward]
        self.gate = Linear(config.d_model, config.d_ff, bias) if config.gated else None
        self.up = Linear(config.d_model, config.d_ff, bias)
        self.down = Linear(config.d_ff, config.d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]
        gate, up = packed_linear(x, (self.gate, self.up))
        return self.down(self.activation(gate) * up)  # type: ignore[no-any-return]
