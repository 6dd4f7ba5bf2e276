"""Layouts one step from the winner: one key changed, the others as they are, and what speaks against each.

A degree is doubled or halved at the cost of the data-parallel ranks, so that the number of devices stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from modelworks.config import ParallelConfig, UserError
from modelworks.layout import layout_problems
from modelworks.plan.candidate import Candidate, Prediction, evaluate
from modelworks.plan.constants import Constants
from modelworks.plan.found import TIE, Found, Neighbour
from modelworks.plan.job import OF_TRAIN, Job, Limits
from modelworks.plan.spaces import candidate_of, complexity


class Step(NamedTuple):
    """A change in words, and the keys that it sets."""

    change: str
    keys: dict[str, Any]


def neighbours_of(best: Found, job: Job, limits: Limits, constants: Constants) -> list[Neighbour]:
    """Those that the limits allow: ties first, then slower ones, then what does not fit or is refused."""
    found = []
    for step in steps_from(best.candidate):
        fixed = [key for key in step.keys if key in limits.fixed and limits.fixed[key] != step.keys[key]]
        if fixed or step.keys.get("tp", 0) > (limits.max_tp or 2**62):
            continue
        found.append(_compare(step, best, job, limits, constants))
    order = ("faster", "tie", "slower", "does not fit", "refused")
    return sorted(found, key=lambda each: (order.index(each.verdict), _seconds(each)))


def _seconds(neighbour: Neighbour) -> float:
    return neighbour.prediction.step_seconds if neighbour.prediction else 0.0


def _compare(step: Step, best: Found, job: Job, limits: Limits, constants: Constants) -> Neighbour:
    train = {key: value for key, value in step.keys.items() if key in OF_TRAIN}
    parallel = best.candidate.parallel.model_copy(
        update={key: value for key, value in step.keys.items() if key not in OF_TRAIN}
    )
    micro_batch = train.get("micro_batch", best.candidate.micro_batch)
    recompute = train.get("recompute", best.candidate.recompute)
    config = job.run_config()
    run = config.model_copy(
        update={
            "parallel": parallel,
            "train": config.train.model_copy(update={"micro_batch": micro_batch, "recompute": recompute}),
        }
    )
    if problems := list(layout_problems(run)):
        return Neighbour(step.change, "refused", f"the trainer refuses it: {problems[0]}")
    candidate = candidate_of(job, parallel, micro_batch, recompute)
    try:
        prediction = evaluate(candidate, constants, headroom=limits.headroom, timeline=False)
    except UserError as error:
        return Neighbour(step.change, "refused", f"the trainer refuses it: {error}", candidate)
    if not prediction.fits:
        return Neighbour(step.change, "does not fit", misfit(prediction, best.prediction), candidate, prediction)
    ratio = prediction.step_seconds / best.prediction.step_seconds
    verdict, why = "slower", slower(prediction, best.prediction)
    if ratio <= 1.0 + TIE:
        verdict = "tie" if ratio >= 1.0 - TIE else "faster"
        why = f"{_signed(prediction.step_seconds - best.prediction.step_seconds)} a step ({ratio - 1.0:+.1%}): "
        why += _near(candidate, best) if verdict == "tie" else "not looked at by the search"
    return Neighbour(step.change, verdict, why, candidate, prediction)  # type: ignore[arg-type]


def _near(candidate: Candidate, best: Found) -> str:
    if complexity(candidate) > complexity(best.candidate):
        return f"within the {TIE:.0%} that are not told apart, decided for the simpler layout"
    return f"within the {TIE:.0%} that are not told apart, and as good a choice"


def misfit(prediction: Prediction, other: Prediction) -> str:
    """Which rank holds too much, by how much, of what; and what grew against another layout."""
    totals = [sum(each.values()) for each in prediction.bytes_by_stage]
    rank = totals.index(max(totals))
    over = totals[rank] - prediction.memory_limit
    held = sorted(prediction.bytes_by_stage[rank].items(), key=lambda item: -item[1])
    place = f"rank {rank + 1} of {len(totals)} along the pipeline" if len(totals) > 1 else "every rank"
    text = (
        f"{place} needs {totals[rank] / 1e9:.1f} GB, {over / 1e9:.1f} GB more than the "
        f"{prediction.memory_limit / 1e9:.1f} GB there are; most of it {held[0][0]} {held[0][1] / 1e9:.1f} GB"
    )
    grown = {name: size - other.bytes.get(name, 0.0) for name, size in prediction.bytes_by_stage[rank].items()}
    name = max(grown, key=lambda key: grown[key])
    return f"{text}; {name} grew by {grown[name] / 1e9:.1f} GB" if grown[name] > 0 else text


def slower(prediction: Prediction, best: Prediction) -> str:
    """By how much, and by which causes."""
    seconds = prediction.step_seconds - best.step_seconds
    change = {name: prediction.parts[name] - best.parts[name] for name in prediction.parts}
    causes = sorted((name for name in change if change[name] > 0.05 * seconds), key=lambda name: -change[name])
    named = ", ".join(f"{NAMES[name]} {_signed(change[name])}" for name in causes[:3])
    less = min(change, key=lambda name: change[name])
    saved = f", though {NAMES[less]} {_signed(change[less])}" if change[less] < -0.05 * seconds else ""
    return f"{_signed(seconds)} a step ({seconds / best.step_seconds:+.0%}): {named}{saved}"


NAMES = {
    "linear": "matrix products",
    "attention": "attention",
    "elementwise": "what lies between the products",
    "head": "the head",
    "recompute": "recomputing",
    "tensor": "tensor-parallel exchanges",
    "context": "context-parallel exchanges",
    "experts": "exchanges with experts",
    "gather": "gathering ZeRO-3's parameters",
    "idle": "waiting in the pipeline",
    "sends": "sends between stages",
    "data": "reducing gradients",
    "optimizer": "the optimiser",
    "overhead": "what lies outside",
}


def _signed(seconds: float) -> str:
    return f"{seconds:+.2f} s" if abs(seconds) >= 1.0 else f"{seconds * 1e3:+.0f} ms"


def steps_from(candidate: Candidate) -> Iterator[Step]:
    """Each key of a layout one step up and one down."""
    parallel = candidate.parallel
    for axis in ("tp", "cp", "pp"):
        now = getattr(parallel, axis)
        for value in (now * 2, now // 2 if now % 2 == 0 else 0):
            if value and (keys := _traded(parallel, axis, value)):
                yield Step(f"{axis}={value} instead of {now}", keys)
    yield from _data_steps(parallel)
    yield from _pipeline_steps(parallel)
    if candidate.model.n_experts:
        for value in (parallel.ep * 2, parallel.ep // 2 if parallel.ep % 2 == 0 else 0):
            if value:
                yield Step(f"ep={value} instead of {parallel.ep}", {"ep": value})
    rows = candidate.global_batch // (parallel.dp_replicate * parallel.dp_shard)
    for rows_now in (candidate.micro_batch * 2, candidate.micro_batch // 2 if candidate.micro_batch % 2 == 0 else 0):
        if rows_now and rows % rows_now == 0:
            change = f"micro_batch={rows_now} instead of {candidate.micro_batch}"
            yield Step(change, {"micro_batch": rows_now})
    for mode in ("none", "selective", "full"):
        if mode != candidate.recompute:
            yield Step(f"recompute={mode} instead of {candidate.recompute}", {"recompute": mode})
    if parallel.tp > 1:
        wanted = not parallel.sequence_parallel
        yield Step(f"sequence_parallel={str(wanted).lower()}", {"sequence_parallel": wanted})
    if parallel.offload == "none":
        yield Step("offload=cpu", {"offload": "cpu"})


def _data_steps(parallel: ParallelConfig) -> Iterator[Step]:
    for zero in (parallel.zero - 1, parallel.zero + 1):
        if parallel.dp_shard > 1 and 1 <= zero <= 3:
            gather = {} if zero == 3 else {"pp_gather": "step"}
            yield Step(f"zero={zero} instead of {parallel.zero}", {"zero": zero, **gather})
    if parallel.dp_shard > 1:
        everywhere = {"dp_replicate": parallel.dp_replicate * parallel.dp_shard, "dp_shard": 1, "zero": 0}
        yield Step("zero=0: whole copies on every rank", {**everywhere, "pp_gather": "step"})
    if parallel.dp_shard % 2 == 0:
        shard = parallel.dp_shard // 2
        keys = {"dp_shard": shard, "dp_replicate": parallel.dp_replicate * 2, "zero": parallel.zero if shard > 1 else 0}
        yield Step(f"dp_replicate={keys['dp_replicate']} and dp_shard={shard}", keys)
    if parallel.dp_replicate % 2 == 0:
        keys = {"dp_replicate": parallel.dp_replicate // 2, "dp_shard": parallel.dp_shard * 2}
        change = f"dp_replicate={keys['dp_replicate']} and dp_shard={keys['dp_shard']}"
        yield Step(change, {**keys, "zero": max(parallel.zero, 1)})
    if parallel.zero >= 2:
        other = "last" if parallel.accumulate_reduce == "every" else "every"
        yield Step(f"accumulate_reduce={other}", {"accumulate_reduce": other})


def _pipeline_steps(parallel: ParallelConfig) -> Iterator[Step]:
    if parallel.pp == 1:
        return
    if parallel.pp_partition != "auto":
        yield Step("pp_partition=auto", {"pp_partition": "auto"})
    now = parallel.pp_schedule
    for schedule, virtual in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 1)):
        if schedule != now:
            stages = parallel.pp_virtual if virtual > 1 and parallel.pp_virtual > 1 else virtual
            change = f"pp_schedule={schedule}" + (f" with pp_virtual={stages}" if stages > 1 else "")
            keys = {"pp_schedule": schedule, "pp_virtual": stages, "pp_partition": "auto"}
            yield Step(f"{change} instead of {now}", keys)
    if now in ("interleaved", "interleaved-zb"):
        for stages in (parallel.pp_virtual * 2, parallel.pp_virtual // 2):
            if stages > 1:
                keys = {"pp_virtual": stages, "pp_partition": "auto"}
                yield Step(f"pp_virtual={stages} instead of {parallel.pp_virtual}", keys)
    if parallel.zero == 3:
        other = "step" if parallel.pp_gather == "micro-batch" else "micro-batch"
        yield Step(f"pp_gather={other}", {"pp_gather": other})


def _traded(parallel: ParallelConfig, axis: str, value: int) -> dict[str, Any]:
    """The keys of `axis` doubled or halved, data-parallel ranks paying for it; none where they cannot."""
    keys: dict[str, Any] = {axis: value}
    shard, replicate = parallel.dp_shard, parallel.dp_replicate
    if value > getattr(parallel, axis):
        if shard % 2 == 0:
            shard //= 2
        elif replicate % 2 == 0:
            replicate //= 2
        else:
            return {}
    elif parallel.zero:
        shard *= 2
    else:
        replicate *= 2
    keys |= {"dp_shard": shard, "dp_replicate": replicate, "zero": (parallel.zero or 1) if shard > 1 else 0}
    if axis == "pp":
        keys |= {"pp_partition": "auto"}
        if value == 1:
            keys |= {"pp_schedule": "1f1b", "pp_virtual": 1, "pp_gather": "step"}
    return keys
