"""A search in sentences: why the winner wins, what binds it, which axis goes over which links, what the others lack.

Every figure is computed for the sentence it stands in: from the prediction, or by predicting again with one thing
changed (a network in place of the links inside a node, an unlimited memory).
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from modelworks.plan.candidate import Candidate, Prediction, candidate_work
from modelworks.plan.constants import CONSTANTS, Constants
from modelworks.plan.found import TIE, Found, Nearest, Search
from modelworks.plan.neighbours import NAMES
from modelworks.plan.rank_bytes import ranks_of, stages_of_ranks
from modelworks.plan.spaces import complexity
from modelworks.plan.step_time import StepTime, step_time
from modelworks.plan.stored import stages

_COMPUTE = ("linear", "attention", "elementwise", "head", "recompute", "optimizer")
_EXCHANGES = ("tensor", "context", "experts", "gather", "data", "sends")
_AXES = {
    "tp": ("tensor", "tensor parallelism"),
    "cp": ("context", "context parallelism"),
    "ep": ("experts", "expert parallelism"),
    "dp": ("data", "data parallelism"),
}


def explain(search: Search, constants: Constants = CONSTANTS) -> list[str]:
    """Sentences, the most important first. With what would fit, where nothing does."""
    if search.nothing_fits is not None:
        return _missing(search.nothing_fits)
    if not search.best:
        return ["no layout was found"]
    winner = search.best[0]
    return [
        _why(search, winner),
        _binds(search, winner),
        *_headroom(search, winner),
        *_links(winner, constants),
        *_partition(winner),
        *_neighbours(search),
        _counts(search),
    ]


def _why(search: Search, winner: Found) -> str:
    prediction = winner.prediction
    text = (
        f"{prediction.step_seconds:.2f} s a step, {prediction.tokens_per_second:,.0f} tokens/s, MFU "
        f"{prediction.mfu:.0%}, {prediction.memory / 1e9:.1f} of {prediction.memory_limit / 1e9:.1f} GB"
    )
    if winner.ties:
        more = "layout is" if winner.ties == 1 else "layouts are"
        text += (
            f"; at least {winner.ties} other {more} as fast within {TIE:.0%}, and this is the simplest of them (fewest "
            "axes and choices beyond the default)"
        )
    others = search.best[1:]
    if others:
        second = min(others, key=lambda each: each.prediction.step_seconds)
        gap = second.prediction.step_seconds / prediction.step_seconds - 1.0
        text += f"; the best other split ({_degrees(second.candidate)}) takes {gap:+.1%}"
        if abs(gap) <= TIE:
            simpler = complexity(winner.candidate) < complexity(second.candidate)
            text += f", less than the {TIE:.0%} that predictions can tell apart"
            text += ": decided for the simpler one" if simpler else ": as good a choice"
    return text


def _headroom(search: Search, winner: Found) -> list[str]:
    if not (share := search.limits.headroom):
        return []
    limit = winner.prediction.memory_limit
    return [
        f"{share:.0%} of each device's {limit / (1.0 - share) / 1e9:.0f} GB is left free (memory headroom): what is "
        "predicted is not exact"
    ]


def _binds(search: Search, winner: Found) -> str:
    """Memory binds where a faster neighbour does not fit; else what takes most of the step beside computing."""
    prediction, parts = winner.prediction, winner.prediction.parts
    total = prediction.step_seconds
    shares = {
        "compute": sum(parts[name] for name in _COMPUTE),
        "network": sum(parts[name] for name in _EXCHANGES),
        "waiting in the pipeline": max(parts["idle"], 0.0),
    }
    text = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items())
    kept = [
        (each.prediction.step_seconds, each)
        for each in search.neighbours
        if each.verdict == "does not fit" and each.prediction and each.prediction.step_seconds < total
    ]
    if kept:
        seconds, each = min(kept, key=lambda item: item[0])
        assert each.prediction is not None  # by the condition above
        over = (each.prediction.memory - each.prediction.memory_limit) / 1e9
        return (
            f"memory binds: {each.change} would save {(total - seconds) * 1e3:.0f} ms a step and is {over:.1f} GB too "
            f"large; of the slowest rank's step: {text}"
        )
    waits = {name: seconds for name, seconds in shares.items() if name != "compute"}
    largest = max(waits, key=lambda name: waits[name])
    if waits[largest] < 0.1 * total:
        return f"compute binds: of the slowest rank's step: {text}"
    exchange = max(_EXCHANGES, key=lambda name: parts[name])
    detail = f", most of it {NAMES[exchange]}" if largest == "network" else ""
    return f"{largest} binds beside compute{detail}; of the slowest rank's step: {text}"


def _links(winner: Found, constants: Constants) -> list[str]:
    """Where each axis' ranks lie, and what its exchanges would cost if every one of them crossed the network."""
    candidate = winner.candidate
    work = candidate_work(candidate, constants)
    if work.machine.measured is not None:
        return []  # a measured machine has no network to cross
    node, parallel = int(work.machine.node), candidate.parallel
    layers = stages_of_ranks(ranks_of(parallel, stages(candidate.model, parallel, candidate.seq_len)))
    here = _seconds(step_time(work, layers))
    away = _seconds(step_time(replace(work, machine=work.machine.with_(node=1.0)), layers))
    link = candidate.device.link.name if candidate.device.link else "the network"
    strides = {"tp": 1, "cp": parallel.tp, "ep": parallel.tp, "dp": parallel.tp * parallel.cp}
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "ep")}
    sizes["dp"] = parallel.dp_replicate * parallel.dp_shard
    sentences = []
    for axis, (part, name) in _AXES.items():
        if sizes[axis] == 1:
            continue
        if axis == "dp" and parallel.zero == 3:
            part = "gather"  # whose reductions are among its exchanges
        inside = min(sizes[axis], max(1, node // strides[axis]))
        every = "both" if sizes[axis] == 2 else f"all {sizes[axis]}"
        where = f"{every} ranks of {axis} lie in one node of {node} ({link})"
        if inside < sizes[axis]:
            where = f"{sizes[axis]} ranks of {axis} go over the network, {inside} of them in each node of {node}"
        lost = away[part] - here[part]
        cost = f"{name} takes {here[part]:.2f} s of the step that nothing hides"
        if lost > 0.005:
            cost += f", and would take {away[part]:.2f} s if each rank were in a node of its own"
        sentences.append(f"{where}: {cost}")
    if parallel.pp > 1:
        crosses = parallel.tp * parallel.cp * sizes["dp"] >= node
        where = "lie in different nodes" if crosses else f"lie in one node of {node} ({link})"
        sentences.append(
            f"neighbouring stages of pp {where}: sends take {winner.prediction.parts['sends']:.2f} s of the step"
        )
    return sentences


def _seconds(times: StepTime) -> dict[str, float]:
    return {item.name: float(np.asarray(getattr(times, item.name))) for item in fields(StepTime)}


def _partition(winner: Found) -> list[str]:
    if winner.default_seconds is None:
        return []
    counts = winner.candidate.parallel.pp_partition
    saved = winner.default_seconds - winner.prediction.step_seconds
    return [
        f"layers are placed by the seconds that they and the head take here ({counts}): {saved * 1e3:.0f} ms a step "
        f"({saved / winner.default_seconds:.1%}) less than pp_partition=auto, which balances FLOPs"
    ]


def _neighbours(search: Search) -> list[str]:
    return [f"{each.change}: {each.why}" for each in search.neighbours if each.verdict != "refused"]


def _counts(search: Search) -> str:
    text = (
        f"{search.evaluated:,} layouts by closed form, {search.fitting:,} of them fit, {search.simulated:,} simulated "
        f"or predicted in full, in {search.seconds:.1f} s"
    )
    left = "; ".join(f"{number:,} {reason}" for reason, number in search.left_out.items())
    return f"{text}; of all layouts, not looked at further: {left}" if left else text


def _missing(nearest: Nearest) -> list[str]:
    sentences = []
    if (smallest := nearest.smallest) is not None:
        held = smallest.prediction
        sentences.append(
            f"nothing fits; the smallest change that does: {smallest.change} ({_degrees(smallest.candidate)}, "
            f"{held.memory / 1e9:.1f} of {held.memory_limit / 1e9:.1f} GB)"
        )
    else:
        sentences.append("nothing fits, and no single change is enough")
    for attempt in nearest.attempts:
        if not attempt.fits:
            largest = _largest(attempt.prediction)
            sentences.append(
                f"{attempt.change}: {attempt.short_by / 1e9:.1f} GB short with {_degrees(attempt.candidate)}; {largest}"
            )
    return sentences


def _largest(prediction: Prediction) -> str:
    held = sorted(prediction.bytes.items(), key=lambda item: -item[1])[:3]
    return "most of it " + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in held)


def _degrees(candidate: Candidate) -> str:
    parallel = candidate.parallel
    keys = ("tp", "cp", "pp", "ep", "dp_replicate", "dp_shard")
    parts = [f"{key}={getattr(parallel, key)}" for key in keys if getattr(parallel, key) > 1]
    parts += [f"zero={parallel.zero}"] if parallel.zero else []
    parts += [f"micro_batch={candidate.micro_batch}", f"recompute={candidate.recompute}"]
    return " ".join(parts)
