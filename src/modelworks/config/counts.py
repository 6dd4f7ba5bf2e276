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
    `embedding` and `head`. by_component: a component's name (`attention`, `feed_forward`, `experts`, …) -> elements.
    active: those that one token uses: all but the experts that it is not sent to.
    """

    total: int
    embedding: int
    head: int
    non_embedding: int
    by_component: dict[str, int]
    active: int


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations per token of matrix products (one multiply-add is two), the mean over a sequence.

    forward: one forward pass, attention counted causally (only the pairs that a causal mask keeps).
    forward_full_attention: the same with every pair counted, as kernels that ignore the mask would.
    training: 3 x forward: the backward pass does each product twice, once for inputs and once for weights.
    by_component: `attention_projections`, `attention_scores`, `feed_forward`, `experts`, `router`, `head`; sums to
    `forward`.
    """

    forward: float
    forward_full_attention: float
    training: float
    training_full_attention: float
    by_component: dict[str, float]


def layer_of(name: str) -> str:
    """What figures of a layer are told by: `blocks.3` of blocks.3.attention.query.weight, `embedding` of
    embedding.weight."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else first


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full parameter name -> shape, in the built module's order. Linear weights are (out, in)."""
    shapes: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.d_model)}
    if model.positions == "learned":
        shapes["position_embedding.weight"] = (model.max_seq_len, model.d_model)
    for layer in range(model.n_layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in _block_shapes(model, layer).items()}
    shapes |= _norm("final_norm", model)
    if not model.tie_embeddings:
        shapes["head.weight"] = (model.vocab_size, model.d_model)
    return shapes


def router_bias_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full name -> shape of what balances experts and is no parameter; empty without `router_bias`."""
    sparse = [layer for layer in range(model.n_layers) if model.router_bias and model.has_experts(layer)]
    return {f"blocks.{layer}.feed_forward.router.bias": (model.n_experts,) for layer in sparse}


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact numbers of parameters by component, from the shapes."""
    sparse = _n_sparse(model)
    component: dict[str, int] = {}
    for layer, times in ((_first(model, sparse=True), sparse), (_first(model, sparse=False), model.n_layers - sparse)):
        for name, shape in _block_shapes(model, layer).items() if times else ():
            kind = _component(name)
            component[kind] = component.get(kind, 0) + times * math.prod(shape)
    final_norm = sum(math.prod(shape) for shape in _norm("final_norm", model).values())
    token_embedding = model.vocab_size * model.d_model
    position_embedding = model.max_seq_len * model.d_model if model.positions == "learned" else 0
    head = 0 if model.tie_embeddings else token_embedding
    by_component = {
        "token_embedding": token_embedding,
        "position_embedding": position_embedding,
        "attention": component["attention"],
        "feed_forward": component.get("feed_forward", 0),
        "experts": component.get("experts", 0),
        "router": component.get("router", 0),
        "norm": component["norm"] + final_norm,
        "head": head,
    }
    total = sum(by_component.values())
    embedding = token_embedding + position_embedding
    idle = by_component["experts"] // model.n_experts * (model.n_experts - model.experts_per_token) if sparse else 0
    return ParameterCount(total, embedding, head, total - embedding - head, by_component, total - idle)


def training_flops_per_token(model: ModelConfig, seq_len: int) -> FlopCount:
    """Matrix-product FLOPs per token of a forward pass and of training on sequences of `seq_len` tokens.

    Counted: the projections, the attention scores and their weighted sum (2 products of seq_len x head_dim per head),
    the feed-forward (of experts, those of one token, though capacity may drop some), the router, and the head. Not
    counted: embedding look-ups (no arithmetic), norms, activation functions,
    rotary embedding, softmax and the residual sums, which are linear in d_model and below 1% for common shapes.
    Recomputation is work, not model FLOPs, and is not counted either.
    """
    sparse = _n_sparse(model)
    projections = 2.0 * model.n_layers * model.d_model * (2 * model.d_attention + 2 * model.d_kv)
    matrices = 3 if model.gated else 2
    feed_forward = 2.0 * (model.n_layers - sparse) * matrices * model.d_model * model.d_ff
    experts = 2.0 * sparse * model.experts_per_token * matrices * model.d_model * model.d_expert
    router = 2.0 * sparse * model.d_model * model.n_experts
    head = 2.0 * model.d_model * model.vocab_size
    per_pair = 2.0 * 2 * model.n_layers * model.d_attention  # QK^T and the sum over V, a multiply-add being two
    causal = per_pair * mean_attended(seq_len, model.sliding_window)
    full = per_pair * seq_len
    rest = projections + feed_forward + experts + router + head
    by_component = {
        "attention_projections": projections,
        "attention_scores": causal,
        "feed_forward": feed_forward,
        "experts": experts,
        "router": router,
        "head": head,
    }
    return FlopCount(rest + causal, rest + full, 3 * (rest + causal), 3 * (rest + full), by_component)


def mean_attended(seq_len: int, window: int | None = None) -> float:
    """Mean number of keys a query sees, itself included: (s + 1) / 2, or less under a sliding window."""
    if window is None or window >= seq_len:
        return (seq_len + 1) / 2
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def _n_sparse(model: ModelConfig) -> int:
    """Layers whose feed-forward is a mixture of experts."""
    return sum(model.has_experts(layer) for layer in range(model.n_layers))


def _first(model: ModelConfig, *, sparse: bool) -> int:
    """The first layer with experts (or without); the number of layers where there is none."""
    layers = range(model.n_layers)
    return next((layer for layer in layers if model.has_experts(layer) == sparse), model.n_layers)


def _component(name: str) -> str:
    """Of a block's parameter: norm (q_norm and k_norm included), attention, router, experts or feed_forward."""
    if "norm." in name:
        return "norm"
    first, second = name.split(".")[:2]
    return second if second in ("router", "experts") else first


def _block_shapes(model: ModelConfig, layer: int) -> dict[str, Shape]:
    d, kv, attention, ff = model.d_model, model.d_kv, model.d_attention, model.d_ff
    shapes = _norm("attention_norm", model)
    for name, rows in (("q", attention), ("k", kv), ("v", kv)):
        shapes |= _linear(f"attention.{name}", rows, d, bias=model.attention_bias)
    shapes |= _linear("attention.o", d, attention, bias=model.attention_output_bias)
    if model.qk_norm:
        shapes |= {f"attention.{name}.weight": (model.head_dim,) for name in ("q_norm", "k_norm")}
    shapes |= _norm("feed_forward_norm", model)
    if model.has_experts(layer):
        return shapes | _expert_shapes(model)
    for name in _ups(model):
        shapes |= _linear(f"feed_forward.{name}", ff, d, bias=model.feed_forward_bias)
    return shapes | _linear("feed_forward.down", d, ff, bias=model.feed_forward_bias)


def _expert_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Each kind of weight of all experts is one tensor: (expert, out, in)."""
    experts, d, width = model.n_experts, model.d_model, model.d_expert
    shapes: dict[str, Shape] = {"feed_forward.router.weight": (experts, d)}
    shapes |= {f"feed_forward.experts.{name}.weight": (experts, width, d) for name in _ups(model)}
    return shapes | {"feed_forward.experts.down.weight": (experts, d, width)}


def _ups(model: ModelConfig) -> tuple[str, ...]:
    return ("gate", "up") if model.gated else ("up",)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (model.d_model,) for part in parts}
