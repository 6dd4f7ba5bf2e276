"""Models from GGUF files: metadata to `ModelConfig`, quantised blocks to floats, llama.cpp's layout to ours.

Three things differ from the published checkpoint that a GGUF file was made from, and are undone here:
the rows of q and k of architecture `llama` are permuted for interleaved rotary pairs (we rotate halves); a tied head
is simply absent; Llama 3's frequency scaling is a tensor of factors (`rope_freqs.weight`) instead of its rule.
What the metadata asks for and we do not build (experts, partial rotary, other scalings) is refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from pydantic import ValidationError
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.gguf_header import GgufHeader, read_gguf_header
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.read import check_shapes
from modelworks.config import ModelConfig, RopeScaling, UserError, parameter_shapes
from modelworks.data import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
_KIND_NAMES = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K"
KINDS = tuple(Kind[name] for name in _KIND_NAMES.split())
_TOP = {
    "token_embd": "embedding",
    "position_embd": "position_embedding",
    "output_norm": "final_norm",
    "output": "head",
}
_IN_BLOCK = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.o",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "feed_forward_norm",
    "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up",
    "ffn_down": "feed_forward.down",
}
_FUSED = "attn_qkv"  # gpt2: q, k and v stacked, equal parts
_ROPE_FACTORS = "rope_freqs.weight"
# Keys that would change what the model computes in a way that we do not build.
_MUST_BE_ZERO = ("expert_count", "attention.scale", "attention.clamp_kqv")
_MUST_BE_ONE = ("logit_scale", "residual_scale", "embedding_scale")


def open_gguf(path: Path) -> ModelSource:
    """A GGUF file as a model: its shape, tensors under our names (float32, made on request) and tokeniser."""
    header = read_gguf_header(path)
    config = model_config(header)
    tensors = _tensors(header, config)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(str(path), found, parameter_shapes(config))
    return ModelSource(config, tensors, _tokenizer(header), f"GGUF file {path}")


def model_config(header: GgufHeader) -> ModelConfig:
    """The shape, from the metadata. Raises CheckpointError naming the key that is missing or not supported."""
    meta = _Metadata(header)
    arch = meta.arch
    d_model, n_heads = meta.count("embedding_length"), meta.count("attention.head_count")
    head_dim = meta.count("attention.key_length", meta.count("rope.dimension_count", d_model // n_heads))
    meta.refuse_unless("attention.value_length", head_dim)
    meta.refuse_unless("rope.dimension_count", head_dim)
    meta.refuse_unless("attention.causal", True)
    for key in _MUST_BE_ZERO:
        meta.refuse_unless(key, 0)
    for key in _MUST_BE_ONE:
        meta.refuse_unless(key, 1, 0)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path}: lacks the tensor `token_embd.weight`")
    gpt2 = arch == "gpt2"
    values: dict[str, Any] = {
        "family": arch,
        "n_layers": meta.count("block_count"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_kv_heads": meta.count("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": meta.count("feed_forward_length"),
        "vocab_size": embedding.shape[0],
        "max_seq_len": meta.count("context_length"),
        "norm_eps": meta.number("attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"),
        "tie_embeddings": _is_tied(header),
        "attention_bias": gpt2 or "blk.0.attn_q.bias" in header.tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in header.tensors,
        "feed_forward_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if not gpt2:
        values["rope_theta"] = meta.number("rope.freq_base", 10_000.0)
        values["rope_scaling"] = _rope_scaling(header, meta, head_dim, values["rope_theta"])
        values["sliding_window"] = meta.count("attention.sliding_window", 0) or None
    if values["n_layers"] > len(header.tensors):  # or listing its tensors would never end
        raise CheckpointError(
            f"{header.path}: claims {values['n_layers']:,} layers with {len(header.tensors):,} tensors"
        )
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{header.path}: gives {place} = {first['input']!r}: {first['msg']}") from None


def dequantized(header: GgufHeader, name: str) -> Tensor:
    """One tensor as float32, in its torch shape."""
    tensor = header.tensors[name]
    if tensor.kind not in KINDS:
        known = _KIND_NAMES.replace(" ", ", ")
        raise CheckpointError(
            f"{header.path}: tensor `{name}` has the type {tensor.kind.name}, expected one of {known}"
        )
    rows = np.frombuffer(header.read_bytes(name), np.uint8).reshape(*tensor.shape[:-1], -1)
    with np.errstate(all="ignore"):  # a scale that is not finite shows in the values, not as a warning
        values = dequantize(rows, tensor.kind)
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=True)).reshape(tensor.shape)


def _tokenizer(header: GgufHeader) -> Tokenizer | None:
    """None for a file that carries none; one that carries an unknown one is refused."""
    if not any(key.startswith("tokenizer.") for key in header.metadata):
        return None
    try:
        return Tokenizer.from_gguf(header.metadata)
    except UserError as error:
        raise CheckpointError(f"{header.path}: {error}") from None


def _tensors(header: GgufHeader, config: ModelConfig) -> dict[str, LazyTensor]:
    result: dict[str, LazyTensor] = {}
    for name, tensor in header.tensors.items():
        if tensor.kind not in KINDS:
            dequantized(header, name)  # raises, naming tensor and type
        if name == _ROPE_FACTORS or (name == "output.weight" and config.tie_embeddings):
            continue
        place = _our_name(name)
        if place is None:
            raise CheckpointError(f"{header.path}: tensor `{name}` has no place in a model of family {config.family}")
        prefix, module, kind = place
        if module == _FUSED:
            third = (tensor.shape[0] // 3, *tensor.shape[1:])
            for index, part in enumerate("qkv"):
                ours = f"{prefix}attention.{part}.{kind}"
                result[ours] = _lazy(third, lambda n=name, i=index: dequantized(header, n).chunk(3)[i])
        elif config.family == "llama" and module in ("attention.q", "attention.k"):
            heads = config.n_heads if module.endswith("q") else config.n_kv_heads
            result[f"{prefix}{module}.{kind}"] = _lazy(
                tensor.shape,
                lambda n=name, h=heads: to_halves(dequantized(header, n), h),
            )
        else:
            result[f"{prefix}{module}.{kind}"] = _lazy(tensor.shape, lambda n=name: dequantized(header, n))
    return result


def to_halves(rows: Tensor, n_heads: int) -> Tensor:
    """Undo llama.cpp's row order: within a head, rows (0, h, 1, h + 1, …) back to (0, 1, …), h half the head."""
    return rows.reshape(n_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _lazy(shape: tuple[int, ...], load: Any) -> LazyTensor:
    return LazyTensor(torch.float32, shape, load)


def _our_name(name: str) -> tuple[str, str, str] | None:
    """(prefix, module, weight or bias) of a tensor, or None where the model has no such part."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in (*_IN_BLOCK, _FUSED):
        return f"blocks.{block[1]}.", _IN_BLOCK.get(block[2], _FUSED), block[3]
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    return ("", _TOP[top[1]], top[2]) if top and top[1] in _TOP else None


def _is_tied(header: GgufHeader) -> bool:
    """No head, or one that is byte for byte the embedding (older converters wrote it out)."""
    head, embedding = header.tensors.get("output.weight"), header.tensors["token_embd.weight"]
    if head is None:
        return True
    same_kind = head.kind == embedding.kind and head.shape == embedding.shape
    return same_kind and header.read_bytes("output.weight") == header.read_bytes("token_embd.weight")


def _rope_scaling(header: GgufHeader, meta: _Metadata, head_dim: int, theta: float) -> RopeScaling | None:
    if _ROPE_FACTORS in header.tensors:
        return _llama3_scaling(header, head_dim, theta)
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0))
    if kind == "none":
        kind = "linear" if meta.get("rope.scale_linear") else "none"
    meta.refuse_unless("rope.scaling.attn_factor", 1)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return RopeScaling(type="linear", factor=factor)
    if kind == "yarn":
        return RopeScaling(
            type="yarn", factor=factor, original_max_seq_len=meta.count("rope.scaling.original_context_length")
        )
    raise CheckpointError(f"{header.path}: `{meta.arch}.rope.scaling.type` is {kind!r}, expected none, linear or yarn")


def _llama3_scaling(header: GgufHeader, head_dim: int, theta: float) -> RopeScaling:
    """The rule behind the factors: its largest factor, and the published constants; refused if they do not match."""
    factors = dequantized(header, _ROPE_FACTORS).double().flatten()
    if factors.numel() != head_dim // 2:
        raise CheckpointError(
            f"{header.path}: `{_ROPE_FACTORS}` has {factors.numel()} values, expected {head_dim // 2}"
        )
    rule = RopeScaling(type="llama3", factor=max(1.0, float(factors.max())), original_max_seq_len=8192)
    wavelength = 2 * np.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = 8192 / wavelength
    smooth = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    expected = 1 / (smooth.clamp(0, 1) * (1 - 1 / rule.factor) + 1 / rule.factor)
    if not torch.allclose(factors, expected, rtol=1e-4):
        raise CheckpointError(f"{header.path}: the factors in `{_ROPE_FACTORS}` are not those of Llama 3's rule")
    return rule


class _Metadata:
    """The architecture's own keys, `<arch>.<key>`, typed."""

    def __init__(self, header: GgufHeader) -> None:
        self.path, self.values = header.path, header.metadata
        arch = self.values.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture {arch!r} is not supported, expected one of {', '.join(ARCHITECTURES)}"
            )
        self.arch: str = arch

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.arch}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one per layer, all alike
        if type(value) is not int or value < 0 or (value == 0 and default != 0):
            raise self._error(key, value, "a whole number, the same for every layer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not value > 0:
            raise self._error(key, value, "a positive number")
        return float(f"{value:.7g}")  # stored as float32: 1e-5 comes back as 9.99999974e-06

    def refuse_unless(self, key: str, *allowed: object) -> None:
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self._error(key, value, f"{allowed[0]!r}: another value is not supported")

    def _error(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: `{self.arch}.{key}` is {value!r}, expected {expected}")
