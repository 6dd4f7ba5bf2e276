"""Loss against rate as lines of text: a row for each rate, its bar longer where the loss is higher."""

from __future__ import annotations

from modelworks.tune.proposal import Proposal, RateRow

WIDTH = 40
_BLOCKS = " ▏▎▍▌▋▊▉█"


def text_rows(proposal: Proposal) -> list[list[str]]:
    """Heading and rows of cells: rate, loss, its standard error, bar, note."""
    finite = [row.loss for row in proposal.rows if row.loss is not None]
    lowest = min(finite, default=0.0)
    # A rate that learns nothing would press all others together: the scale ends where most rates are.
    highest = min(max(finite, default=1.0), lowest + 4 * max(_middle(finite) - lowest, 1e-9))
    rows = [["rate", "validation loss", "±", "", ""]]
    for row in proposal.rows:
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        error = "" if row.standard_error is None else f"{row.standard_error:.4f}"
        bar = "" if row.loss is None else _bar((row.loss - lowest) / ((highest - lowest) or 1.0))
        rows.append([f"{row.rate:g}", loss, error, bar, _note(row, proposal)])
    return rows


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _bar(share: float) -> str:
    """At least a sliver, so that the best has a place; an arrow where it goes on."""
    if share > 1:
        return "█" * (WIDTH - 1) + "→"
    eighths = max(1, round(share * WIDTH * 8))
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _note(row: RateRow, proposal: Proposal) -> str:
    notes = []
    if proposal.best is not None and row.rate == proposal.best.rate:
        notes.append("best")
    if row.rate in proposal.as_good:
        notes.append("as good")
    if row.rate == proposal.largest_stable:
        notes.append("largest stable")
    if row.verdict == "diverged":
        notes.append(f"diverged at step {row.steps}: {row.reason}")
    if row.verdict == "failed":
        notes.append(f"failed: {row.reason}")
    if row.verdict == "above":
        notes.append("above a rate that diverged")
    return ", ".join(notes)
