"""Dropout masks: right in number, a function of place, blind to how a batch is split."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.models import CachedContext, CausalContext, DropoutKey
from modelworks.models.dropout import dropout

KEY = DropoutKey(seed=4, step=7, row_length=16)


def test_share_and_scale():
    x = torch.ones(8, 16, 500)
    for probability in (0.1, 0.5, 0.9):
        y = dropout(x, probability, KEY, 0, "attention")
        kept = y != 0
        n = x.numel()
        assert abs(kept.double().mean() - (1 - probability)) < 5 * math.sqrt(probability * (1 - probability) / n)
        assert torch.allclose(y[kept], torch.tensor(1 / (1 - probability)))
    assert dropout(x, 0.0, None, 0, "attention") is x


def test_split_rows_give_the_same_masks():
    shape = (6, 16, 10)
    whole = KEY.keep(shape, 0.3, 2, "attention", torch.device("cpu"))
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        part_key = DropoutKey(KEY.seed, KEY.step, KEY.row_length, first_row=start)
        part = part_key.keep((stop - start, 16, 10), 0.3, 2, "attention", torch.device("cpu"))
        assert torch.equal(part, whole[start:stop])


@settings(deadline=None)
@given(st.data())
def test_any_columns_and_heads_give_the_same_masks(data):
    """Sequence and context parallelism give a rank some columns, in any order; tensor parallelism some heads."""
    heads, keys = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    whole = KEY.keep((3, 16, heads, keys), 0.4, 2, "attention_weights", torch.device("cpu"))
    columns = torch.tensor(data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True)))
    first = data.draw(st.integers(0, heads - 1))
    end = data.draw(st.integers(first + 1, heads))
    here = replace(KEY, columns=columns, first_channel=first)
    mask = here.keep((3, len(columns), end - first, keys), 0.4, 2, "attention_weights", torch.device("cpu"))
    assert torch.equal(mask, whole[:, columns, first:end])


def test_a_key_of_other_columns_is_refused():
    with pytest.raises(ValueError, match="3 columns was used for 4 tokens"):
        replace(KEY, columns=torch.arange(3)).keep((1, 4, 8), 0.5, 0, "attention", torch.device("cpu"))


def test_attention_has_a_key_of_its_own_where_it_is_given_one(small):
    model = small(dropout=0.2, attention_dropout=0.2).train()
    tokens, positions = torch.arange(16)[None] % 61, torch.arange(16)[None]

    def run(**keys):
        return model(tokens, positions, CausalContext(**keys))

    other = replace(KEY, seed=5)
    same = run(dropout=KEY)
    assert torch.equal(run(dropout=KEY, attention_dropout=KEY), same)
    assert not torch.equal(run(dropout=KEY, attention_dropout=other), same)
    assert not torch.equal(run(dropout=other, attention_dropout=KEY), run(dropout=other))


def test_masks_differ_by_seed_step_layer_site_row_and_column():
    def mask(key=KEY, layer=0, site="attention"):
        return key.keep((4, 16, 64), 0.5, layer, site, torch.device("cpu"))

    base = mask()
    others = [mask(DropoutKey(5, 7, 16)), mask(DropoutKey(4, 8, 16)), mask(layer=1), mask(site="feed_forward")]
    others.append(mask(DropoutKey(4, 7, 16, first_row=4)))
    for other in others:
        agreement = (other == base).double().mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(base.numel())
    flat = base.reshape(64, 64).double()
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.7  # no two tokens share a mask


def test_micro_batches_give_the_same_hidden_states(small):
    model = small(dropout=0.2, attention_dropout=0.2).train()
    tokens = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(4, -1)
    whole = model(tokens, positions, CausalContext(dropout=KEY))
    parts = [
        model(tokens[i : i + 2], positions[i : i + 2], CausalContext(dropout=DropoutKey(4, 7, 16, first_row=i)))
        for i in (0, 2)
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=1e-5)
    assert not torch.allclose(whole, model.eval()(tokens, positions, CausalContext()), atol=0.1)


def test_training_without_a_key_is_refused_and_evaluation_needs_none(small):
    model = small(dropout=0.2)
    tokens, positions = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None]
    with pytest.raises(ValueError, match="DropoutKey"):
        model.train()(tokens, positions, CausalContext())
    model.eval()(tokens, positions, CachedContext(2))
