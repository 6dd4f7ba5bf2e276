"""Multi-head attention with grouped keys and values (Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023).

This module projects, normalises and rotates. Which keys a query sees, and where past ones are kept, is the
business of the context it is given. Letters: B rows, T tokens, H query heads, G key/value heads, K head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from modelworks.config import ModelConfig
from modelworks.config.mup import query_multiplier
from modelworks.models.context import AttentionContext
from modelworks.models.layers.norms import RMSNorm
from modelworks.models.layers.packed import Linear, packed_linear
from modelworks.models.layers.rotary import rotate

Rotation = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """x (B, T, d_model) -> the same shape."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.window = config.sliding_window
        self.dropout = config.attention_dropout
        self.q = Linear(config.d_model, config.d_attention, config.attention_bias)
        self.k = Linear(config.d_model, config.d_kv, config.attention_bias)
        self.v = Linear(config.d_model, config.d_kv, config.attention_bias)
        self.o = Linear(config.d_attention, config.d_model, config.attention_output_bias)
        self.query_multiplier = query_multiplier(config)
        # One weight for all heads (Qwen3): keeps the logits of attention bounded.
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation | None, context: AttentionContext) -> Tensor:
        q, k, v = packed_linear(x, (self.q, self.k, self.v))
        rows, length, _ = x.shape
        q_BTHK = q.view(rows, length, -1, self.head_dim)
        k_BTGK = k.view(rows, length, -1, self.head_dim)
        v_BTGK = v.view(rows, length, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        if rotation is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, *rotation), rotate(k_BTGK, *rotation)
        if self.query_multiplier != 1.0:
            q_BTHK = q_BTHK * self.query_multiplier
        dropout = self.dropout if self.training else 0.0
        out_BTHK = context.attend(self.layer, q_BTHK, k_BTGK, v_BTGK, window=self.window, dropout=dropout)
        return self.o(out_BTHK.flatten(-2))  # type: ignore[no-any-return]
