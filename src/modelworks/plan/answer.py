"""What a plan found, as one object of plain values: for `--json`, for the page, for other programs.

The names are stable and say their units: `_seconds`, `_bytes`, `_usd`, `_hours`; shares run from 0 to 1.
`docs/plan.md` describes the object. Everything in it can be written as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from modelworks.config import BatchSizes, count_parameters
from modelworks.plan.candidate import Candidate, Prediction
from modelworks.plan.hyper import Hyper
from modelworks.plan.job import Job
from modelworks.plan.layout_keys import layout_of, layout_overrides, layout_text
from modelworks.plan.prices import Price, price_of
from modelworks.plan.ramp import RampStage, ramp_seconds
from modelworks.plan.search import Points, Search
from modelworks.plan.timeline_cut import cut_curves, cut_timeline

POINTS = 1500  # of a search, in an answer: about as many as can be told apart
_CELLS = 48  # of a grid over points, along each side


def job_answer(job: Job, name: str) -> dict[str, Any]:
    """What was asked for. name: of the model."""
    count = count_parameters(job.model)
    return {
        "model": name,
        "parameters": count.total,
        "parameters_per_token": count.active,
        "hardware": job.device.name,
        "gpus": job.n_devices,
        "seq_len": job.seq_len,
        "global_batch_rows": job.global_batch,
        "global_batch_tokens": job.tokens,
        "precision": job.precision,
        "optimizer": job.optimizer,
    }


def layout_answer(candidate: Candidate, prediction: Prediction, *, price: Price | None = None) -> dict[str, Any]:
    """One layout and what is predicted for it. price: None where unknown."""
    dollars = None if price is None else price.of(candidate.n_devices, 1e6 / prediction.tokens_per_second)
    return {
        "layout": layout_text(candidate),
        "overrides": layout_overrides(candidate),
        "keys": layout_of(candidate),
        "gpus": candidate.n_devices,
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "model_flops_per_step": prediction.model_flops,
        "model_flops_per_step_full_attention": prediction.model_flops_full_attention,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "memory_bytes": prediction.memory,
        "memory_limit_bytes": prediction.memory_limit,
        "fits": prediction.fits,
        "host_memory_bytes": prediction.host_memory,
        "usd_per_million_tokens": dollars,
        "time_seconds": dict(prediction.parts),
        "fullest_rank_bytes": dict(prediction.bytes),
        "reasons": list(prediction.reasons),
    }


def details_answer(prediction: Prediction) -> dict[str, Any]:
    """What is told of the first layout only: every rank along the pipeline, and the schedule as it was simulated."""
    timeline = None if prediction.timeline is None else cut_timeline(prediction.timeline)
    curves = prediction.activations_over_time
    return {
        "stage_bytes": [dict(each) for each in prediction.bytes_by_stage],
        "timeline": timeline,
        "activation_bytes_over_time": None if timeline is None or curves is None else cut_curves(curves, timeline),
    }


def search_answer(found: Search) -> dict[str, Any]:
    """How many layouts were looked at, and a picture of them."""
    return {
        "evaluated": found.evaluated,
        "fitting": found.fitting,
        "simulated": found.simulated,
        "left_out": dict(found.left_out),
        "seconds": found.seconds,
        "points": thinned(found.points),
    }


def neighbours_answer(found: Search) -> list[dict[str, Any]]:
    """Layouts one step from the best, and what speaks against each."""
    return [
        {
            "change": each.change,
            "verdict": each.verdict,
            "why": each.why,
            "layout": None if each.candidate is None else layout_text(each.candidate),
            "step_seconds": None if each.prediction is None else each.prediction.step_seconds,
            "memory_bytes": None if each.prediction is None else each.prediction.memory,
        }
        for each in found.neighbours
    ]


def nothing_fits_answer(found: Search) -> dict[str, Any] | None:
    """What is missing where nothing fits: the smallest change that is enough, and what the others fall short by."""
    if found.nothing_fits is None:
        return None
    attempts = [
        {
            "change": each.change,
            "fits": each.fits,
            "short_by_bytes": each.short_by,
            **layout_answer(each.candidate, each.prediction),
        }
        for each in found.nothing_fits.attempts
    ]
    smallest = found.nothing_fits.smallest
    return {"attempts": attempts, "smallest": None if smallest is None else smallest.change}


def price_answer(job: Job, per_device_hour: float | None) -> tuple[Price | None, dict[str, Any] | None]:
    """The price of an hour of the job's devices. per_device_hour: the user's own, else list prices are looked up."""
    price = price_of(job.device, per_device_hour)
    if price is None:
        return None, None
    return price, {
        "usd_per_device_hour": price.per_device_hour,
        "usd_per_device_hour_low": price.low,
        "usd_per_device_hour_high": price.high,
        "source": price.source,
    }


def run_answer(
    job: Job,
    prediction: Prediction,
    tokens: int,
    price: Price | None,
    batches: BatchSizes,
    stages: Sequence[RampStage],
) -> dict[str, Any]:
    """Of the whole run, without interruptions. stages: of its batch ramp; where the layout cannot make one of them, the
    run is told as if it had none."""
    steps = math.ceil(tokens / job.tokens)
    seconds = steps * prediction.step_seconds
    if stages:
        ramped = batches.steps_for(math.ceil(tokens / job.seq_len))
        whole = ramp_seconds(stages, ramped)
        steps, seconds = (steps, seconds) if whole is None else (ramped, whole)
    dollars = None if price is None else price.of(job.n_devices, seconds)
    return {"tokens": tokens, "steps": steps, "seconds": seconds, "usd": dollars}


def hyper_answer(found: Hyper) -> dict[str, Any]:
    """Where the settings of the training could start."""
    return {
        "suggestions": [asdict(each) for each in found.suggestions],
        "overrides": dict(found.overrides),
        "caution": found.caution,
    }


def thinned(points: Points, most: int = POINTS) -> dict[str, Any]:
    """At most `most` of the points: one of each cell of a logarithmic grid, those that are best in both before others.

    Layouts whose time was not asked for, as they are far from fitting, are not among them.
    """
    known = np.flatnonzero(np.isfinite(points.step))
    if len(known) > most:
        step, size = (np.log(values[known]) for values in (points.step, points.memory))
        row, column = (_cell(values) for values in (step, size))
        order = known[np.lexsort((step, size))]
        frontier = order[_falling(points.step[order])][: most // 4]
        _, first = np.unique(row * _CELLS + column, return_index=True)
        rest = known[first]
        known = np.unique(np.concatenate([frontier, rest[:: math.ceil(len(rest) / (most - len(frontier)))]]))
    return {
        "step_seconds": points.step[known].tolist(),
        "memory_bytes": points.memory[known].tolist(),
        "fits": points.fits[known].tolist(),
    }


def _cell(values: Any) -> Any:
    """In which of `_CELLS` equal parts of their range values lie."""
    return np.floor((values - values.min()) / max(float(np.ptp(values)), 1e-9) * (_CELLS - 1))


def _falling(values: Any) -> Any:
    """Which values are below all before them."""
    return values < np.concatenate([[np.inf], np.minimum.accumulate(values)[:-1]])
