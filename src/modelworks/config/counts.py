"""Parameters, FLOPs and memory of a model from its `ModelConfig` alone: no torch, nothing is allocated.

Invariant: `parameter_shapes` gives exactly the names and shapes of the built module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelworks.config.model import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of elements; tied weights are counted once.

    embedding: token and position embeddings. head: the output projection, 0 where tied. non_embedding: all but
    `embedding` and `head`. by_component: a component's name (`attention`, `feed_forward`, `norm`, …) -> elements.
    """

    total: int
    embedding: int
    head: int
    non_embedding: int
    by_component: dict[str, int]


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations per token of matrix products (one multiply-add is two), the mean over a sequence.

    forward: one forward pass, attention counted causally (only the pairs that a causal mask keeps).
    forward_full_attention: the same with every pair counted, as kernels that ignore the mask would.
    training: 3 x forward: the backward pass does each product twice, once for inputs and once for weights.
    by_component: `attention_projections`, `attention_scores`, `feed_forward`, `head`; sums to `forward`.
    """

    forward: float
    forward_full_attention: float
    training: float
    training_full_attention: float
    by_component: dict[str, float]


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full parameter name -> shape, in the built module's order. Linear weights are (out, in)."""
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.d_model)}
    if model.positions == "learned":
        shapes["position_embedding.weight"] = (model.max_seq_len, model.d_model)
    for layer in range(model.n_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in _block_shapes(model).items()}
    shapes |= _norm("final_norm", model)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.d_model)
    return shapes


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact numbers of parameters by component, from the shapes."""
    block = {name: math.prod(shape) for name, shape in _block_shapes(model).items()}
    norm = sum(size for name, size in block.items() if "norm." in name)
    attention = sum(size for name, size in block.items() if name.startswith("attention.") and "norm." not in name)
    feed_forward = sum(size for name, size in block.items() if name.startswith("feed_forward."))
    final_norm = sum(math.prod(shape) for shape in _norm("final_norm", model).values())
    token_embedding = model.vocab_size * model.d_model
    position_embedding = model.max_seq_len * model.d_model if model.positions == "learned" else 0
    head = 0 if model.tie_embeddings else token_embedding
    by_component = {
        "token_embedding": token_embedding,
        "position_embedding": position_embedding,
        "attention": model.n_layers * attention,
        "feed_forward": model.n_layers * feed_forward,
        "norm": model.n_layers * norm + final_norm,
        "head": head,
    }
    total = sum(by_component.values())
    embedding = token_embedding + position_embedding
    return ParameterCount(total, embedding, head, total - embedding - head, by_component)


def training_flops_per_token(model: ModelConfig, seq_len: int) -> FlopCount:
    """Matrix-product FLOPs per token of a forward pass and of training on sequences of `seq_len` tokens.

    Counted: the projections, the attention scores and their weighted sum (2 products of seq_len x head_dim per head),
    the feed-forward, and the head. Not counted: embedding look-ups (no arithmetic), norms, activation functions,
    rotary embedding, softmax and the residual sums, which are linear in d_model and below 1% for common shapes.
    Recomputation is work, not model FLOPs, and is not counted either.
    """
    projections = 2.0 * model.n_layers * model.d_model * (2 * model.d_attention + 2 * model.d_kv)
    matrices = 3 if model.gated else 2
    feed_forward = 2.0 * model.n_layers * matrices * model.d_model * model.d_ff
    head = 2.0 * model.d_model * model.vocab_size
    per_pair = 2.0 * 2 * model.n_layers * model.d_attention  # QK^T and the sum over V, a multiply-add being two
    causal = per_pair * mean_attended(seq_len, model.sliding_window)
    full = per_pair * seq_len
    rest = projections + feed_forward + head
    by_component = {
        "attention_projections": projections,
        "attention_scores": causal,
        "feed_forward": feed_forward,
        "head": head,
    }
    return FlopCount(rest + causal, rest + full, 3 * (rest + causal), 3 * (rest + full), by_component)


def mean_attended(seq_len: int, window: int | None = None) -> float:
    """Mean number of keys a query sees, itself included: (s + 1) / 2, or less under a sliding window."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _block_shapes(model: ModelConfig) -> dict[str, Shape]:
    d, kv, attention, ff = model.d_model, model.d_kv, model.d_attention, model.d_ff
    shapes = _norm("attention_norm", model)
    for name, rows in (("q", attention), ("k", kv), ("v", kv)):
        shapes |= _linear(f"attention.{name}", rows, d, bias=model.attention_bias)
    shapes |= _linear("attention.o", d, attention, bias=model.attention_output_bias)
    if model.qk_norm:
        shapes |= {f"attention.{name}.weight": (model.head_dim,) for name in ("q_norm", "k_norm")}
    shapes |= _norm("feed_forward_norm", model)
    for name in ("gate", "up") if model.gated else ("up",):
        shapes |= _linear(f"feed_forward.{name}", ff, d, bias=model.feed_forward_bias)
    return shapes | _linear("feed_forward.down", d, ff, bias=model.feed_forward_bias)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (model.d_model,) for part in parts}
