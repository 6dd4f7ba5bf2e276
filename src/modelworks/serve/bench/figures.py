"""Figures of a load from its outcomes: rates, percentiles, errors by name, and the series of its plot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelworks.serve.bench.outcome import Outcome

_PERCENTILES = (50, 90, 95, 99)
_CURVE_POINTS = 101
_MOST_BINS = 120


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that is reported, in seconds and tokens. Latencies and token counts are of completed requests alone;
    rates are over the time from the first request's moment to the last answer's end. None: nothing to measure."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    began = min((outcome.due for outcome in outcomes), default=0.0)
    seconds = max((outcome.ended for outcome in outcomes), default=began) - began
    generated = sum(outcome.n_tokens for outcome in done)
    prompt = _sum([outcome.n_prompt for outcome in done])
    kinds = {
        "time_to_first_token": [s for outcome in done if (s := outcome.first_token_seconds) is not None],
        "inter_token_latency": [gap for outcome in done for gap in outcome.gaps],
        "time_per_output_token": [s for outcome in done if (s := outcome.seconds_per_token) is not None],
        "end_to_end": [outcome.seconds for outcome in done],
    }
    return {
        "requests": len(outcomes),
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": _errors(outcomes),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": _sum([outcome.n_cached for outcome in done]),
        "generated_tokens": generated,
        "requests_per_second": _rate(len(done), seconds),
        "generated_tokens_per_second": _rate(generated, seconds),
        "prompt_tokens_per_second": None if prompt is None else _rate(prompt, seconds),
        **{name: _percentiles(values) for name, values in kinds.items()},
        "sent_late": _percentiles([outcome.sent - outcome.due for outcome in outcomes]),
        "counted_by_server": all(outcome.n_generated is not None for outcome in done),
        "curves": {name: _curve(values) for name, values in kinds.items()},
        "timeline": _timeline(outcomes, began, seconds),
    }


def _sum(values: Sequence[int | None]) -> int | None:
    """None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """mean, p50 …, max; percentiles interpolate between neighbours."""
    if not values:
        return None
    found = np.percentile(values, _PERCENTILES)
    named = {f"p{at}": float(value) for at, value in zip(_PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": max(values)}


def _errors(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Each kind of error, the most frequent first, with what the first of its kind said."""
    counts = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    first = {outcome.error: outcome.detail for outcome in reversed(outcomes)}
    return [{"error": error, "count": count, "first": first[error]} for error, count in counts.most_common()]


def _curve(values: Sequence[float]) -> list[float]:
    """The values at 0 %, 1 % … 100 % of the distribution; empty without values."""
    return [float(value) for value in np.percentile(values, np.linspace(0, 100, _CURVE_POINTS))] if values else []


def _timeline(outcomes: Sequence[Outcome], began: float, seconds: float) -> dict[str, Any]:
    """In even bins over the load: events with text a second, and requests in flight on average."""
    n_bins = max(1, min(_MOST_BINS, math.ceil(seconds)))
    width = seconds / n_bins
    if width <= 0:
        return {"bin_seconds": 0.0, "events_per_second": [], "in_flight": []}
    edges = np.linspace(0.0, seconds, n_bins + 1)
    arrivals = np.array([moment - began for outcome in outcomes for moment in outcome.arrivals])
    counts, _ = np.histogram(arrivals, edges)
    busy = np.zeros(n_bins)
    for outcome in outcomes:
        overlap = np.minimum(edges[1:], outcome.ended - began) - np.maximum(edges[:-1], outcome.sent - began)
        busy += np.clip(overlap, 0.0, None)
    return {
        "bin_seconds": width,
        "events_per_second": [float(value) for value in counts / width],
        "in_flight": [float(value) for value in busy / width],
    }
