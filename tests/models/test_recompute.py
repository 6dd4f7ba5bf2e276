"""Recomputation frees memory and changes no bit of the gradients."""

from __future__ import annotations

import pytest
import torch

from modelworks.models import CausalContext, DocumentContext, DropoutKey, activation_bytes

LENGTH = 32
DOCUMENTS = torch.tensor([[0] * 20 + [1] * 12, [0] * 32])


def gradients(model, recompute, context):
    model.set_recompute(recompute)
    model.zero_grad()
    tokens = torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(2, -1)

    def forward():
        logits = model.logits(model(tokens, positions, context))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    held = [tokens, positions, *model.parameters()]
    loss_bytes = activation_bytes(forward, held)
    loss = forward()
    loss.backward()
    return loss_bytes, loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, lambda: CausalContext()),
        ({"family": "gpt2", "n_kv_heads": 4}, lambda: CausalContext()),
        ({"qk_norm": True, "sliding_window": 5}, lambda: DocumentContext(DOCUMENTS)),
        (
            {"dropout": 0.2, "attention_dropout": 0.1},
            lambda: DocumentContext(DOCUMENTS, dropout=DropoutKey(seed=0, step=5, row_length=LENGTH)),
        ),
    ],
)
def test_gradients_are_identical_and_memory_falls(small, changes, context):
    model = small(**{"n_layers": 3, "d_model": 64, "d_ff": 192, "n_heads": 4, "n_kv_heads": 4, **changes})
    none, selective, full = (gradients(model, kind, context()) for kind in ("none", "selective", "full"))
    assert none[0] > selective[0] > full[0] > 0
    for other in (selective, full):
        assert torch.equal(none[1], other[1])
        assert none[2].keys() == other[2].keys()
        for name, gradient in none[2].items():
            assert torch.equal(gradient, other[2][name]), name


def test_full_keeps_one_input_a_block(small):
    """What depth adds under `full` is exactly one (rows, length, d_model) tensor a block."""
    sizes = [gradients(small(n_layers=n_layers, d_model=64), "full", CausalContext())[0] for n_layers in (2, 3, 4)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == 2 * LENGTH * 64 * 4


def test_measured_bytes_of_a_known_graph():
    x = torch.randn(100, requires_grad=True)
    # exp keeps its result and sin its input, the same storage; nobody keeps what sin gave; the second exp its result.
    assert activation_bytes(lambda: x.exp().sin().exp().sum(), [x]) == 2 * 400


def test_without_gradients_nothing_is_kept(small):
    model = small()
    tokens, positions = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None]
    model.rotary(positions, torch.float32)  # frequencies are made once and stay
    held = [tokens, positions, *model.parameters()]
    for recompute in ("none", "selective", "full"):
        model.set_recompute(recompute)
        with torch.no_grad():
            assert activation_bytes(lambda: model(tokens, positions, CausalContext()), held) == 0
