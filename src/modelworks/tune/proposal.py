"""What a search says in the end: a row for every rate, the best, the largest stable one, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from modelworks.tune.evidence import SURE, Evidence
from modelworks.tune.search import Search
from modelworks.tune.trials import Outcome, Trial

# above: it did not diverge, but a lower rate did
Verdict = Literal["stable", "above", "diverged", "failed"]


@dataclass(frozen=True)
class RateRow:
    """One rate. loss: mean validation loss over its seeds, nats/token; standard_error: of that mean, None for one seed.
    reason: of the trial that diverged or failed. steps: at which it diverged."""

    rate: float
    verdict: Verdict
    losses: dict[int, float]
    loss: float | None
    standard_error: float | None
    train_loss: float | None
    reason: str
    steps: int


@dataclass(frozen=True)
class Proposal:
    """rows: rising by rate. as_good: rates whose loss the noise does not tell from the best's. noise: standard
    deviation of one trial's loss, nats/token; None where it cannot be told. diverges: the lowest rate that did.
    remarks: what a reader should know."""

    rows: tuple[RateRow, ...]
    best: RateRow | None
    as_good: tuple[float, ...]
    largest_stable: float | None
    diverges: float | None
    noise: float | None
    remarks: tuple[str, ...]

    def to_row(self) -> dict[str, Any]:
        return {
            "best": None
            if self.best is None
            else {
                "rate": self.best.rate,
                "loss": self.best.loss,
                "standard_error": self.best.standard_error,
                "seeds": len(self.best.losses),
            },
            "as_good": list(self.as_good),
            "largest_stable": self.largest_stable,
            "diverges": self.diverges,
            "noise": self.noise,
            "remarks": list(self.remarks),
        }


def propose(search: Search, outcomes: Mapping[Trial, Outcome], share: float) -> Proposal:
    """share: of the run's tokens that a trial had, 0 to 1. outcomes: also of a search that is not done yet."""
    evidence = search.evidence(outcomes)
    rows = {place: _row(evidence, place, search.rate(place)) for place in sorted(evidence.places)}
    best, top, cliff = evidence.best(), evidence.largest_stable(), evidence.cliff()
    as_good = [place for place in evidence.as_good_as_best() if not any(evidence.unanswered([place]))]
    return Proposal(
        tuple(rows.values()),
        None if best is None else rows[best],
        tuple(rows[place].rate for place in as_good),
        None if top is None else rows[top].rate,
        None if cliff is None else rows[cliff].rate,
        evidence.noise(),
        tuple(_remarks(search, evidence, rows, as_good, share)),
    )


def _row(evidence: Evidence, place: int, rate: float) -> RateRow:
    outcomes, losses = evidence.places[place], evidence.losses(place)
    cliff = evidence.cliff()
    diverged = [each for each in outcomes.values() if each.status == "diverged"]
    failed = [each for each in outcomes.values() if each.status == "failed"]
    verdict: Verdict = "failed"
    if diverged:
        verdict = "diverged"
    elif losses:
        verdict = "stable" if cliff is None or place < cliff else "above"
    train = [each.train_loss for each in outcomes.values() if each.status == "finished" and each.train_loss is not None]
    told = next(iter(diverged or failed), None)
    return RateRow(
        rate,
        verdict,
        losses,
        statistics.fmean(losses.values()) if losses else None,
        statistics.stdev(losses.values()) / math.sqrt(len(losses)) if len(losses) > 1 else None,
        statistics.fmean(train) if train else None,
        told.reason if told else "",
        told.steps if told else 0,
    )


def _remarks(
    search: Search, evidence: Evidence, rows: Mapping[int, RateRow], as_good: list[int], share: float
) -> list[str]:
    best, top, cliff = evidence.best(), evidence.largest_stable(), evidence.cliff()
    if best is None:
        return ["no rate was stable: something else than the rate is wrong, or the search began far too high"]
    remarks = []
    places = sorted(rows)
    if best in (places[0], places[-1]):
        side = "lowest" if best == places[0] else "highest"
        remarks.append(f"the best rate is the {side} that was tried: a better one may lie beyond it")
    noise = evidence.noise()
    if len(search.seeds) == 1:
        remarks.append(
            "with one seed nothing is known about the noise: losses that are close may be in the wrong order"
        )
    elif noise is not None and as_good:
        near = ", ".join(f"{rows[place].rate:g}" for place in as_good)
        are = "are as good" if len(as_good) > 1 else "is as good"
        difference = SURE * noise * math.sqrt(2 / len(search.seeds))
        remarks.append(f"{near} {are} within the noise (differences below {difference:.2g} nats/token say nothing)")
    if cliff is None:
        remarks.append(f"no rate diverged, up to {rows[places[-1]].rate:g}")
    elif best == top and rows[cliff].rate <= 2 * rows[best].rate:
        remarks.append(
            f"the best rate is the largest stable one, next to {rows[cliff].rate:g} that diverged: a whole run gives "
            "divergence more time, so take a lower one for it"
        )
    if any(row.verdict == "above" for row in rows.values()):
        remarks.append("rates above the first that diverged are not proposed, though some did not diverge")
    if any(row.verdict == "failed" for row in rows.values()):
        remarks.append("some trials failed for reasons of their own: their rates are not judged")
    if share < 1:
        remarks.append(
            f"trials had {100 * share:.2g}% of the run's tokens: the best rate falls as training gets longer (Bjorck "
            "et al. 2024, 2409.19913), so for the whole run take it as an upper end"
        )
    return remarks
