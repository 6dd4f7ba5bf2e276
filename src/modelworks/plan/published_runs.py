"""What published pre-training runs of dense decoders used, and power laws through them.

`published_runs.csv` has a row a run: parameters, tokens, tokens of a batch, peak rate of Adam, warmup, and where they
were printed; `read` says whether the figures were read there again (`yes`) or quoted from knowledge of it (`no`).
Empty cells are not printed. A law is a straight line through the logarithms,

    target = c x parameters^a x tokens^b

by least squares in which each recipe weighs as much as the square root of its runs: the sizes of one family, and the
families that took over another's table (OPT, BLOOM, Pythia, Cerebras-GPT: GPT-3's), are no independent witnesses.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Quantity = Literal["parameters", "tokens", "batch_tokens", "rate", "warmup_steps"]


@dataclass(frozen=True)
class Run:
    """One run. values: what is printed of it, in elements, tokens, tokens a step, Adam's peak rate and steps.

    recipe: whose hyper-parameters it followed.
    """

    recipe: str
    family: str
    model: str
    values: Mapping[str, float]
    source: str
    read: bool


@dataclass(frozen=True)
class PowerLaw:
    """target = exp(constant) x product of variables^exponents.

    spread: factors between which four of five runs lie around it, by weight. bounds: of each variable over these runs.
    """

    target: Quantity
    exponents: Mapping[str, float]
    constant: float
    spread: tuple[float, float]
    bounds: Mapping[str, tuple[float, float]]
    n_runs: int

    def __call__(self, **variables: float) -> float:
        logarithm = sum(power * np.log(variables[name]) for name, power in self.exponents.items())
        return float(np.exp(self.constant + logarithm))

    def outside(self, **variables: float) -> list[str]:
        """The variables that lie outside of what the law was drawn through, by more than a quarter."""
        low, high = 1 / 1.25, 1.25
        return [
            name
            for name in self.exponents
            if not self.bounds[name][0] * low <= variables[name] <= self.bounds[name][1] * high
        ]


@cache
def published_runs() -> tuple[Run, ...]:
    """All runs, in the table's order."""
    text = (files("modelworks.plan") / "published_runs.csv").read_text(encoding="utf-8")
    return tuple(_run(row) for row in csv.DictReader(text.splitlines()))


def power_law(target: Quantity, over: Sequence[Quantity], runs: Sequence[Run] | None = None) -> PowerLaw:
    """The law of `target` over these variables, through the runs that print all of them (by default of the table)."""
    usable = [
        run
        for run in (published_runs() if runs is None else runs)
        if all(name in run.values for name in (target, *over))
    ]
    table = {name: _column(usable, name) for name in (target, *over)}
    weights = _weights([run.recipe for run in usable])
    design = np.column_stack([np.ones(len(usable)), *(np.log(table[name]) for name in over)])
    measured = np.log(table[target])
    solution, *_ = np.linalg.lstsq(design * weights[:, None], measured * weights, rcond=None)
    residual = measured - design @ solution
    low, high = np.exp(np.quantile(residual, (0.1, 0.9), weights=weights**2, method="inverted_cdf"))
    return PowerLaw(
        target=target,
        exponents={name: float(power) for name, power in zip(over, solution[1:], strict=True)},
        constant=float(solution[0]),
        spread=(float(low), float(high)),
        bounds={name: (float(table[name].min()), float(table[name].max())) for name in over},
        n_runs=len(usable),
    )


def _weights(recipes: Sequence[str]) -> NDArray[np.float64]:
    """Square roots of the weights of least squares: a recipe of n runs weighs as much as the root of n."""
    return np.array([recipes.count(name) ** -0.25 for name in recipes])


def _column(runs: Sequence[Run], name: str) -> NDArray[np.float64]:
    return np.array([run.values[name] for run in runs])


def _run(row: Mapping[str, str]) -> Run:
    names = ("parameters", "tokens", "batch_tokens", "rate", "warmup_steps")
    values = {name: float(row[name]) for name in names if row[name]}
    return Run(row["recipe"], row["family"], row["model"], values, row["source"], row["read"] == "yes")
