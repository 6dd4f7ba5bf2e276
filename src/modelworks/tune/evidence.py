"""What trials say about rates: which is best, which are as good within the noise, and where divergence begins.

The same seeds serve every rate: a seed that starts well starts well at all of them. So the noise is what is left of
the losses when each rate's mean and each seed's are taken out, over (rates - 1)(seeds - 1) degrees of freedom (the
additive two-way layout, e.g. Montgomery, Design and Analysis of Experiments, chapter 4), and rates are compared on
the seeds that both have. A difference of means over n seeds has the standard error noise x sqrt(2 / n).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from modelworks.tune.trials import Outcome

SURE = 2.0  # standard errors that a difference must exceed


@dataclass
class Evidence:
    """Outcomes by place (its rank among the rates: higher is a higher rate) and seed. seeds: that a rate may have."""

    seeds: tuple[int, ...]
    places: dict[int, dict[int, Outcome]] = field(default_factory=dict)

    def add(self, place: int, seed: int, outcome: Outcome) -> None:
        self.places.setdefault(place, {})[seed] = outcome

    def losses(self, place: int) -> dict[int, float]:
        """Seed -> validation loss, of the trials that finished."""
        return {seed: each.loss for seed, each in self.places.get(place, {}).items() if each.loss is not None}

    def cliff(self) -> int | None:
        """The lowest place that diverged with any seed."""
        return min((place for place in self.places if self._diverged(place)), default=None)

    def stable(self) -> list[int]:
        """Places with a loss, below the cliff, rising."""
        cliff = self.cliff()
        return sorted(place for place in self.places if (cliff is None or place < cliff) and self.losses(place))

    def largest_stable(self) -> int | None:
        return max(self.stable(), default=None)

    def best(self) -> int | None:
        """The stable place with the lowest mean loss: of those with all their seeds, or by the first seed while no
        place has all. The lower rate where two are equal."""
        complete = [place for place in self.stable() if not any(self.unanswered([place]))]
        return min(complete or self.stable(), key=lambda place: (self.mean(place), place), default=None)

    def mean(self, place: int) -> float:
        losses = self.losses(place)
        return sum(losses.values()) / len(losses)

    def as_good_as_best(self) -> list[int]:
        """Other stable places whose loss is not above the best's by more than the noise, rising; all that are below
        it too, while they lack seeds."""
        best = self.best()
        if best is None:
            return []
        return [place for place in self.stable() if place != best and not self._is_worse(place, best)]

    def finalists(self) -> list[int]:
        """Places that should have every seed."""
        best, top = self.best(), self.largest_stable()
        if best is None or top is None:
            return []
        near = [place for place in (best - 1, best + 1) if self.losses(place)]
        return sorted({best, top, *near, *self.as_good_as_best()})

    def unanswered(self, places: Iterable[int]) -> Iterator[tuple[int, int]]:
        """(place, seed) of trials that were not made. Of a place that diverged no more are wanted."""
        for place in places:
            if not self._diverged(place):
                yield from ((place, seed) for seed in self.seeds if seed not in self.places.get(place, {}))

    def noise(self) -> float | None:
        """Standard deviation of one trial's loss beside its rate's and its seed's mean; None where rates or seeds are
        too few to tell."""
        complete = [losses for place in self.stable() if len(losses := self.losses(place)) == len(self.seeds)]
        rates, seeds = len(complete), len(self.seeds)
        if rates < 2 or seeds < 2:
            return None
        of_rate = [sum(losses.values()) / seeds for losses in complete]
        of_seed = {seed: sum(losses[seed] for losses in complete) / rates for seed in self.seeds}
        mean = sum(of_rate) / rates
        left = [
            losses[seed] - of_rate[row] - of_seed[seed] + mean
            for row, losses in enumerate(complete)
            for seed in self.seeds
        ]
        return math.sqrt(sum(each * each for each in left) / ((rates - 1) * (seeds - 1)))

    def _is_worse(self, place: int, best: int) -> bool:
        ours, theirs = self.losses(place), self.losses(best)
        common = ours.keys() & theirs.keys()
        if not common:
            return False
        above = sum(ours[seed] - theirs[seed] for seed in common) / len(common)
        noise = self.noise() or 0.0
        return above > SURE * noise * math.sqrt(2 / len(common))

    def _diverged(self, place: int) -> bool:
        return any(each.status == "diverged" for each in self.places.get(place, {}).values())
