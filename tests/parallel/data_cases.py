"""What tests of data parallelism run on each rank, and the one process that it must equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from modelworks.config import ModelConfig, OptimizerConfig, ParallelConfig
from modelworks.layout import Layout, ParameterPlan, plan_parameters
from modelworks.models import CausalContext, DropoutKey, Transformer, default_dtype, initialize
from modelworks.optim import build_optimizer, clip_gradients
from modelworks.parallel import Mesh
from modelworks.parallel.gradients import GradientStore, build_gradient_store, world_reduce
from modelworks.train.loss import vocabulary_loss

LENGTH, ROWS, STEPS, LR, MAX_NORM = 8, 12, 3, 1e-2, 0.05
OPTIMIZER = OptimizerConfig(weight_decay=0.1)


@dataclass
class Case:
    """A model, a split and the number of micro-batches that each rank's rows are cut into, unequally if they can be."""

    parallel: ParallelConfig
    changes: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    dtype: torch.dtype = torch.float64
    recompute: str = "none"
    on_meta: bool = False
    deferred: bool = False
    p: float = 2.0

    @property
    def model(self) -> ModelConfig:
        # k and v have 4 rows: over 3 ranks the last shard is empty. Nothing divides by 3.
        sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_kv_heads": 1, "d_ff": 10, "vocab_size": 50}
        return ModelConfig(**{**sizes, "max_seq_len": LENGTH, "init_std": 0.3, **self.changes})

    @property
    def layout(self) -> Layout:
        return Layout.of(self.parallel)


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights (ROWS, LENGTH); some rows have no target, others few."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, targets = torch.randint(0, 50, (2, ROWS, LENGTH), generator=generator)
    kept = torch.arange(LENGTH) < torch.randint(0, LENGTH + 1, (ROWS, 1), generator=generator)
    return tokens, targets, kept * torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64)


def loss_of(model: Transformer, case: Case, step: int, first: int, end: int, *, plain: bool = False) -> Tensor:
    """Of rows first..end, divided by the whole batch's weight. plain: the head's weight is read again in the backward
    pass, which our own loss does not do."""
    tokens, targets, weights = batch(step)
    rows = slice(first, end)
    config = case.model
    dropout = DropoutKey(3, step, LENGTH, first) if config.dropout else None
    hidden = model(tokens[rows], torch.arange(LENGTH).expand(end - first, -1), CausalContext(dropout=dropout))
    scale = 1.0 / float(weights.sum())
    if plain:
        losses = cross_entropy(model.logits(hidden).flatten(0, 1), targets[rows].flatten(), reduction="none")
        return (losses * weights[rows].flatten()).sum() * scale
    return vocabulary_loss(hidden, model.head_weight(), targets[rows], weights[rows], scale=scale).objective


def whole(case: Case) -> dict[str, Any]:
    """One process, all rows at once: gradients and norm of the first step, parameters after the last."""
    with default_dtype(case.dtype):
        model = Transformer(case.model)
    initialize(model, 7)
    optimizer = build_optimizer(model.named_parameters(), OPTIMIZER)
    first: dict[str, Any] = {}
    for step in range(STEPS):
        loss_of(model, case, step, 0, ROWS).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        plain = {name: gradient.clone() for name, gradient in gradients.items()}
        norm = clip_gradients(gradients, MAX_NORM, case.p)
        first = first or {"gradients": plain, "norm": norm}
        optimizer.step(gradients, LR)
        model.zero_grad()
    return {**first, "parameters": {name: p.detach().clone() for name, p in model.named_parameters()}}


def build(mesh: Mesh, case: Case) -> tuple[Transformer, dict[str, ParameterPlan], GradientStore]:
    config = case.model
    layers = [range(config.n_layers)]
    plans = plan_parameters(config, case.layout, case.parallel, mesh.rank, layers)
    with default_dtype(case.dtype), torch.device("meta" if case.on_meta else "cpu"):
        model = Transformer(config)
    model.set_recompute(case.recompute)  # type: ignore[arg-type]
    if not case.on_meta:
        initialize(model, 7)
        return model, plans, build_gradient_store([model], plans, mesh, case.parallel)
    store = build_gradient_store([model], plans, mesh, case.parallel)
    with default_dtype(case.dtype):
        source = Transformer(config)
    initialize(source, 7)
    values = dict(source.named_parameters())
    store.load(lambda spec, tensor: tensor.copy_(values[spec.name][spec.slices]))
    return model, plans, store


def backward_all(model: Transformer, store: GradientStore, case: Case, mesh: Mesh, step: int) -> list[dict[str, int]]:
    """Every micro-batch of this rank's rows; the bytes held after each."""
    names = list(store.stored_parameters())
    ranks, held = mesh.size("data"), []
    share = ROWS // ranks
    bounds = [mesh.place("data") * share + share * part // case.micro_batches for part in range(case.micro_batches + 1)]
    store.begin_step(case.micro_batches)
    for index in range(case.micro_batches):
        last = index == case.micro_batches - 1
        loss = loss_of(model, case, step, bounds[index], bounds[index + 1])
        store.before_backward(names, last=last, deferred=case.deferred)
        if case.deferred:
            _backward_by_hand(loss, store)
        else:
            loss.backward()
        store.after_backward(names)
        if case.deferred and (last or case.parallel.accumulate_reduce == "every"):
            store.reduce(names)
        held.append(store.bytes())
    return held


def _backward_by_hand(loss: Tensor, store: GradientStore) -> None:
    """As a schedule does that computes weight gradients apart: no hook of a parameter's gradient is called."""
    leaves = list(store.leaves().values())
    for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


def split(mesh: Mesh, case: Case) -> dict[str, Any]:
    """This rank's shards of what `whole` gives, with their places; and bytes and traffic of each step."""
    model, plans, store = build(mesh, case)
    optimizer = build_optimizer(store.stored_parameters().items(), OPTIMIZER)
    counted = {name for name, plan in plans.items() if plan.stored.counted}
    result: dict[str, Any] = {"resting": store.bytes(), "held": [], "traffic": []}
    for step in range(STEPS):
        mesh.traffic.take()
        held = backward_all(model, store, case, mesh, step)
        gradients = store.finish()
        held.append(store.bytes())
        plain = {name: gradient.clone() for name, gradient in gradients.items()}
        norm = clip_gradients(gradients, MAX_NORM, case.p, world_reduce(mesh), counted)
        if not step:
            result |= {"gradients": plain, "norm": norm}
        optimizer.step(gradients, LR)
        store.after_update()
        store.end_step()
        traffic = {key: volume.bytes for key, volume in mesh.traffic.take().items() if key[0] != "world"}
        result["held"].append(held)
        result["traffic"].append(traffic)
        result["after"] = store.bytes()
    result["parameters"] = {name: tensor.detach().clone() for name, tensor in store.stored_parameters().items()}
    result["plans"] = plans
    store.unshard(list(plans))
    result["computed"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def assembled(results: list[dict[str, Any]], what: str) -> dict[str, Tensor]:
    """Whole tensors of the counted shards of all ranks; every element must come once."""
    tensors: dict[str, Tensor] = {}
    for result in results:
        for name, plan in result["plans"].items():
            if plan.stored.counted:
                full = tensors.setdefault(name, torch.full(plan.stored.shape, torch.nan, dtype=torch.float64))
                assert full[plan.stored.slices].isnan().all()
                full[plan.stored.slices] = result[what][name].double()
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def assert_equal_to_one_process(results: list[dict[str, Any]], case: Case, bound: float = 1e-12) -> None:
    expected = whole(case)
    for what in ("gradients", "parameters"):
        ours = assembled(results, what)
        assert ours.keys() == expected[what].keys()
        for name, tensor in ours.items():
            error = float((tensor - expected[what][name].double()).abs().max())
            assert error <= bound, f"{what} of {name}: {error}"
    norms = {result["norm"] for result in results}
    assert len(norms) == 1, norms
    [norm] = norms
    assert norm > MAX_NORM  # or clipping would go untested
    assert abs(norm - expected["norm"]) <= bound * norm
    for result in results:  # what every rank computes with next is what was updated
        for name, tensor in assembled(results, "parameters").items():
            assert torch.equal(result["computed"][name].double(), tensor), name
