"""From an optimiser's name and settings to its rule."""

from __future__ import annotations

import torch

from modelworks.config import OptimizerConfig
from modelworks.optim.adafactor import Adafactor
from modelworks.optim.adam import Adam
from modelworks.optim.eight_bit import EightBit
from modelworks.optim.lion import Lion
from modelworks.optim.muon import Muon
from modelworks.optim.pieces import Rule
from modelworks.optim.sgd import Sgd
from modelworks.optim.trust import Lamb, Lars


def build_rule(config: OptimizerConfig) -> Rule:
    match config.name:
        case "sgd":
            return Sgd(config.momentum, config.nesterov)
        case "adam" | "adamw":
            return Adam(config.betas, config.eps, decoupled=config.name == "adamw")
        case "lamb":
            return Lamb(config.betas, config.eps, config.trust_clamp)
        case "lars":
            return Lars(config.momentum, config.trust_coefficient, config.eps)
        case "lion":
            return Lion(config.betas)
        case "adafactor":
            return Adafactor(
                config.eps, config.decay_exponent, config.update_clip, config.min_scale, config.relative_step,
                config.scale_parameter, config.first_moment,
            )  # fmt: skip
        case "adam8bit" | "adamw8bit":
            return EightBit(Adam(config.betas, config.eps, decoupled=config.name == "adamw8bit"))
        case "lion8bit":
            return EightBit(Lion(config.betas))
        case "muon":
            rest = Adam(config.betas, config.eps, decoupled=True)
            dtype = torch.bfloat16 if config.orthogonal_dtype == "bf16" else None
            return Muon(config.momentum, config.nesterov, config.orthogonal_steps, config.update_scale, rest, dtype)
    raise ValueError(f"no optimiser is called {config.name!r}")
