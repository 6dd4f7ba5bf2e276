"""Which trials come next, given what is known: pure, so that a search that was killed goes on as if it had not been.

Rates lie on a grid, four to a decade, around the configured one; a place is a whole number of quarter-decades from it.
The search asks for sets of trials, each decided by the sets before it alone:

    coarse   a decade below and above, with one seed; further decades while the best is the outermost
    fine     half a decade, then a quarter, to both sides of the best
    cliff    upwards until a rate diverges, or two decades above the best, then halving, for the largest that does not
    seeds    all seeds for the best, its neighbours, the largest stable rate, and every rate whose loss the noise does
             not tell from the best; where that moves the best, the steps above are asked again

A rate counts as stable where none of its seeds diverged and no lower rate did. Given rates are tried with every seed,
and nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modelworks.tune.evidence import Evidence
from modelworks.tune.trials import Outcome, Trial

PER_DECADE = 4
DECADES = 5  # that the search may go to either side
_BEYOND_BEST = 2 * PER_DECADE  # places above the best up to which divergence is looked for


@dataclass(frozen=True)
class Search:
    """centre: the rate that the search begins at. seeds: the first is the one that rates are compared by at first.
    rates: exactly these instead, in rising order."""

    centre: float
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()

    def rate(self, place: int) -> float:
        """Of a place on the grid, in three digits, or the given rate itself."""
        if self.rates:
            return self.rates[place]
        return self.centre if place == 0 else float(f"{self.centre * 10 ** (place / PER_DECADE):.2e}")

    def next(self, outcomes: Mapping[Trial, Outcome]) -> list[Trial]:
        """The trials of the present set that have no outcome yet; empty where the search is done."""
        evidence = Evidence(self.seeds)
        while wanted := list(self._next_set(evidence)):
            trials = {Trial(self.rate(place), seed): (place, seed) for place, seed in wanted}
            if missing := [trial for trial in trials if trial not in outcomes]:
                return missing
            for trial, (place, seed) in trials.items():
                evidence.add(place, seed, outcomes[trial])
        return []

    def evidence(self, outcomes: Mapping[Trial, Outcome]) -> Evidence:
        """What all outcomes say about the places of this search."""
        places = {self.rate(place): place for place in self._places()}
        evidence = Evidence(self.seeds)
        for trial, outcome in sorted(outcomes.items()):
            if trial.rate in places and trial.seed in self.seeds:
                evidence.add(places[trial.rate], trial.seed, outcome)
        return evidence

    def _places(self) -> range:
        if self.rates:
            return range(len(self.rates))
        most = DECADES * PER_DECADE
        return range(-most, most + 1)

    def _next_set(self, evidence: Evidence) -> Iterator[tuple[int, int]]:
        """(place, seed) of the set after those that the evidence holds; nothing where there is none."""
        if self.rates:
            new = [(place, self.seeds[0]) for place in self._places() if place not in evidence.places]
            return iter(new) if new else evidence.unanswered(self._places())
        for places in (self._around_best(evidence), self._towards_cliff(evidence)):
            inside = [place for place in places if place in self._places()]
            if inside:
                return ((place, self.seeds[0]) for place in inside)
        return evidence.unanswered(evidence.finalists())

    def _around_best(self, evidence: Evidence) -> list[int]:
        """Places that are missing around the best: decades, then halves of one, then quarters."""
        if not evidence.places:
            return [-PER_DECADE, 0, PER_DECADE]
        best = evidence.best()
        if best is None:  # every rate diverges so far
            return [min(evidence.places) - PER_DECADE]
        for step in (PER_DECADE, PER_DECADE // 2, 1):
            missing = [
                best + step * side
                for side in (-1, 1)
                if not any(best + distance * side in evidence.places for distance in range(1, step + 1))
            ]
            missing = [place for place in missing if place in self._places()]
            if missing:
                return missing
        return []

    def _towards_cliff(self, evidence: Evidence) -> list[int]:
        """The place that tells most about where divergence begins."""
        top, cliff, best = evidence.largest_stable(), evidence.cliff(), evidence.best()
        if top is None or best is None:
            return []
        if cliff is None:
            highest = max(evidence.places)
            return [highest + PER_DECADE] if highest < best + _BEYOND_BEST else []
        unknown = [place for place in range(top + 1, cliff) if place not in evidence.places]
        return [min(unknown, key=lambda place: abs(place - (top + cliff) / 2))] if unknown else []
