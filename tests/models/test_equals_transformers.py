"""Logits of every family equal those of transformers: whole sequences, and token by token through the cache."""

from __future__ import annotations

import json

import pytest
import torch

from modelworks.models import CachedContext, CausalContext, from_hugging_face, generate, name_map, to_hugging_face
from modelworks.models.sampling import Sampling

# transformers renames arguments of its own between versions.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
MODELS = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 97,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.25,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "llama": LLAMA,
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    "llama-multi-query": {**LLAMA, "num_key_value_heads": 1, "head_dim": 16},
    "mistral": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "mistral-no-window": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen2-window": {
        **LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 0,
    },
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "mixtral": MIXTRAL,
    "mixtral-window": {**MIXTRAL, "sliding_window": 7, "num_experts_per_tok": 1},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-not-normalised": {**QWEN3_MOE, "norm_topk_prob": False, "attention_bias": True},
    "qwen3-moe-window": {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5},
    "qwen3-moe-listed-dense": {**QWEN3_MOE, "mlp_only_layers": [1]},
    "qwen3-moe-every-second": {**QWEN3_MOE, "decoder_sparse_step": 2},
    "rope-linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "rope-dynamic": {
        **LLAMA,
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    },
    "rope-yarn": {
        **LLAMA,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
        },
    },
    "rope-yarn-options": {
        **LLAMA,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "rope_theta": 5e4,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
        },
    },
    "rope-llama3": {
        **LLAMA,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "rope_theta": 1e4,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}
LENGTH = 26
CASES = [(name, False) for name in MODELS] + [(name, True) for name in ("gpt2", "llama", "qwen2", "mixtral")]


@pytest.mark.parametrize(("name", "tied"), CASES)
@torch.no_grad()
def test_logits_equal_prefill_and_cached(name, tied, reference_pair):
    reference, model = reference_pair({**MODELS[name], "tie_word_embeddings": tied})
    tokens = torch.randint(0, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    theirs = reference(tokens, use_cache=False).logits
    assert 0.3 < theirs.std() < 300
    scale = max(1.0, float(theirs.std()))  # the tolerance is for outputs of order 1
    ours = model.logits(model(tokens, positions, CausalContext()))
    assert (ours - theirs).abs().max() / scale <= 1e-4
    assert (ours - theirs).abs().mean() / scale <= 1e-5

    # Through the cache: a prefill, a later piece of several tokens, then one by one; against transformers' own cache
    # (under dynamic scaling what is cached was turned by an earlier base, so only cached calls compare with cached).
    context, their_cache, start = CachedContext(model.config.n_layers, block=8), None, 0
    for size in [11, 6, *[1] * (LENGTH - 17)]:
        piece = slice(start, start + size)
        ours = model.logits(model(tokens[:, piece], positions[:, piece], context))
        out = reference(tokens[:, piece], past_key_values=their_cache, use_cache=True)
        their_cache, start = out.past_key_values, start + size
        assert (ours - out.logits).abs().max() / scale <= 1e-4
    assert context.length == LENGTH


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "mixtral", "qwen3-moe"])
def test_greedy_generation_equals_transformers(name, reference_pair):
    reference, model = reference_pair(MODELS[name])
    prompt = [5, 17, 60, 3]
    theirs = reference.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0, repetition_penalty=1.2
    )
    ours = list(generate(model, prompt, Sampling(temperature=0.0, repetition_penalty=1.2), max_new_tokens=20))
    assert ours == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_config_survives_the_round_trip_through_transformers(name):
    import transformers

    config = from_hugging_face(MODELS[name])
    published = to_hugging_face(config)
    assert from_hugging_face(json.loads(json.dumps(published))) == config
    kind = getattr(
        transformers, published["architectures"][0].replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
    )
    read = kind(**{key: value for key, value in published.items() if key not in ("architectures", "model_type")})
    assert from_hugging_face({**read.to_dict(), "architectures": published["architectures"]}) == config


@pytest.mark.parametrize("name", ["gpt2", "llama-biases", "qwen3", "mixtral", "qwen3-moe-listed-dense"])
def test_name_map_is_its_own_inverse(name, reference_pair):
    reference, model = reference_pair(MODELS[name])
    tensors = model.state_dict()
    theirs = reference.state_dict()
    mapped = name_map(model.config, stacked_experts=True)
    assert sorted(ours for entry in mapped for ours in entry.ours) == sorted(tensors)
    for entry in mapped:
        assert torch.equal(entry.to_theirs(tensors), theirs[entry.theirs])
