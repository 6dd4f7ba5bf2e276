"""The module itself: names, dtypes, devices, norm placement, residual switch, fused products."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from modelworks.config import ModelConfig, parameter_shapes
from modelworks.models import CausalContext, DocumentContext, Transformer
from modelworks.models.layers.packed import Linear, pack_storage, packed_linear

BASE = {"n_layers": 2, "d_model": 24, "n_heads": 4, "vocab_size": 31, "max_seq_len": 32}
VARIANTS = [
    {},
    {"n_kv_heads": 2, "head_dim": 8, "qk_norm": True, "tie_embeddings": True},
    {"family": "gpt2"},
    {"family": "gpt2", "norm_position": "post", "tie_embeddings": False},
    {"positions": "none", "norm": "layernorm", "feed_forward": "relu", "feed_forward_bias": True},
    {"attention_bias": True, "attention_output_bias": True, "feed_forward": "geglu", "residual": False},
]


def tokens_and_positions(rows: int = 2, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(length).expand(rows, -1)


@pytest.mark.parametrize("changes", VARIANTS)
def test_names_and_shapes_are_the_configs(changes):
    config = ModelConfig(**{**BASE, **changes})
    built = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    assert built == parameter_shapes(config)
    assert not list(Transformer(config).buffers())


@pytest.mark.parametrize("changes", VARIANTS)
def test_built_on_meta_without_memory(changes):
    with torch.device("meta"):
        model = Transformer(ModelConfig(**{**BASE, **changes}))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("changes", [VARIANTS[1], VARIANTS[3]])
def test_float64_differs_from_float32_by_rounding_only(changes, small):
    single = small(**{**BASE, **changes})
    double = small(**{**BASE, **changes}).double()
    tokens, positions = tokens_and_positions()
    wide = double.logits(double(tokens, positions, CausalContext()))
    assert wide.dtype == torch.float64
    assert torch.allclose(single.logits(single(tokens, positions, CausalContext())).double(), wide, atol=1e-4)
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(
            double, {"blocks.0.attention.o.weight": weight}, (tokens[:1, :4], positions[:1, :4], CausalContext())
        ),
        double.blocks["0"].attention.o.weight.detach().requires_grad_(),
        fast_mode=True,
    )


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("residual", [True, False])
def test_block_is_its_formula(norm_position, residual, small):
    model = small(norm_position=norm_position, residual=residual)
    block, context = model.blocks["0"], CausalContext()
    x = torch.randn(2, 6, 32)
    rotation = model.rotary(torch.arange(6).expand(2, -1), x.dtype)
    norms = [
        lambda h, w=w: F.rms_norm(h, (32,), w, 1e-5)
        for w in (block.attention_norm.weight, block.feed_forward_norm.weight)
    ]
    functions = [lambda h: block.attention(h, rotation, context), block.feed_forward]
    h = x
    for norm, function in zip(norms, functions, strict=True):
        if norm_position == "pre":
            h = function(norm(h)) + (h if residual else 0)
        else:
            h = norm(function(h) + (h if residual else 0))
    assert torch.equal(block(x, rotation, context), h)


def test_causality(small):
    model = small()
    tokens, positions = tokens_and_positions()
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 31
    a, b = model(tokens, positions, CausalContext()), model(changed, positions, CausalContext())
    assert torch.equal(a[:, :8], b[:, :8])
    assert (a[:, 8:] != b[:, 8:]).any(dim=-1).all()


@pytest.mark.parametrize("bias", [True, False])
def test_packed_product_equals_separate_ones(bias):
    torch.manual_seed(0)
    layers = [Linear(16, width, bias).double() for width in (8, 4, 4)]
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    separate = [layer(x) for layer in layers]
    before = [layer.weight.clone() for layer in layers]
    for packed in (False, True):
        if packed:
            pack_storage(layers)
        for part, expected in zip(packed_linear(x, layers), separate, strict=True):
            assert torch.allclose(part, expected, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            for part, expected in zip(packed_linear(x, layers), separate, strict=True):
                assert torch.allclose(part, expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))


def test_packed_storage_is_not_copied_in_inference(small):
    model = small()
    model.pack_storage()
    attention = model.blocks["0"].attention
    layers = (attention.q, attention.k, attention.v)
    x = torch.randn(1, 3, 32)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Operations() as seen:
        packed_linear(x, layers)
    assert not any("cat" in name for name in seen.names)
    with Operations() as seen:
        packed_linear(x, layers)
    assert any("cat" in name for name in seen.names)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at every tensor
def test_compiled_blocks_give_the_same_and_share_their_code(small):
    """Compiled as the trainer does, block by block: no graph break, and one graph for all layers and batches."""
    from torch._dynamo.testing import CompileCounter

    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    tokens, positions = tokens_and_positions()
    for make in (CausalContext, lambda: DocumentContext(ids)):
        torch._dynamo.reset()
        model, counter = small(n_layers=10), CompileCounter()
        expected = model(tokens, positions, make())
        for block in model.blocks.values():
            block.compile(backend=counter, fullgraph=True)
        for _ in range(2):
            assert torch.equal(model(tokens, positions, make()), expected)
        assert counter.frame_count == 1


@pytest.mark.parametrize("changes", [{}, {"family": "gpt2", "n_kv_heads": 4}, {"qk_norm": True, "sliding_window": 4}])
def test_autocast_stays_near_float32(changes, small):
    model = small(**changes)
    tokens, positions = tokens_and_positions()
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    for make in (CausalContext, lambda: DocumentContext(ids)):
        exact = model.logits(model(tokens, positions, make()))
        context = make()
        with torch.autocast("cpu", torch.bfloat16):
            rough = model.logits(model(tokens, positions, context))
        assert rough.dtype == torch.bfloat16
        assert (rough - exact).abs().mean() < 0.05 * exact.abs().mean()
        assert all(mask.dtype == torch.bfloat16 for mask in context._masks._made.values())
