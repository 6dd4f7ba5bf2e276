"""`ModelConfig`: the shape of a model as plain values, enough to count its parameters and FLOPs without torch.

A family is a set of defaults over one shared transformer, not a class. What a family fixes (normalisation,
positions, biases) is an ordinary key here, so that a reader of a resolved config sees the whole model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelworks.config.quantities import Whole

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]
Positive = Annotated[Whole, Field(gt=0, le=2**40)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class Frozen(BaseModel):
    """Base of every config section: immutable, and a key that does not exist is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
    )


class RopeScaling(Frozen):
    """How rotary frequencies are changed to reach past the trained length.

    linear and dynamic (NTK): Chen et al. 2023 and its follow-ups; yarn: Peng et al. 2023 (2309.00071);
    llama3: the rule of Llama 3.1 (2407.21783). Names of the fields follow the published configs.
    """

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    original_max_seq_len: Positive | None = None
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


# What each family fixes. A key of the user's own config wins over these.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm",
        "positions": "learned",
        "feed_forward": "gelu_tanh",
        "attention_bias": True,
        "attention_output_bias": True,
        "feed_forward_bias": True,
        "tie_embeddings": True,
        "norm_eps": 1e-5,
    },
    "llama": {"norm_eps": 1e-5},
    "mistral": {"norm_eps": 1e-5},
    "qwen2": {"attention_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1e6},
}


class ModelConfig(Frozen):
    """One decoder-only transformer. Sizes are per layer; `None` means derived, and is filled in on validation."""

    family: Family = "llama"
    n_layers: Positive
    d_model: Positive
    n_heads: Positive
    n_kv_heads: Positive = None  # type: ignore[assignment]  # derived: n_heads
    head_dim: Positive = None  # type: ignore[assignment]  # derived: d_model / n_heads
    d_ff: Positive = None  # type: ignore[assignment]  # derived: 4 d, or 8/3 d rounded up to 64 where gated
    vocab_size: Positive
    max_seq_len: Positive = 1024
    tie_embeddings: bool = False

    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: Annotated[float, Field(gt=0.0)] = 1e-5
    feed_forward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    positions: Literal["rope", "learned", "none"] = "rope"
    rope_theta: Annotated[float, Field(gt=0.0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: bool = False
    sliding_window: Positive | None = None
    residual: bool = True
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_std: Annotated[float, Field(gt=0.0)] = 0.02

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = {**FAMILY_DEFAULTS.get(str(data.get("family", "llama")), {}), **data}
        d_model, n_heads = filled.get("d_model"), filled.get("n_heads")
        sizes_known = isinstance(d_model, int) and isinstance(n_heads, int) and n_heads > 0
        if filled.get("n_kv_heads") is None and n_heads is not None:
            filled["n_kv_heads"] = n_heads
        if filled.get("head_dim") is None and sizes_known and d_model % n_heads == 0:
            filled["head_dim"] = d_model // n_heads
        if filled.get("d_ff") is None and isinstance(d_model, int):
            gated = str(filled.get("feed_forward", "swiglu")).endswith("glu")
            filled["d_ff"] = -(-8 * d_model // (3 * 64)) * 64 if gated else 4 * d_model
        return filled

    @property
    def gated(self) -> bool:
        """Whether the feed-forward multiplies two up-projections (SwiGLU, GeGLU)."""
        return self.feed_forward.endswith("glu")

    @property
    def d_attention(self) -> int:
        """Width of the concatenated query heads."""
        return self.n_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.n_kv_heads * self.head_dim
