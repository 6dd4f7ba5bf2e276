"""What each optimiser is called, which settings it uses, and its usual values for them.

A key that is not written takes the optimiser's own value where it has one: a sign's update wants another rate than
Adam's, and decay that goes through the gradient another strength than decay that does not. `own_values` says which,
and why, so that a run can print what it was not told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptimizerName = Literal[
    "sgd", "adam", "adamw", "lamb", "lars", "lion", "adafactor", "adam8bit", "adamw8bit", "lion8bit", "muon"
]


@dataclass(frozen=True)
class Habits:
    """uses: settings that not all optimisers have, of those this one reads. values: of keys that are not written, where
    they are not AdamW's. reason: whose values these are."""

    uses: frozenset[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


_ADAM = frozenset({"betas", "eps"})
_TRUST = frozenset({"no_trust"})

HABITS: dict[OptimizerName, Habits] = {
    "sgd": Habits(
        frozenset({"momentum", "nesterov"}),
        {"lr": 0.1, "weight_decay": 0.0},
        "0.1 is where a search for SGD usually begins; decay goes through the gradient (L2), so it is off",
    ),
    "adam": Habits(
        _ADAM,
        {"betas": (0.9, 0.999), "weight_decay": 0.0},
        "Kingma & Ba 2014 (1412.6980); decay goes through the gradient (L2), so it is off",
    ),
    "adamw": Habits(_ADAM),
    "lamb": Habits(
        _ADAM | _TRUST | {"trust_clamp"},
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01},
        "You et al. 2019 (1904.00962), BERT; the rate is relative to each tensor's norm",
    ),
    "lars": Habits(
        _TRUST | {"momentum", "trust_coefficient", "eps"},
        {"lr": 1.0, "eps": 1e-8, "weight_decay": 1e-4},
        "You et al. 2017 (1708.03888); the rate is relative to each tensor's norm, times trust_coefficient",
    ),
    "lion": Habits(
        frozenset({"betas"}),
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.3},
        "Chen et al. 2023 (2302.06675): a third to a tenth of AdamW's rate, and decay larger by as much",
    ),
    "adafactor": Habits(
        frozenset(
            {"eps", "first_moment", "decay_exponent", "update_clip", "relative_step", "scale_parameter", "min_scale"}
        ),
        {"lr": 1e-2, "eps": 1e-30, "weight_decay": 0.0},
        "Shazeer & Stern 2018 (1804.04235); the rate is relative to each tensor's root mean square",
    ),
    "muon": Habits(
        _ADAM | {"momentum", "nesterov", "orthogonal_steps", "orthogonal_dtype", "update_scale"},
        {"momentum": 0.95, "nesterov": True},
        "Jordan et al. 2024; with updates scaled to AdamW's size AdamW's rate and decay serve (Liu et al. 2025, "
        "2502.16982)",
    ),
}

# Moments in 8 bits change how state is kept and nothing else.
HABITS |= {"adam8bit": HABITS["adam"], "adamw8bit": HABITS["adamw"], "lion8bit": HABITS["lion"]}

SPECIFIC = frozenset().union(*(habits.uses for habits in HABITS.values()))


def own_values(name: object) -> Mapping[str, Any]:
    """What keys that are not written take, for this optimiser; nothing for a name that does not exist."""
    return next((habits.values for known, habits in HABITS.items() if known == name), {})


def users_of(key: str) -> list[str]:
    """The optimisers that read a setting."""
    return [name for name, habits in HABITS.items() if key in habits.uses]
