"""Small reference models of transformers, and ours with the same weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from modelworks.config import ModelConfig, parameter_shapes
from modelworks.models import Transformer, canonical_name, from_hugging_face, initialize, name_map


def load_reference(config_json: dict[str, Any], *, seed: int = 0) -> tuple[Any, Transformer]:
    """(transformers' model with random weights of visible size, ours holding the same)."""
    import transformers

    values = dict(config_json)
    reference_config = getattr(
        transformers, values["architectures"][0].replace("ForCausalLM", "Config").replace("LMHeadModel", "Config")
    )(**{key: value for key, value in values.items() if key not in ("architectures", "model_type")})
    torch.manual_seed(seed)
    reference = transformers.AutoModelForCausalLM.from_config(reference_config, attn_implementation="eager").eval()
    with torch.no_grad():
        # Norm weights and biases away from 1 and 0, so that leaving one out cannot go unnoticed.
        for parameter in reference.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    config = from_hugging_face({**reference.config.to_dict(), "architectures": values["architectures"]})
    return reference, copy_weights(reference, config)


def copy_weights(reference: Any, config: ModelConfig) -> Transformer:
    model, shapes = Transformer(config).eval(), parameter_shapes(config)
    theirs = {}
    for name, tensor in reference.state_dict().items():
        known = canonical_name(config, name)
        if known is not None:
            theirs[known] = tensor
    ours = {}
    for entry in name_map(config, stacked_experts=True):  # as transformers holds them in memory
        ours |= entry.to_ours(theirs.pop(entry.theirs), shapes)
    assert not theirs, f"unmapped: {list(theirs)}"
    model.load_state_dict(ours, strict=True)
    return model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reference_pair() -> Callable[..., tuple[Any, Transformer]]:
    return load_reference


@pytest.fixture
def small() -> Callable[..., Transformer]:
    """A small initialised model; keyword arguments override the config."""

    def build(seed: int = 0, **changes: Any) -> Transformer:
        values = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61, "max_seq_len": 64}
        # A larger init_std gives logits of order 1, so that tolerances mean something.
        model = Transformer(ModelConfig(**{**values, "init_std": 0.2, **changes}))
        initialize(model, seed)
        return model

    return build
