"""Initial values: the rule, and that they are a function of seed, name and element index alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from modelworks.config import ModelConfig, parameter_shapes
from modelworks.models import Transformer, initial_values, initialize

CONFIG = ModelConfig(n_layers=4, d_model=64, n_heads=4, vocab_size=300, max_seq_len=32, qk_norm=True)
GPT2 = ModelConfig(family="gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=300, max_seq_len=32)


@pytest.mark.parametrize("config", [CONFIG, GPT2], ids=["llama", "gpt2"])
def test_rule(config):
    model = Transformer(config)
    initialize(model, seed=3)
    for name, parameter in model.state_dict().items():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            std = config.init_std
            if name.endswith((".o.weight", ".down.weight")):
                std /= math.sqrt(2 * config.n_layers)
            n = parameter.numel()
            assert abs(float(parameter.mean())) < 5 * std / math.sqrt(n), name
            assert abs(float(parameter.std()) / std - 1) < 5 / math.sqrt(2 * n), name


def test_shards_in_any_order_make_the_whole():
    for name, shape in parameter_shapes(CONFIG).items():
        whole = initial_values(CONFIG, name, shape, seed=1)
        size = math.prod(shape)
        cuts = [0, size // 3, size // 2 + 1, size]
        shards = {
            start: initial_values(CONFIG, name, shape, 1, slice(start, stop))
            for start, stop in reversed(list(itertools.pairwise(cuts)))
        }
        assert torch.equal(torch.cat([shards[start] for start in cuts[:-1]]), whole)


def test_model_holds_the_named_values_whatever_else_it_holds():
    model = Transformer(CONFIG)
    initialize(model, seed=1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), initial_values(CONFIG, name, tuple(parameter.shape), seed=1))
    # A wider vocabulary or another family of biases draws the same attention weights.
    other = Transformer(CONFIG.model_copy(update={"vocab_size": 17, "attention_bias": True}))
    initialize(other, seed=1)
    assert torch.equal(other.blocks["1"].attention.q.weight, model.blocks["1"].attention.q.weight)


def test_seed_and_name_matter():
    shape = (64, 64)
    base = initial_values(CONFIG, "blocks.0.attention.q.weight", shape, seed=0)
    assert not torch.equal(base, initial_values(CONFIG, "blocks.0.attention.q.weight", shape, seed=1))
    assert not torch.equal(base, initial_values(CONFIG, "blocks.1.attention.q.weight", shape, seed=0))


def test_dtype_only_rounds():
    name, shape = "embedding.weight", (300, 64)
    wide = initial_values(CONFIG, name, shape, seed=0, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(initial_values(CONFIG, name, shape, seed=0, dtype=dtype), wide.to(dtype))


def test_default_dtype_and_thread_count_change_nothing():
    name, shape = "embedding.weight", (300, 64)
    base = initial_values(CONFIG, name, shape, seed=0)
    threads = torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        assert torch.equal(initial_values(CONFIG, name, shape, seed=0), base)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


@pytest.mark.gpu
def test_same_bits_on_cuda():
    name, shape = "embedding.weight", (300, 64)
    on_cpu = initial_values(CONFIG, name, shape, seed=0)
    assert torch.equal(initial_values(CONFIG, name, shape, seed=0, device="cuda").cpu(), on_cpu)
