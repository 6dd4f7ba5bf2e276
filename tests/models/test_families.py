"""What a config.json may not say is refused by name; both layouts of rotary settings are read."""

from __future__ import annotations

import pytest

from modelworks.config import ModelConfig, UserError, parameter_shapes
from modelworks.models import canonical_name, from_hugging_face, name_map, to_hugging_face

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 4}
QWEN3_MOE = {**MIXTRAL, "architectures": ["Qwen3MoeForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config_json", "named"),
    [
        ({**LLAMA, "architectures": ["LlamaForCausalLn"]}, "did you mean LlamaForCausalLM"),
        ({**LLAMA, "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({}, "not supported"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights"),
        ({**GPT2, "activation_function": "tanh"}, "activation_function"),
        ({**GPT2, "embd_pdrop": 0.3}, "embd_pdrop"),
        ({**LLAMA, "hidden_act": "relu6"}, "hidden_act"),
        ({**LLAMA, "rope_interleaved": True}, "rope_interleaved"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "factor"),
        ({**LLAMA, "hidden_size": "wide"}, "d_model"),
        ({**LLAMA, "num_attention_heads": "4"}, "num_attention_heads"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size"),
        ({**LLAMA, "num_key_value_heads": 3}, "n_kv_heads"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "max_window_layers"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({**MIXTRAL, "num_local_experts": 1}, "experts_per_token"),
        ({**MIXTRAL, "n_shared_experts": 1}, "n_shared_experts"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 1]}, "dense_layers"),
        ({**QWEN3_MOE, "num_experts": "8"}, "num_experts"),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(config_json, named):
    with pytest.raises(UserError, match=named) as caught:
        from_hugging_face(config_json)
    assert "\n" not in str(caught.value)


def test_harmless_keys_are_accepted():
    extra = {
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": "q4"},
        "rope_interleaved": False,
        "is_llama_config": True,
        "use_cache": True,
        "bos_token_id": 1,
    }
    assert from_hugging_face({**LLAMA, **extra}) == from_hugging_face(LLAMA)


def test_old_and_new_rotary_layouts_mean_the_same():
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    older = from_hugging_face({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **fields}})
    oldest = from_hugging_face({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **fields}})
    newer = from_hugging_face({**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **fields}})
    assert older == oldest == newer
    assert newer.rope_theta == 5e5
    assert newer.rope_scaling is not None
    assert newer.rope_scaling.original_max_seq_len == 64


def test_absent_and_null_differ_where_transformers_says_so():
    assert from_hugging_face(MISTRAL | {"num_key_value_heads": 2}).sliding_window == 4096
    assert from_hugging_face(MISTRAL | {"num_key_value_heads": 2, "sliding_window": None}).sliding_window is None
    assert from_hugging_face(MISTRAL | {"num_attention_heads": 8}).n_kv_heads == 8
    assert from_hugging_face(MISTRAL | {"num_key_value_heads": None}).n_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"norm_position": "post"}, "norm_position"),
        ({"residual": False}, "residual"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"positions": "learned"}, "positions"),
        ({"feed_forward": "relu"}, "feed_forward"),
        ({"family": "gpt2", "positions": "rope"}, "positions"),
        ({"family": "gpt2", "n_kv_heads": 1}, "n_kv_heads"),
        ({"family": "qwen3", "qk_norm": False}, "qk_norm"),
        ({"family": "qwen2", "attention_bias": False}, "attention_bias"),
        ({"n_experts": 4}, "n_experts"),
        ({"family": "mixtral", "n_experts": 0}, "n_experts"),
        ({"family": "mixtral", "router_normalize": False}, "router_normalize"),
        ({"family": "mixtral", "n_layers": 2, "dense_layers": [0]}, "dense_layers"),
        ({"family": "qwen3_moe", "router_bias": True}, "router_bias"),
    ],
)
def test_a_model_that_hugging_face_cannot_express_is_refused(changes, key):
    config = ModelConfig(**{"n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": 10, **changes})
    with pytest.raises(UserError, match=rf"model\.{key}"):
        to_hugging_face(config)


def test_published_shapes_of_models_with_experts():
    mixtral = from_hugging_face(MIXTRAL)
    assert (mixtral.n_experts, mixtral.experts_per_token, mixtral.d_expert, mixtral.rope_theta) == (8, 2, 128, 1e6)
    sparse = from_hugging_face({**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert (sparse.dense_layers, sparse.d_ff, sparse.d_expert) == ([0, 2, 3, 4], 128, 768)
    assert not sparse.router_normalize
    assert from_hugging_face(to_hugging_face(sparse)) == sparse
    # Without a dense layer `intermediate_size` says nothing of the model.
    assert from_hugging_face(QWEN3_MOE).d_ff == 768


def test_dropout_is_kept():
    config = from_hugging_face({**LLAMA, "attention_dropout": 0.1}).model_copy(update={"dropout": 0.2})
    assert from_hugging_face(to_hugging_face(config)) == config


def test_stored_names():
    gpt2 = from_hugging_face(GPT2)
    assert canonical_name(gpt2, "h.0.attn.c_attn.weight") == "transformer.h.0.attn.c_attn.weight"
    assert canonical_name(gpt2, "transformer.h.0.attn.bias") is None
    assert canonical_name(gpt2, "lm_head.weight") is None  # tied
    llama = from_hugging_face(LLAMA)
    assert canonical_name(llama, "lm_head.weight") == "lm_head.weight"
    assert canonical_name(llama, "model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert canonical_name(llama, "layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"


def test_a_tensor_of_another_shape_is_refused():
    import torch

    config = from_hugging_face(LLAMA)
    entry = name_map(config)[0]
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight.*\(99, 64\).*\(100, 64\)"):
        entry.to_ours(torch.zeros(99, 64), parameter_shapes(config))
