"""Who sees whom: documents are isolated bit for bit, windows and caches agree with attention written out."""

from __future__ import annotations

import math

import pytest
import torch

from modelworks.models import CachedContext, CausalContext, DocumentContext, DropoutKey
from modelworks.models import context as contexts

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM = 3, 24, 4, 2, 8


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(ROWS, LENGTH, heads, HEAD_DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def brute_force(q, k, v, ids, window):
    """Attention token by token, in float64."""
    out = torch.zeros_like(q)
    for row in range(ROWS):
        for t in range(LENGTH):
            seen = [s for s in range(t + 1) if ids[row, s] == ids[row, t] and (window is None or t - s < window)]
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                scores = torch.stack([q[row, t, head] @ k[row, s, group] for s in seen]) / math.sqrt(HEAD_DIM)
                weights = scores.softmax(0)
                out[row, t, head] = sum(w * v[row, s, group] for w, s in zip(weights, seen, strict=True))
    return out


DOCUMENTS = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
DOCUMENTS[0, 5:] = 1
DOCUMENTS[0, 17:] = 2
DOCUMENTS[1, 1:] = 1


@pytest.mark.parametrize("window", [None, 1, 4, LENGTH, 100])
def test_contexts_equal_brute_force(window):
    q, k, v = inputs()
    whole = torch.zeros_like(DOCUMENTS)
    plain = CausalContext().attend(0, q, k, v, window=window)
    assert torch.allclose(plain, brute_force(q, k, v, whole, window), atol=1e-10)
    packed = DocumentContext(DOCUMENTS).attend(0, q, k, v, window=window)
    assert torch.allclose(packed, brute_force(q, k, v, DOCUMENTS, window), atol=1e-10)
    single = DocumentContext(whole + 7).attend(0, q, k, v, window=window)
    assert torch.equal(single, plain)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sizes", [[24], [1] * 24, [10, 1, 1, 7, 5], [3, 21]])
def test_cache_equals_whole_rows_however_they_are_cut(window, sizes):
    q, k, v = inputs()
    context, parts, start = CachedContext(2, block=4), [], 0
    for size in sizes:
        piece = slice(start, start + size)
        parts.append(context.attend(0, q[:, piece], k[:, piece], v[:, piece], window=window))
        start += size
    assert torch.allclose(torch.cat(parts, dim=1), CausalContext().attend(0, q, k, v, window=window), atol=1e-10)
    assert context.length == 0  # the second layer has seen nothing yet


def test_plain_path_equals_fused_path():
    q, k, v = inputs()
    for context in (CausalContext(), DocumentContext(DOCUMENTS)):
        fused = context.attend(0, q, k, v, window=6)
        mask = context._masks.additive(LENGTH, 6, q.dtype, q.device)
        plain = contexts._plain_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask, DropoutKey(0, 0, 24), 0, 0.0)
        assert torch.allclose(plain.transpose(1, 2), fused, atol=1e-10)


def test_single_documents_take_the_causal_path(monkeypatch):
    masks = []
    original = contexts.grouped_attention
    monkeypatch.setattr(
        contexts, "grouped_attention", lambda q, k, v, mask: masks.append(mask) or original(q, k, v, mask)
    )
    q, k, v = inputs()
    DocumentContext(torch.full((ROWS, LENGTH), 3)).attend(0, q, k, v)
    DocumentContext(DOCUMENTS).attend(0, q, k, v)
    assert masks[0] is None
    assert masks[1] is not None


def test_mask_is_built_once_for_all_layers():
    q, k, v = inputs()
    context = DocumentContext(DOCUMENTS)
    for layer in range(3):
        context.attend(layer, q, k, v)
    assert len(context._masks._made) == 1


def run_isolation(model, device, dtype, *, dropout=None):
    """Change document 1 of each row; logits of all other tokens must keep every bit, and its own must change."""
    length, generator = 48, torch.Generator().manual_seed(0)
    ids = torch.zeros(2, length, dtype=torch.int32)
    ids[0, 10:], ids[0, 30:], ids[1, 25:] = 1, 2, 1
    positions = torch.stack([torch.cat([torch.arange(n) for n in sizes]) for sizes in ([10, 20, 18], [25, 23])])
    tokens = torch.randint(0, 61, (2, length), generator=generator)
    changed = torch.where(ids == 1, torch.randint(0, 61, (2, length), generator=generator), tokens)
    model = model.to(device=device, dtype=dtype)
    results = []
    for batch in (tokens, changed):
        context = DocumentContext(ids.to(device), dropout=dropout)
        results.append(model.logits(model(batch.to(device), positions.to(device), context)).detach().cpu())
    others = ids != 1
    assert torch.equal(results[0][others], results[1][others])
    assert (results[0][~others] != results[1][~others]).any()
    # And each document gives what it gives alone in a row.
    if dropout is None and dtype != torch.bfloat16:
        alone = model.logits(model(tokens[:1, 10:30].to(device), positions[:1, 10:30].to(device), CausalContext()))
        assert torch.allclose(results[0][0, 10:30], alone[0].cpu(), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("window", [None, 6])
def test_documents_cannot_see_each_other(small, dtype, window):
    run_isolation(small(sliding_window=window), "cpu", dtype)


def test_documents_cannot_see_each_other_with_dropout(small):
    model = small(dropout=0.1, attention_dropout=0.2).train()
    run_isolation(model, "cpu", torch.float32, dropout=DropoutKey(0, 3, 48))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_documents_cannot_see_each_other_on_cuda(small, dtype, window):
    run_isolation(small(sliding_window=window), "cuda", dtype)


def test_cache_refuses_attention_dropout():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="attention dropout"):
        CachedContext(1).attend(0, q, k, v, dropout=0.1)
