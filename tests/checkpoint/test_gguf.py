"""GGUF files: models written in llama.cpp's layout against transformers, and damaged files."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.checkpoint import CheckpointError, convert, load_model
from modelworks.checkpoint.formats.gguf import model_config, open_gguf, to_halves
from modelworks.checkpoint.formats.gguf_header import read_gguf_header
from modelworks.config import UserError
from modelworks.models import CausalContext

VOCABULARY, LENGTH = 96, 64
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def reference(arch: str, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2"}[arch]
    sizes = GPT2_SIZES if arch == "gpt2" else SIZES | ({"head_dim": 16} if arch == "qwen3" else {})
    config = getattr(transformers, f"{name}Config")(**sizes, initializer_range=0.3, **changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gguf_name(theirs: str) -> str:
    stem, kind = theirs.rsplit(".", 1)
    parts = stem.split(".")
    if parts[1:2] in (["layers"], ["h"]):
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of architecture `llama`."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    arch: str,
    *,
    kind: Kind = Kind.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    writer, config = gguf.GGUFWriter(path, arch), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if extra is not None:
        extra(writer)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            value = interleave(value, config.num_attention_heads if ".q_" in name else config.num_key_value_heads)
        if arch == "gpt2" and ".c_" in name and name.endswith("weight"):
            value = np.ascontiguousarray(value.T)
        stored = kind if value.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(value.astype(np.float32), stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(str(path)).model
    with torch.inference_mode():
        return model.logits(model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), CausalContext()))


TOKENS = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gpt2"])
def test_equals_the_model_it_was_made_from(arch: str, tied: bool, tmp_path: Path) -> None:
    model, path = reference(arch, tie_word_embeddings=tied), tmp_path / "model.gguf"
    write_gguf(path, model, arch)
    with torch.inference_mode():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(path, TOKENS), expected, rtol=0, atol=1e-4)
    loaded = load_model(str(path))
    assert loaded.config.tie_embeddings == tied
    assert loaded.config.family == arch
    assert loaded.tokenizer is None


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_quantised_equals_transformers_on_the_same_file(kind: Kind, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference("llama"), "llama", kind=kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="model.gguf", dtype=torch.float32
        ).eval()
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "model.gguf", TOKENS), expected, rtol=0, atol=1e-4)


def test_row_order_is_undone() -> None:
    rows = torch.arange(2 * 8 * 3.0).reshape(16, 3)
    assert torch.equal(to_halves(torch.from_numpy(interleave(rows.numpy(), 2)), 2), rows)
    assert not torch.equal(to_halves(rows, 2), rows)


def test_scalings(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    cases: list[tuple[dict[str, Any], Callable[[gguf.GGUFWriter], None]]] = []

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(16)

    cases.append(({"rope_type": "linear", "factor": 2.0}, linear))
    cases.append(({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, yarn))
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = reference("llama", rope_parameters={"rope_theta": 5e5, **llama3})
    plain = reference("llama", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    assert 1 < factors.max() <= 8
    cases.append((llama3, lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy())))
    for scaling, extra in cases:
        model = reference("llama", rope_parameters={"rope_theta": 5e5, **scaling})
        write_gguf(path, model, "llama", extra=extra)
        assert model_config(read_gguf_header(path)).rope_scaling.type == scaling["rope_type"]  # type: ignore[union-attr]
        with torch.inference_mode():
            expected = model(TOKENS).logits
        torch.testing.assert_close(logits(path, TOKENS), expected, rtol=0, atol=1e-4)
    wrong = torch.linspace(1, 8, 4).numpy()
    write_gguf(path, model, "llama", extra=lambda writer: writer.add_tensor("rope_freqs.weight", wrong))
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight` are not those of Llama 3"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_expert_count(8), r"llama.expert_count` is 8"),
        (lambda w: w.add_rope_dimension_count(4), r"llama.rope.dimension_count` is 4, expected 8"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), r"rope.scaling.type` is 'longrope'"),
        (lambda w: w.add_logit_scale(0.5), r"logit_scale` is 0.5"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(2, np.float32)), "attn_sinks.weight` has no place"),
        (lambda w: w.add_tokenizer_model("rwkv"), r"tokenizer.ggml.tokens"),
    ],
    ids=["experts", "partial rotary", "longrope", "logit scale", "unknown tensor", "unknown tokenizer"],
)
def test_what_is_not_supported_is_refused_by_name(
    extra: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path
) -> None:
    model = reference("llama")
    path = tmp_path / "model.gguf"
    changed = {"head_dim": 8}
    write_gguf(path, model, "llama", extra=lambda w: (w.add_key_length(changed["head_dim"]), extra(w)))
    with pytest.raises(UserError, match=message):
        load_model(str(path))


def test_unsupported_types_name_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, reference("llama"), "llama")
    header = read_gguf_header(path)
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # name, dimension count, two dimensions
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, int(Kind.F64))
    path.write_bytes(data + b"\0" * header.tensors[name.decode()].size)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight` has the type F64"):
        open_gguf(path)
    struct.pack_into("<I", data, at, 250)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight` has the unknown type 250"):
        open_gguf(path)


def test_wrong_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture 'mamba' is not supported, expected one of llama"):
        load_model(str(tmp_path / "m.gguf"))


def test_header_reads_as_the_gguf_package_does(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_array("some.texts", ["a", "ß", ""])
        writer.add_array("some.numbers", [1, -2, 3])
        writer.add_array("some.floats", [1.5, 2.5])
        writer.add_bool("some.truth", True)
        writer.add_uint64("some.big", 2**60)

    write_gguf(path, reference("llama"), "llama", kind=Kind.Q8_0, extra=extra)
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.begin, mine.size, mine.kind) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert ours.read_bytes(tensor.name) == tensor.data.tobytes()


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, reference("llama"), "llama")
    return path


def header_bytes(path: Path) -> int:
    return min(tensor.begin for tensor in read_gguf_header(path).tensors.values())


def test_truncated_anywhere(small_file: Path, tmp_path: Path) -> None:
    data = small_file.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for length in [*range(0, header_bytes(small_file), 37), len(data) - 40]:
        damaged.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"truncated|corrupted|not a GGUF"):
            load_model(str(damaged))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_in_the_header_is_an_error_or_harmless(small_file: Path, data: st.DataObject) -> None:
    """Any bytes anywhere in the header: a clear error, or a model; never another exception, never huge memory."""
    content = bytearray(small_file.read_bytes())
    at = data.draw(st.integers(4, header_bytes(small_file) - 8))
    content[at : at + 8] = data.draw(st.binary(min_size=1, max_size=8))
    path = small_file.with_name("garbage.gguf")
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        open_gguf(path)


@pytest.mark.parametrize("count", [2**63, 2**40, 10**7])
def test_counts_are_checked_before_memory_is_taken(count: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, count, 0))
    with pytest.raises(CheckpointError, match="claims"):
        read_gguf_header(path)
    key = struct.pack("<Q", 1) + b"k"
    for value in (struct.pack("<IQ", 8, count), struct.pack("<IIQ", 9, 4, count), struct.pack("<IIQ", 9, 8, count)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + value)
        with pytest.raises(CheckpointError, match="claims"):
            read_gguf_header(path)


def test_a_layer_count_that_no_file_could_hold(small_file: Path, tmp_path: Path) -> None:
    data, key = bytearray(small_file.read_bytes()), b"llama.block_count"
    struct.pack_into("<I", data, data.index(key) + len(key) + 4, 2**32 - 1)
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="claims 4,294,967,295 layers with 21 tensors"):
        load_model(str(tmp_path / "m.gguf"))


def test_big_endian_and_other_versions(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf_header(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(CheckpointError, match="version 1"):
        read_gguf_header(path)
    path.write_bytes(b"GGML")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_model(str(path))


def test_converts_to_both_formats(small_file: Path, tmp_path: Path) -> None:
    convert(str(small_file), tmp_path / "own", "modelworks")
    convert(str(small_file), tmp_path / "hf", "hf")
    expected = logits(small_file, TOKENS)
    assert torch.equal(logits(tmp_path / "own", TOKENS), expected)
    assert torch.equal(logits(tmp_path / "hf", TOKENS), expected)
