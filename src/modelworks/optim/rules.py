"""From an optimiser's name and settings to its rule."""

from __future__ import annotations

from modelworks.config import OptimizerConfig
from modelworks.optim.adam import Adam
from modelworks.optim.pieces import Rule
from modelworks.optim.sgd import Sgd


def build_rule(config: OptimizerConfig) -> Rule:
    match config.name:
        case "sgd":
            return Sgd(config.momentum, config.nesterov)
        case "adam" | "adamw":
            return Adam(config.betas, config.eps, decoupled=config.name == "adamw")
    raise ValueError(f"no optimiser is called {config.name!r}")
