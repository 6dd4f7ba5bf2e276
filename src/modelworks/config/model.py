"""`ModelConfig`: the shape of a model as plain values, enough to count its parameters and FLOPs without torch.

A family is a set of defaults over one shared transformer, not a class. What a family fixes (normalisation,
positions, biases) is an ordinary key here, so that a reader of a resolved config sees the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from modelworks.config.errors import Problem, ProblemsError
from modelworks.config.mup import mup_problems
from modelworks.config.quantities import Flag, Real, Whole, parse_count

Family = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]
# Bounds far above anything built, so that a slip of the finger (1e30 layers) is answered at once.
Positive = Annotated[Whole, Field(gt=0, le=2**40)]
Layers = Annotated[Whole, Field(gt=0, le=4096)]
Width = Annotated[Whole, Field(gt=0, le=2**22)]
Length = Annotated[Whole, Field(gt=0, le=2**30)]
Probability = Annotated[Real, Field(ge=0.0, lt=1.0)]


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
    factor: Annotated[Real, Field(ge=1.0)] = 1.0
    original_max_seq_len: Length | None = None
    # llama3
    low_freq_factor: Real = 1.0
    high_freq_factor: Real = 4.0
    # yarn
    beta_fast: Real = 32.0
    beta_slow: Real = 1.0
    attention_factor: Real | None = None
    truncate: Flag = True


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
    "mixtral": {"n_experts": 8, "experts_per_token": 2, "norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": {"n_experts": 128, "experts_per_token": 8, "qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1e6},
}


class ModelConfig(Frozen):
    """One decoder-only transformer. Sizes are per layer; `None` means derived, and is filled in on validation."""

    family: Family = "llama"
    n_layers: Layers
    d_model: Width
    n_heads: Width
    n_kv_heads: Width = None  # type: ignore[assignment]  # derived: n_heads
    head_dim: Width = None  # type: ignore[assignment]  # derived: d_model / n_heads
    d_ff: Width = None  # type: ignore[assignment]  # derived: 4 d, or 8/3 d rounded up to 64 where gated
    vocab_size: Annotated[Whole, Field(gt=0, le=2**26)]
    max_seq_len: Length = 1024
    tie_embeddings: Flag = False

    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: Annotated[Real, Field(gt=0.0)] = 1e-5
    feed_forward: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    positions: Literal["rope", "learned", "none"] = "rope"
    rope_theta: Annotated[Real, Field(gt=0.0)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: Flag = False
    attention_output_bias: Flag = False
    feed_forward_bias: Flag = False
    qk_norm: Flag = False
    sliding_window: Length | None = None
    residual: Flag = True
    dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_std: Annotated[Real, Field(gt=0.0)] = 0.02

    # µP: d_model of the model that rates were found with, and what of its heads is not in proportion.
    mup_base_width: Width | None = None
    mup_base_head_dim: Width | None = None
    mup_base_kv_heads: Width | None = None

    # Mixture of experts: 0 experts is a dense model.
    n_experts: Annotated[Whole, Field(ge=0, le=2**16)] = 0
    experts_per_token: Annotated[Whole, Field(gt=0, le=2**16)] = 2
    d_expert: Width = None  # type: ignore[assignment]  # derived: d_ff
    dense_layers: list[Annotated[Whole, Field(ge=0, lt=4096)]] = []
    expert_capacity: Annotated[Real, Field(gt=0.0)] | None = None
    router_normalize: Flag = True
    router_aux_loss: Annotated[Real, Field(ge=0.0)] = 0.01
    router_z_loss: Annotated[Real, Field(ge=0.0)] = 0.0
    router_bias: Flag = False
    router_bias_rate: Annotated[Real, Field(gt=0.0)] = 0.001

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        filled = {**FAMILY_DEFAULTS.get(str(data.get("family", "llama")), {}), **data}
        d_model, n_heads = (_size(filled.get(key)) for key in ("d_model", "n_heads"))
        gated = str(filled.get("feed_forward", "swiglu")).endswith("glu")
        # a 1 where a size is wrong or missing: that key is reported, and what derives from it need not be
        derived = {
            "n_kv_heads": n_heads or 1,
            "head_dim": _head_dim(d_model, n_heads) if d_model and n_heads else 1,
            "d_ff": (-(-8 * d_model // (3 * 64)) * 64 if gated else 4 * d_model) if d_model else 1,
        }
        if _size(filled.get("n_experts")) and not filled.get("dense_layers") and filled.get("d_expert") is not None:
            derived["d_ff"] = filled["d_expert"]  # the only width there is
        filled |= {key: value for key, value in derived.items() if filled.get(key) is None}
        return filled if filled.get("d_expert") is not None else {**filled, "d_expert": filled["d_ff"]}

    @field_validator("head_dim", mode="before")
    @classmethod
    def _needs_head_dim(cls, value: Any, known: ValidationInfo) -> Any:
        if value is None:
            d_model, n_heads = known.data.get("d_model"), known.data.get("n_heads")
            raise ValueError(f"a value, as d_model ({d_model}) is not a multiple of n_heads ({n_heads})")
        return value

    @model_validator(mode="after")
    def _agree(self) -> ModelConfig:
        if problems := list(_contradictions(self)):
            raise ProblemsError(problems)
        return self

    @property
    def gated(self) -> bool:
        """Whether the feed-forward multiplies two up-projections (SwiGLU, GeGLU)."""
        return self.feed_forward.endswith("glu")

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of `layer` (from 0) is a mixture of experts."""
        return self.n_experts > 0 and layer not in self.dense_layers

    @property
    def d_attention(self) -> int:
        """Width of the concatenated query heads."""
        return self.n_heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Width of the concatenated key (or value) heads."""
        return self.n_kv_heads * self.head_dim


def _size(value: object) -> int | None:
    """A size as `Whole` will read it, None when it is not one."""
    try:
        size = parse_count(value) if isinstance(value, (int, float, str)) else None
    except ValueError:
        return None
    return size if size and size <= 2**26 else None


def _head_dim(d_model: int, n_heads: int) -> int | None:
    return d_model // n_heads if d_model % n_heads == 0 else None


def _contradictions(model: ModelConfig) -> Iterator[Problem]:
    if model.n_heads % model.n_kv_heads:
        expected = f"a divisor of n_heads ({model.n_heads}): each key-value head serves the same number of queries"
        yield Problem("n_kv_heads", model.n_kv_heads, expected)
    if model.positions == "rope" and model.head_dim % 2:
        yield Problem("head_dim", model.head_dim, "an even number: rotary positions turn pairs of channels")
    if scaling := model.rope_scaling:
        if model.positions != "rope":
            yield Problem("rope_scaling", scaling.type, f"null, as positions are {model.positions}")
        if scaling.type == "llama3" and scaling.original_max_seq_len is None:
            yield Problem(
                "rope_scaling.original_max_seq_len", None, "the trained length: llama3 scaling starts from it"
            )
        if scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
            expected = f"a number below high_freq_factor ({scaling.high_freq_factor:g})"
            yield Problem("rope_scaling.low_freq_factor", scaling.low_freq_factor, expected)
    yield from mup_problems(model)
    if model.n_experts:
        yield from _contradictions_of_experts(model)


def _contradictions_of_experts(model: ModelConfig) -> Iterator[Problem]:
    if model.experts_per_token > model.n_experts:
        yield Problem("experts_per_token", model.experts_per_token, f"at most n_experts ({model.n_experts})")
    if model.feed_forward_bias:
        yield Problem("feed_forward_bias", True, f"false: experts (n_experts is {model.n_experts}) have no biases")
    dense = model.dense_layers
    if dense != sorted(set(dense)) or any(layer >= model.n_layers for layer in dense):
        expected = f"numbers of layers from 0 to {model.n_layers - 1}, ascending, each once"
        yield Problem("dense_layers", dense, expected)
    elif len(dense) == model.n_layers:
        yield Problem("dense_layers", dense, "at least one layer left for the experts (n_experts 0 is a dense model)")
    elif not dense and model.d_ff != model.d_expert:
        expected = f"d_expert ({model.d_expert}) or nothing: without dense_layers every feed-forward is an expert's"
        yield Problem("d_ff", model.d_ff, expected)
