"""Every weight format gives the products of the plain weights that it stands for, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.models import PACKED, PLAIN, CausalContext, Transformer, initialize, matrix_bytes, packs, prepared
from modelworks.models.layers.packed import Linear

SHAPE = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "d_ff": 48, "init_std": 0.2}
FAMILIES = {
    "llama": {},
    "tied, biases": {"family": "qwen2", "tie_embeddings": True},
    "ungated, all biases": {"family": "gpt2", "n_kv_heads": 4},
    "experts": {"family": "mixtral", "n_experts": 4, "d_ff": None},
}
FORMATS = {"plain": PLAIN, "packed": PACKED}


def model_of(**changes: object) -> Transformer:
    model = Transformer(ModelConfig(**{**SHAPE, "max_seq_len": 64, **changes}))
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return model.eval()


@torch.inference_mode()
def logits(model: Transformer, n: int = 9) -> Tensor:
    tokens = torch.arange(n)[None] * 7 % 61
    return model.logits(model(tokens, torch.arange(n)[None], CausalContext())).double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prepared_model_computes_the_same(family, name):
    if name == "packed" and not packs(torch.float32, torch.device("cpu")):
        pytest.skip("this torch has no oneDNN")
    model = model_of(**FAMILIES[family])
    exact, before = logits(model_of(**FAMILIES[family]).double()), {k: v.clone() for k, v in model.state_dict().items()}
    twin = prepared(model, FORMATS[name])
    for n in (1, 9):
        torch.testing.assert_close(logits(twin, n), exact[:, :n], rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(
        key.endswith((".q.weight", ".up.weight", ".down.weight"))
        for key, _ in twin.blocks.named_parameters()
        if "experts" not in key
    )
    assert next(twin.parameters()) is next(model.parameters())  # shared, not copied


def test_packed_products_in_bfloat16_round_no_more_than_plain_ones():
    if not packs(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this processor has no instructions for bfloat16")
    model = model_of().bfloat16()
    exact = logits(model_of().bfloat16().double())
    wrong = {name: (logits(prepared(model, each)) - exact).abs().mean() for name, each in FORMATS.items()}
    assert wrong["packed"] <= 1.25 * wrong["plain"]


def test_a_plain_product_of_packed_storage_is_no_copy():
    model = model_of(tie_embeddings=True)
    model.pack_storage()
    twin = prepared(model)
    q, product = model.blocks["0"].attention.q, twin.blocks["0"].attention.q.product
    assert product.processed.data_ptr() == q.weight.data_ptr()
    assert product.widths == (32, 16, 16)
    assert twin.head_product.processed.data_ptr() == model.embedding.weight.data_ptr()
    of_block = 32 * 64 + 32 * 32 + 3 * 32 * 48
    assert matrix_bytes(model) == 4 * (2 * of_block + 61 * 32)


def test_matrices_that_are_not_packed_for_a_reason():
    cpu = torch.device("cpu")
    assert not packs(torch.float64, cpu)
    assert not packs(torch.float32, torch.device("meta"))


@dataclass(frozen=True)
class EightBits:
    """Integers with a scale for each row: a format of several tensors of its own, none of them called weight."""

    def create(self, d_out: int, d_in: int) -> dict[str, Tensor]:
        return {"codes": torch.empty(d_out, d_in, dtype=torch.int8), "scales": torch.empty(d_out)}

    def process(self, matrices: Sequence[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.cat([each["codes"] for each in matrices]), torch.cat([each["scales"] for each in matrices])

    def apply(self, x: Tensor, processed: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        codes, scales = processed
        y = x @ codes.to(x.dtype).T * scales
        return y if bias is None else y + bias


def test_a_format_of_its_own_plugs_in():
    """Created empty, filled by name as a checkpoint does it, processed, applied; beside matrices that stay plain."""
    reference, model = model_of(family="qwen2"), model_of(family="qwen2")
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, Linear) and ".down" not in name:
            parent, _, child = name.rpartition(".")
            compressed = Linear(module.weight.shape[1], module.d_out, module.bias is not None, EightBits())
            scales = module.weight.detach().abs().amax(1) / 127
            codes = (module.weight.detach() / scales[:, None]).round()
            values = {"codes": codes.to(torch.int8), "scales": scales}
            compressed.load_state_dict(values | ({} if module.bias is None else {"bias": module.bias}))
            setattr(model.blocks.get_submodule(parent), child, compressed)
            with torch.no_grad():
                reference.blocks.get_submodule(name).weight.copy_(codes * scales[:, None])
    assert "blocks.0.attention.q.codes" in model.state_dict()
    for plain in FORMATS.values():
        torch.testing.assert_close(logits(prepared(model, plain)), logits(reference.double()), rtol=1e-4, atol=1e-4)


def test_matrices_of_the_same_input_have_one_format():
    model = model_of()
    model.blocks["0"].attention.k = Linear(32, 16, False, EightBits())
    with pytest.raises(ValueError, match="several formats"):
        prepared(model)
