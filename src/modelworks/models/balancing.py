"""Whether the experts of a model share the work: totals over a step, the figures to record, and the router's bias.

Balancing without a loss (Wang et al. 2024, 2408.15664; DeepSeek-V3, 2412.19437): a bias is added to an expert's score
for the choice alone, and after each step moved by a fixed rate against the load. The load is that of the whole global
batch, so every rank moves its copy alike. The biases are no parameters: no optimiser or ZeRO touches them, and whoever
saves a model saves `routing_state` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from modelworks.config import ModelConfig, UserError
from modelworks.models.layers.experts import MixtureOfExperts
from modelworks.models.routing import Routing

# What a layer's totals hold after the E loads.
_DROPPED, _AUXILIARY, _Z = -3, -2, -1


class RoutingTotals:
    """What the layers of a part noted, summed over micro-batches. `values` may be summed over ranks as it is.

    values: float64 (layers with experts, E + 3): choices of each expert, dropped choices, sums over rows of the
    auxiliary and of the z-loss.
    """

    def __init__(self, part: nn.Module, device: torch.device | str = "cpu") -> None:
        self.config: ModelConfig = part.config  # type: ignore[assignment]
        self.layers = [layer for layer, _ in routed_layers(part)]
        shape = (len(self.layers), self.config.n_experts + 3)
        self.values = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, routing: Routing) -> None:
        """The notes of one micro-batch, after its forward pass."""
        for row, layer in enumerate(self.layers):
            note = routing.notes[layer]
            losses = torch.stack((note.dropped.double(), note.auxiliary_loss.double(), note.z_loss.double()))
            self.values[row] += torch.cat((note.loads.double(), losses)).to(self.values.device)

    def loads(self) -> dict[int, Tensor]:
        """Layer -> choices of each expert, float64 (E,)."""
        return {layer: self.values[row, :_DROPPED] for row, layer in enumerate(self.layers)}

    def figures(self, rows: int) -> dict[str, float]:
        """What to record, by name. rows: of the global batch, over whose ranks `values` was summed.

        `expert_share/{layer}/{expert}`: of the layer's choices, 1/E where balanced. `expert_imbalance/{layer}`: the
        largest load over the mean, 1 where balanced. `expert_dropped/{layer}`: share of the choices beyond capacity.
        `router_aux_loss`, `router_z_loss`: as they enter the objective, summed over layers.
        """
        figures: dict[str, float] = {}
        values = self.values.cpu()
        for row, layer in enumerate(self.layers):
            loads = values[row, :_DROPPED]
            choices = max(float(loads.sum()), 1.0)
            for expert, load in enumerate(loads.tolist()):
                figures[f"expert_share/{layer}/{expert}"] = load / choices
            figures[f"expert_imbalance/{layer}"] = float(loads.max()) * len(loads) / choices
            if self.config.expert_capacity is not None:
                figures[f"expert_dropped/{layer}"] = float(values[row, _DROPPED]) / choices
        for name, place in (("router_aux_loss", _AUXILIARY), ("router_z_loss", _Z)):
            if self.layers and getattr(self.config, name):
                figures[name] = float(values[:, place].sum()) / rows
        return figures


def update_router_bias(part: nn.Module, loads: Mapping[int, Tensor]) -> None:
    """After a step: move each expert's bias by the rate, up where its load was below the mean and down where above.

    loads: layer -> choices of each expert over the whole global batch, (E,). Does nothing without `router_bias`.
    """
    for layer, mixture in routed_layers(part):
        if mixture.router.bias is not None:
            load = loads[layer].to(mixture.router.bias.device)
            mixture.router.bias += mixture.router.bias_rate * (load.mean() - load).sign().float()


def routing_state(part: nn.Module) -> dict[str, Tensor]:
    """Full name -> float32 (E,): the biases, which no optimiser has and a checkpoint must. Shares memory."""
    return {
        f"blocks.{layer}.feed_forward.router.bias": mixture.router.bias
        for layer, mixture in routed_layers(part)
        if mixture.router.bias is not None
    }


def load_routing_state(part: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set every bias of the part. Raises UserError where one is missing or of another size."""
    for name, bias in routing_state(part).items():
        if name not in state or state[name].shape != bias.shape:
            found = f"shape {tuple(state[name].shape)}" if name in state else "nothing"
            raise UserError(f"{name}: got {found}, expected {tuple(bias.shape)}: the state of model.router_bias")
        bias.copy_(state[name])


def routed_layers(part: nn.Module) -> Iterator[tuple[int, MixtureOfExperts]]:
    """(layer, its feed-forward) of every block of a `Transformer` or a part of one that has experts."""
    for layer, block in part.blocks.items():  # type: ignore[operator, union-attr]
        if isinstance(block.feed_forward, MixtureOfExperts):
            yield int(layer), block.feed_forward
