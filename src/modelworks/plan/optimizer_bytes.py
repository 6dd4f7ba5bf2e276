"""Bytes of state that each optimiser keeps for a tensor. Master weights are not among them.

    sgd                    nothing
    momentum, lars, lion   one moment, 4 bytes an element (You et al. 2017, 1708.03888; Chen et al. 2023, 2302.06675)
    adam, adamw, lamb      two moments, 8 bytes (Kingma and Ba 2014, 1412.6980; Loshchilov and Hutter 2017, 1711.05101;
                           You et al. 2019, 1904.00962)
    adam8bit, adamw8bit,   a byte an element and moment, and the largest magnitude of each block of 256 in float32
    lion8bit               (Dettmers et al. 2021, 2110.02861, whose blocks are of 2,048; 256 is what bitsandbytes uses
                           since). Tensors of less than 4,096 elements and embeddings stay in float32
    adafactor              the means of a matrix's rows and columns, of anything smaller one moment; no first moment
                           (Shazeer and Stern 2018, 1804.04235, section 6)
    adafactor-moment       the same and a first moment (section 7.2): `optimizer.first_moment` is set
    muon                   one moment of the blocks' matrices; embeddings, head and vectors are AdamW's (Jordan et al.
                           2024, kellerjordan.github.io/posts/muon)

What counts is the logical tensor: whether it is a matrix, small or an embedding is asked of the whole, and the bytes
are then those of the part that a rank holds. Matrices are the last two dimensions: experts are stacked along the first.
A step counter for each tensor or optimiser, a few bytes, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from modelworks.config import ModelConfig, UserError, nearest, parameter_shapes
from modelworks.layout import n_tiles

SMALL = 4096  # tensors of fewer elements keep float32 state
FLOAT = 4


@dataclass(frozen=True)
class _Rule:
    """moments: numbers kept for each element. others: the same where `kind` does not apply, if not `moments` too."""

    moments: int
    kind: Literal["float32", "8bit", "factored", "matrices"] = "float32"
    others: int | None = None
    besides: int = 0  # numbers for each element of a factored tensor


_RULES = {
    "sgd": _Rule(0),
    "momentum": _Rule(1),
    "adam": _Rule(2),
    "adamw": _Rule(2),
    "lamb": _Rule(2),
    "lars": _Rule(1),
    "adafactor": _Rule(1, "factored"),
    "adafactor-moment": _Rule(2, "factored", besides=1),
    "lion": _Rule(1),
    "adam8bit": _Rule(2, "8bit"),
    "adamw8bit": _Rule(2, "8bit"),
    "lion8bit": _Rule(1, "8bit"),
    "muon": _Rule(1, "matrices", others=2),
}

OPTIMIZERS = tuple(_RULES)


@dataclass(frozen=True)
class StateBytes:
    """Mean bytes of state for each element. layers: of the blocks without their experts. experts: of those (as
    `layers` where there are none). ends: of embeddings, head and final norm. mean: of all."""

    layers: float
    experts: float
    ends: float
    mean: float


def optimizer_bytes(name: str, shape: Sequence[int], *, parameter: str = "", held: Sequence[int] | None = None) -> int:
    """Bytes of state of one tensor.

    shape: of the whole tensor. parameter: its full name, which tells embeddings and the head; without it, a weight of a
    block. held: the shape of the part that is on this rank, by default all of it.
    Raises UserError for an unknown optimiser, naming the nearest.
    """
    rule = _rule(name)
    local = tuple(shape if held is None else held)
    elements = math.prod(local)
    size = math.prod(shape)
    at_ends = _at_ends(parameter)
    if rule.kind == "8bit" and size >= SMALL and not parameter.endswith("embedding.weight"):
        return rule.moments * (elements + FLOAT * n_tiles(shape, local))
    if rule.kind == "factored" and len(shape) >= 2:
        *stacked, rows, columns = local
        return FLOAT * (math.prod(stacked) * (rows + columns) + rule.besides * elements) if elements else 0
    if rule.kind == "matrices" and (len(shape) < 2 or at_ends):
        return FLOAT * (rule.others or 0) * elements
    return FLOAT * rule.moments * elements


def state_bytes(name: str, model: ModelConfig) -> StateBytes:
    """Bytes of state for each element of a model, by where it lies: what a search multiplies element counts with.

    Raises UserError for an unknown optimiser, naming the nearest.
    """
    _rule(name)
    totals = {part: [0, 0] for part in ("layers", "experts", "ends")}
    alike: dict[tuple[str, tuple[int, ...]], int] = {}
    for parameter, shape in parameter_shapes(model).items():
        part = "ends" if _at_ends(parameter) else "experts" if ".experts." in parameter else "layers"
        key = parameter if part == "ends" else part, shape
        if key not in alike:
            alike[key] = optimizer_bytes(name, shape, parameter=parameter)
        totals[part][0] += alike[key]
        totals[part][1] += math.prod(shape)
    means = {part: held / elements if elements else 0.0 for part, (held, elements) in totals.items()}
    if not totals["experts"][1]:
        means["experts"] = means["layers"]
    every, elements = (sum(column) for column in zip(*totals.values(), strict=True))
    return StateBytes(**means, mean=every / elements)


def check_optimizer_name(name: str) -> str:
    """The name, if it is one of `OPTIMIZERS`. Raises UserError naming the nearest."""
    _rule(name)
    return name


def _rule(name: str) -> _Rule:
    if found := _RULES.get(name):
        return found
    close = nearest(name, OPTIMIZERS)
    hint = f"did you mean {close}?" if close else f"known: {', '.join(OPTIMIZERS)}"
    raise UserError(f"no optimiser is called {name!r}; {hint}")


def _at_ends(parameter: str) -> bool:
    """Whether this is a parameter outside the blocks. Without a name it is taken for one of a block."""
    return bool(parameter) and not parameter.startswith("blocks.")
