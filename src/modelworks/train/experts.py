"""What a step does for a model's experts beside its gradients: loads are recorded, and biases moved against them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from modelworks.models import (
    Routing,
    RoutingTotals,
    Transformer,
    load_routing_state,
    routing_state,
    update_router_bias,
)
from modelworks.parallel import SplitModel, reduce_totals_


def balance_experts(model: SplitModel, routings: Sequence[Routing], global_rows: int) -> dict[str, float]:
    """After an update: move the biases of this rank's routers. Returns the figures of all layers, on every rank."""
    if not model.config.model.n_experts:
        return {}
    figures = []
    for part in model.parts.values():
        totals = RoutingTotals(part, model.mesh.device)
        for routing in routings:
            totals.add(routing)
        reduce_totals_(totals, model.mesh)
        update_router_bias(part, totals.loads())
        figures.append(totals.figures(global_rows))
    merged: dict[str, float] = {}
    for of_part in itertools.chain.from_iterable(model.mesh.group("pp").gather_objects(figures)):
        for name, value in of_part.items():
            # Every other figure is of one layer; the losses are sums over layers, and so over parts.
            merged[name] = merged.get(name, 0.0) + value if name.endswith("_loss") else value
    return merged


def expert_biases(model: SplitModel) -> dict[str, Tensor]:
    """Full name -> the bias of every router of the whole model, on every rank."""
    own = {name: bias.cpu() for part in model.parts.values() for name, bias in routing_state(part).items()}
    return {name: bias for other in model.mesh.group("pp").gather_objects(own) for name, bias in other.items()}


def set_expert_biases(model: SplitModel, biases: dict[str, Tensor]) -> None:
    """Set this rank's. Raises UserError where one is missing."""
    for part in model.parts.values():
        load_routing_state(part, biases)


def whole_model(model: SplitModel) -> Transformer | None:
    """All of the model on rank 0, with the biases of its routers; None elsewhere. Every rank must call it."""
    biases = expert_biases(model)
    whole = model.whole_model()
    if whole is not None:
        load_routing_state(whole, biases)
    return whole
