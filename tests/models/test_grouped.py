"""Products of groups of rows against torch's, one group at a time; rows go to their experts and come back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from modelworks.models.layers.grouped import grouped_linear, grouped_mm, grouped_outer
from modelworks.models.layers.token_order import dispatch, permute, restore

EXACT = {"rtol": 0.0, "atol": 1e-13}
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(COUNTS, st.integers(0, 3))
def test_grouped_products_are_those_of_each_group(counts, behind):
    generator = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts) + behind, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(counts), 4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(rows), 4, generator=generator, dtype=torch.float64)
    y = grouped_linear(rows, weight, torch.tensor(counts))
    (y * weights).sum().backward()
    found = y.detach(), rows.grad, weight.grad
    rows.grad = weight.grad = None
    parts = torch.split(rows, [*counts, behind])[:-1]
    products = [part @ matrix.T for part, matrix in zip(parts, weight, strict=True)]
    expected = torch.cat([*products, rows.new_zeros(behind, 4)])
    (expected * weights).sum().backward()
    for mine, theirs in zip(found, (expected.detach(), rows.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs, **EXACT)


def test_the_operations_keep_torchs_rules():
    rows, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (3, 4, 3)))
    counts = torch.tensor([2, 0, 4])
    assert torch.autograd.gradcheck(lambda r, w: grouped_linear(r, w, counts), (rows, weight))
    for operation, arguments in ((grouped_mm, (rows, weight)), (grouped_outer, (rows, rows))):
        detached = tuple(argument.detach() for argument in arguments)
        torch.library.opcheck(operation, (*detached, counts), test_utils=("test_schema", "test_faketensor"))


def test_flops_are_those_of_the_products_inside():
    rows, weight, counts = torch.randn(6, 3), torch.randn(3, 4, 3), torch.tensor([2, 0, 4])
    first, last = rows[:2], rows[2:]

    def flops(function, *arguments):
        with FlopCounterMode(display=False) as counter:
            function(*arguments)
        return counter.get_total_flops()

    products = flops(lambda: (first @ weight[0].t(), last @ weight[2].t()))
    assert flops(grouped_mm, rows, weight, counts) == products > 0
    products = flops(lambda: (first.t() @ first, last.t() @ last))
    assert flops(grouped_outer, rows, rows, counts) == products > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3), st.randoms(use_true_random=False))
def test_dispatch_and_restore_keep_every_pair(n, k, random):
    order = list(range(n * k))
    random.shuffle(order)
    order = torch.tensor(order)
    tokens = torch.arange(n * 2, dtype=torch.float64).view(n, 2).requires_grad_()
    rows = dispatch(tokens, order, k)
    assert torch.equal(rows, tokens[order // k])
    assert torch.equal(restore(permute(rows, order), order), rows)
    pairs = restore(rows, order).view(n, k, 2)
    assert torch.equal(pairs, tokens[:, None].expand(n, k, 2))
    weights = torch.randn(n, k, 2, dtype=torch.float64)
    (pairs * weights).sum().backward()
    torch.testing.assert_close(tokens.grad, weights.sum(1), **EXACT)
