"""Layers of experts against loops over tokens and direct formulas, in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from modelworks.config import ModelConfig, UserError
from modelworks.models import (
    CausalContext,
    Routing,
    RoutingTotals,
    load_routing_state,
    routed_layers,
    routing_state,
    update_router_bias,
)
from modelworks.models.layers.deferred import defer_weights
from modelworks.models.layers.experts import MixtureOfExperts, row_capacity
from modelworks.models.layers.feed_forward import ACTIVATIONS

D, ROWS, LENGTH = 8, 3, 10
EXACT = {"rtol": 0.0, "atol": 1e-13}


def config_of(**changes):
    values = {"n_layers": 2, "d_model": D, "n_heads": 2, "vocab_size": 31, "max_seq_len": 32, "d_expert": 6}
    return ModelConfig(**{**values, "n_experts": 5, "experts_per_token": 2, **changes})


def layer_of(config, seed=0):
    layer = MixtureOfExperts(config, layer=0).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return layer


def inputs(seed=1, rows=ROWS, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, D, generator=generator, dtype=torch.float64)


def with_routing(routing):
    return SimpleNamespace(routing=routing)


def expert_output(layer, config, expert, token):
    weights = layer.experts
    activation = ACTIVATIONS[config.feed_forward]
    up = weights.up.weight[expert] @ token
    inner = activation(up) if weights.gate is None else activation(weights.gate.weight[expert] @ token) * up
    return weights.down.weight[expert] @ inner


def by_loops(layer, config, x, *, capacity=None, bias=None):
    """A token at a time, a choice at a time: (outputs, loads (rows, E) before drops, dropped)."""
    outputs, dropped = torch.zeros_like(x), 0
    loads = torch.zeros(x.shape[0], config.n_experts, dtype=torch.int64)
    for row in range(x.shape[0]):
        taken = [0] * config.n_experts
        for column in range(x.shape[1]):
            token = x[row, column]
            probabilities = (layer.router.weight @ token).softmax(0)
            scores = probabilities if bias is None else probabilities + bias
            chosen = sorted(range(config.n_experts), key=lambda e: (-float(scores[e].detach()), e))[
                : config.experts_per_token
            ]
            total = sum(probabilities[e] for e in chosen) if config.router_normalize else 1.0
            for expert in chosen:
                loads[row, expert] += 1
                if capacity is not None and taken[expert] >= capacity:
                    dropped += 1
                    continue
                taken[expert] += 1
                outputs[row, column] += probabilities[expert] / total * expert_output(layer, config, expert, token)
    return outputs, loads, dropped


@pytest.mark.parametrize("feed_forward", ["swiglu", "gelu"])
@pytest.mark.parametrize(("k", "normalize"), [(1, False), (2, True), (3, False), (5, True)])
@torch.no_grad()
def test_outputs_are_those_of_a_loop_over_tokens(feed_forward, k, normalize):
    config = config_of(feed_forward=feed_forward, experts_per_token=k, router_normalize=normalize)
    layer, x = layer_of(config), inputs()
    torch.testing.assert_close(layer(x, with_routing(None)), by_loops(layer, config, x)[0], **EXACT)


def test_gradients_are_those_of_a_loop_over_tokens():
    config = config_of(expert_capacity=0.8)
    limit = row_capacity(0.8, LENGTH, 2, 5)
    gradients = []
    for run in ("layer", "loops"):
        layer, x = layer_of(config), inputs().requires_grad_()
        if run == "layer":
            y = layer(x, with_routing(Routing(0.0, LENGTH)))
        else:
            y = by_loops(layer, config, x, capacity=limit)[0]
        (y * inputs(seed=2)).sum().backward()
        gradients.append({"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], **EXACT)


@torch.no_grad()
def test_of_equal_experts_the_lower_wins():
    config = config_of()
    layer = layer_of(config)
    layer.router.weight.zero_()
    _, choices, _ = layer.router(inputs(), 0, None)
    assert choices.unique(dim=0).tolist() == [[0, 1]]


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 1.3, 5.0])
@torch.no_grad()
def test_capacity_drops_the_latest_choices_of_a_row(factor):
    config = config_of(expert_capacity=factor)
    layer, x = layer_of(config), inputs()
    limit = row_capacity(factor, LENGTH, 2, 5)
    assert limit == math.ceil(factor * 4)
    routing = Routing(1.0, LENGTH)
    expected, loads, dropped = by_loops(layer, config, x, capacity=limit)
    torch.testing.assert_close(layer(x, with_routing(routing)), expected, **EXACT)
    assert routing.notes[0].loads.tolist() == loads.sum(0).tolist()
    assert int(routing.notes[0].dropped) == dropped
    assert (dropped == 0) == (factor == 5.0)
    # At inference nothing is dropped: a cached token could not know its place in a row that is not written yet.
    torch.testing.assert_close(layer(x, with_routing(None)), by_loops(layer, config, x)[0], **EXACT)


def test_capacity_is_at_least_one_and_not_a_rounding_error_more():
    assert row_capacity(1.1, 20, 2, 4) == 11  # 1.1 * 10 is 11.000000000000002
    assert row_capacity(0.01, 4, 1, 8) == 1


def test_no_split_of_rows_or_columns_changes_anything():
    """Outputs, gradients (auxiliary and z-loss included) and notes add up, given the other columns' counts."""
    config = config_of(expert_capacity=0.9, router_aux_loss=0.3, router_z_loss=0.2)
    x, weights = inputs(length=12), inputs(seed=2, length=12)

    def run(pieces):
        """pieces: [(rows, columns or None)]. Two passes: the first tells every piece what to sum."""
        layer, outputs = layer_of(config), torch.zeros_like(x)
        collected: list[list[torch.Tensor]] = [[] for _ in pieces]
        totals = torch.zeros(config.n_experts + 3, dtype=torch.float64)
        for final in (False, True):
            for index, (rows, columns) in enumerate(pieces):
                replies = iter([sum(tensors) for tensors in zip(*collected, strict=True)] if final else [])

                def sum_counts(counts, index=index, final=final, replies=replies):
                    if not final:
                        collected[index].append(counts.clone())
                        return counts
                    return next(replies)

                hook = None if columns is None else sum_counts
                routing = Routing(1 / ROWS, 12, columns=columns, sum_counts=hook)
                here = torch.arange(12) if columns is None else columns
                y = layer(x[rows][:, here], with_routing(routing))
                if final:
                    outputs[torch.arange(ROWS)[rows, None], here] = y.detach()
                    (y * weights[rows][:, here]).sum().backward()
                    note = routing.notes[0]
                    losses = torch.stack((note.dropped.double(), note.auxiliary_loss, note.z_loss))
                    totals += torch.cat((note.loads.double(), losses))
        return {"y": outputs, "totals": totals, **{name: p.grad for name, p in layer.named_parameters()}}

    whole = run([(slice(0, ROWS), None)])
    for pieces in (
        [(slice(0, 1), None), (slice(1, ROWS), None)],
        [(slice(0, ROWS), torch.tensor([0, 1, 2, 9, 10, 11])), (slice(0, ROWS), torch.arange(3, 9))],
    ):
        for name, value in run(pieces).items():
            torch.testing.assert_close(value, whole[name], **EXACT, msg=name)


@pytest.mark.parametrize("coefficients", [(0.5, 0.0), (0.0, 0.5), (0.2, 0.7)])
def test_losses_of_the_router_are_their_formulas(coefficients):
    auxiliary, z = coefficients
    config = config_of(router_aux_loss=auxiliary, router_z_loss=z, experts_per_token=3)
    scale, weights = 1.7, inputs(seed=2)
    layer, x = layer_of(config), inputs().requires_grad_()
    routing = Routing(scale, LENGTH)
    (layer(x, with_routing(routing)) * weights).sum().backward()

    reference, x_again = layer_of(config), inputs().requires_grad_()
    y, loads, _ = by_loops(reference, config, x_again)
    logits = x_again @ reference.router.weight.T
    shares, means = loads.double() / (LENGTH * 3), logits.softmax(-1).mean(1)
    auxiliary_loss = auxiliary * 5 * (shares * means).sum()
    z_loss = z * (logits.exp().sum(-1).log() ** 2).mean(1).sum()
    ((y * weights).sum() + scale * (auxiliary_loss + z_loss)).backward()

    torch.testing.assert_close(x.grad, x_again.grad, **EXACT)
    for (name, parameter), other in zip(layer.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **EXACT, msg=name)
    torch.testing.assert_close(routing.notes[0].auxiliary_loss, auxiliary_loss.detach(), **EXACT)
    torch.testing.assert_close(routing.notes[0].z_loss, z_loss.detach(), **EXACT)


def test_a_balanced_router_has_the_least_auxiliary_loss():
    config = config_of(router_aux_loss=1.0)
    layer, x = layer_of(config), inputs()
    layer.router.weight.data[0] += 2 * x.mean((0, 1))  # a favourite
    losses = []
    for _ in range(60):
        routing = Routing(1 / ROWS, LENGTH)
        layer.zero_grad()
        (layer(x, with_routing(routing)) * 0).sum().backward()  # the auxiliary loss alone
        layer.router.weight.data -= 2.0 * layer.router.weight.grad
        losses.append(float(routing.notes[0].auxiliary_loss) / ROWS)
    assert losses[-1] < losses[0] - 0.05


def step_of(model, micro_batches, *, routing_rows=4):
    tokens = torch.randint(0, 61, (routing_rows, 8), generator=torch.Generator().manual_seed(0))
    totals = RoutingTotals(model)
    model.zero_grad()
    for rows in tokens.split(micro_batches):
        routing = Routing(1 / routing_rows, 8)
        positions = torch.arange(8).expand(len(rows), -1)
        logits = model.logits(model(rows, positions, CausalContext(routing=routing)))
        (F.cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="sum") / tokens.numel()).backward()
        totals.add(routing)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, totals


MODEL = {"n_experts": 4, "expert_capacity": 1.0, "router_aux_loss": 0.1, "router_z_loss": 0.1, "dense_layers": [1]}
MODEL |= {"n_layers": 3, "d_expert": 24}


def test_micro_batches_change_nothing(small):
    model = small(**MODEL).double()
    whole, whole_totals = step_of(model, 4)
    split, split_totals = step_of(model, 1)
    torch.testing.assert_close(split_totals.values, whole_totals.values, **EXACT)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit_and_notes_nothing_twice(small, recompute):
    model = small(**MODEL)
    plain, totals = step_of(model, 2)
    model.set_recompute(recompute)
    again, totals_again = step_of(model, 2)
    assert torch.equal(totals.values, totals_again.values)
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def test_weight_gradients_can_be_put_off(small):
    expected, _ = step_of(small(**MODEL).double(), 4)
    model = small(**MODEL).double()
    deferred = defer_weights(model)
    with deferred.splitting(), deferred.collect(0):
        step_of(model, 4)
    stacked = [name for name in expected if ".experts." in name]
    assert stacked
    assert all(model.get_parameter(name).grad is None for name in stacked)
    deferred.run(0)
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, **EXACT, msg=name)


def test_what_is_recorded(small):
    model = small(**MODEL)
    _, totals = step_of(model, 2)
    figures = totals.figures(rows=4)
    for layer in (0, 2):
        shares = [figures[f"expert_share/{layer}/{expert}"] for expert in range(4)]
        assert sum(shares) == pytest.approx(1.0)
        assert figures[f"expert_imbalance/{layer}"] == pytest.approx(4 * max(shares))
        assert 0 < figures[f"expert_dropped/{layer}"] < 1
    assert not any(name.startswith(("expert_share/1/", "expert_imbalance/1", "expert_dropped/1")) for name in figures)
    assert {"router_aux_loss", "router_z_loss"} <= figures.keys()
    quiet = small(n_experts=4, router_aux_loss=0.0)
    assert "router_aux_loss" not in step_of(quiet, 4)[1].figures(rows=4)
    assert step_of(small(), 4)[1].figures(rows=4) == {}


@torch.no_grad()
def test_the_bias_decides_the_choice_and_nothing_else():
    config = config_of(router_bias=True, router_normalize=False)
    layer, x = layer_of(config), inputs()
    layer.router.bias = bias = torch.tensor([0.0, 0.3, -0.3, 0.1, 0.0])
    torch.testing.assert_close(layer(x, with_routing(None)), by_loops(layer, config, x, bias=bias)[0], **EXACT)


@torch.no_grad()
def test_the_bias_balances():
    layer = layer_of(config_of(router_bias=True, router_bias_rate=0.01, router_aux_loss=0.0))
    part = SimpleNamespace(blocks={"0": SimpleNamespace(feed_forward=layer)})
    x = inputs(rows=8, length=64)
    layer.router.weight[0] += 0.5 * torch.ones(D)
    x += 0.5  # a favourite
    imbalances = []
    for _ in range(60):
        routing = Routing(1.0, 64)
        layer(x, with_routing(routing))
        loads, before = routing.notes[0].loads.double(), layer.router.bias.clone()
        imbalances.append(float(loads.max() / loads.mean()))
        update_router_bias(part, {0: loads})
        expected = 0.01 * (loads.mean() - loads).sign().float()
        torch.testing.assert_close(layer.router.bias - before, expected, rtol=0, atol=1e-7)
    assert imbalances[-1] < 1.1 < 1.4 < imbalances[0]


def test_the_state_of_the_bias_is_saved_and_restored(small):
    model, other = small(n_experts=4, router_bias=True), small(n_experts=4, router_bias=True)
    for _, mixture in routed_layers(model):
        mixture.router.bias += torch.arange(4)
    state = {name: bias.clone() for name, bias in routing_state(model).items()}
    assert list(state) == ["blocks.0.feed_forward.router.bias", "blocks.1.feed_forward.router.bias"]
    load_routing_state(other, state)
    assert all(torch.equal(bias, state[name]) for name, bias in routing_state(other).items())
    assert not any("router.bias" in name for name in model.state_dict())
    with pytest.raises(UserError, match=r"blocks\.1\.feed_forward\.router\.bias: got nothing, expected \(4,\)"):
        load_routing_state(other, dict(list(state.items())[:1]))
    assert routing_state(small(n_experts=4)) == {}
    # Neither a cast nor a move of the weights may round or lose it.
    model.to(torch.bfloat16).to_empty(device="cpu")
    assert all(torch.equal(bias, state[name]) for name, bias in routing_state(model).items())


def test_a_routing_for_other_tokens_is_refused():
    layer = layer_of(config_of())
    with pytest.raises(ValueError, match="a Routing of 7 local columns was used for 10 tokens"):
        layer(inputs(), with_routing(Routing(1.0, 7)))


@torch.no_grad()
def test_the_router_decides_in_float32_whatever_the_precision():
    config = config_of()
    layer, x = layer_of(config).to(torch.bfloat16), inputs().to(torch.bfloat16)
    exact = (x.double() @ layer.router.weight.double().T).softmax(-1).sort(stable=True, dim=-1, descending=True)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(x, with_routing(None))
            weights, choices, _ = layer.router(x, 0, None)
        assert y.dtype == torch.bfloat16
        assert weights.dtype == torch.float32
        assert torch.equal(choices, exact.indices[..., :2].flatten(0, 1))
    mixed = layer_of(config).float()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = mixed(x.float(), with_routing(None))
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), mixed(x.float(), with_routing(None)), rtol=0.03, atol=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at every tensor
def test_compiled_blocks_give_the_same(small):
    model = small(**MODEL)
    expected, totals = step_of(model, 4)
    for block in model.blocks.values():
        block.compile(backend="aot_eager")  # all of it but the code for this machine
    compiled, compiled_totals = step_of(model, 4)
    torch.testing.assert_close(compiled_totals.values, totals.values, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
