"""Initial values: the rule, and that they are a function of seed, name and element index alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import ModelConfig, parameter_shapes
from modelworks.layout import ShardSpec
from modelworks.models import Transformer, initial_values, initialization, initialize, initialize_slice

CONFIG = ModelConfig(n_layers=4, d_model=64, n_heads=4, vocab_size=300, max_seq_len=32, qk_norm=True)
GPT2 = ModelConfig(family="gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=300, max_seq_len=32)


EXPERTS = ModelConfig(family="mixtral", n_layers=2, d_model=64, n_heads=4, vocab_size=300, max_seq_len=32)


@pytest.mark.parametrize("config", [CONFIG, GPT2, EXPERTS], ids=["llama", "gpt2", "mixtral"])
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


def fill(spec, seed=5):
    values = torch.empty(spec.local_shape)
    initialize_slice(values, CONFIG, spec, seed)
    return values


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_slice_is_that_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    starts = [data.draw(st.integers(0, size)) for size in shape]
    bounds = tuple((start, data.draw(st.integers(start, size))) for start, size in zip(starts, shape, strict=True))
    spec = ShardSpec("weight", shape, bounds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialization, "_PIECE", data.draw(st.sampled_from([1, 5, 1 << 20])))
        values = fill(spec)
    assert torch.equal(values, initial_values(CONFIG, "weight", shape, 5).view(shape)[spec.slices])


def test_a_slice_of_rows_makes_its_own_elements_only(monkeypatch):
    made = []

    def counted(config, name, shape, seed, piece, **more):
        made.append(piece.stop - piece.start)
        return initial_values(config, name, shape, seed, piece, **more)

    monkeypatch.setattr(initialization, "initial_values", counted)
    monkeypatch.setattr(initialization, "_PIECE", 100)
    fill(ShardSpec("weight", (60, 8), ((10, 40), (0, 8))))
    assert sum(made) == 30 * 8
    made.clear()
    fill(ShardSpec("weight", (4, 60, 8), ((1, 3), (10, 40), (0, 8))))  # some experts, some of their channels
    assert sum(made) == 2 * 30 * 8
    made.clear()
    fill(ShardSpec("weight", (60, 8), ((0, 60), (2, 4))))  # columns: whole rows, a few at a time
    assert max(made) <= 100


def test_a_tensor_of_another_shape_is_refused():
    spec = ShardSpec("weight", (4, 3), ((0, 2), (0, 3)))
    with pytest.raises(ValueError, match=r"weight: a tensor of shape \(4, 3\) cannot hold \(2, 3\)"):
        initialize_slice(torch.empty(4, 3), CONFIG, spec, 0)


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
