"""The whole answer of `modelworks plan`: the search or the one layout, and what they mean for the run.

Everything ends up in one object of plain values; what is printed and what is drawn is made from it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelworks.cli.plan_failures import failures_answer
from modelworks.cli.plan_request import read_hyper
from modelworks.config import HELD_STATES, UserError, count_parameters, nearest
from modelworks.layout import Layout
from modelworks.plan import Candidate, Found, Limits, evaluate, search
from modelworks.plan.answer import (
    details_answer,
    hyper_answer,
    job_answer,
    layout_answer,
    neighbours_answer,
    nothing_fits_answer,
    price_answer,
    run_answer,
    search_answer,
)
from modelworks.plan.emit import TARGETS, check_device, emit, refusals
from modelworks.plan.explain import explain
from modelworks.plan.frameworks import FRAMEWORKS, JobFacts, frameworks_for
from modelworks.plan.job import HEADROOM, OF_PARALLEL
from modelworks.plan.layout_keys import layout_text
from modelworks.plan.ramp import ramp_stages, rollback_bytes

if TYPE_CHECKING:
    from modelworks.cli.plan_request import Asked, Request
    from modelworks.hardware import Device
    from modelworks.plan import Search

MEMORY_ERROR = 0.06  # mean error of memory on published measurements (benchmarks/plan_accuracy.py)


@dataclass(frozen=True)
class Answered:
    """values: the object. ranked: its layouts as runs on paper, the best first; none where nothing fits."""

    values: dict[str, Any]
    ranked: list[Found]


def answer_request(request: Request) -> Answered:
    """Search, or predict the one layout that was asked for. Raises UserError where the trainer accepts no layout."""
    limits, found = request.limits, None
    if request.candidate is not None:
        ranked = [Found(request.candidate, evaluate(request.candidate, headroom=limits.headroom))]
    else:
        found = search(request.job, limits)
        ranked = found.best
    return Answered(_values(request, found, ranked), ranked)


def answer_hyper(asked: Asked) -> dict[str, Any]:
    """Where settings could start, for a model without devices to plan for. Raises UserError."""
    run, hyper = read_hyper(asked)
    job = {"model": asked.model, "parameters": count_parameters(run.model).total}
    return {"job": job, "layouts": [], "winner": None, "hyper": hyper_answer(hyper)}


def check_target(target: str, device: Device | None = None) -> None:
    """Raises UserError for a name that `write_files` does not know, and for devices that nothing of it runs on."""
    if target not in TARGETS:
        close = nearest(target, TARGETS)
        hint = f" (did you mean {close}?)" if close else ""
        raise UserError(f"--emit: got {target}, expected one of {', '.join(TARGETS)}{hint}")
    if device is not None:
        try:
            check_device(target, device)
        except UserError as error:
            raise UserError(f"--emit: {error}") from None


def write_files(target: str, directory: Path, answered: Answered, request: Request) -> dict[str, Any]:
    """Files that run the best layout that `target` can express. Raises UserError where it can express none."""
    passed_over: list[str] = []
    many = len(answered.ranked)
    for place, each in enumerate(answered.ranked, 1):
        if reasons := refusals(target, each.candidate, request.run):
            passed_over += reasons
            continue
        paths = emit(target, each.candidate, directory, run=request.run)
        return {
            "target": target,
            "place": place,
            "layout": layout_text(each.candidate),
            "files": [str(path) for path in paths],
            "passed_over": passed_over,
        }
    if many > 1:
        raise UserError(
            f"--emit: none of the {many} best layouts is for {target}; keep the search to what it can run with --fix: "
            f"{passed_over[0]}"
        )
    raise UserError(f"--emit: {passed_over[0] if passed_over else 'nothing fits, so nothing is written'}")


def _values(request: Request, found: Search | None, ranked: list[Found]) -> dict[str, Any]:
    job, limits = request.job, request.limits
    price, price_values = price_answer(job, request.price)

    def layout(each: Found) -> dict[str, Any]:
        return layout_answer(each.candidate, each.prediction, price=price)

    values: dict[str, Any] = {
        "job": job_answer(job, request.name),
        "assumed": request.assumed,
        "limits": {"fixed": dict(limits.fixed), "max_tp": limits.max_tp, "memory_headroom": limits.headroom},
        "layouts": [layout(each) for each in ranked],
        "winner": None,
        "explanation": _explanation(found) if found else [],
        "neighbours": neighbours_answer(found) if found else [],
        "nothing_fits": nothing_fits_answer(found) if found else None,
        "goals": {name: layout(each) for name, each in found.goals.items()} if found else {},
        "own": _own(request, layout) if found else None,
        "search": search_answer(found) if found else None,
        "price": price_values,
        "run": None,
        "ramp": [],
        "rollback": None,
        "reliability": None,
        "frameworks": [],
        "hyper": hyper_answer(request.hyper) if request.hyper else None,
    }
    if ranked:
        best = Found(ranked[0].candidate, evaluate(ranked[0].candidate, headroom=limits.headroom))  # with its timeline
        values["explanation"][2:2] = _tight(best, limits.headroom)  # beside what binds
        values["winner"] = {**layout(best), **details_answer(best.prediction)}
        batches = request.run.batches
        stages = ramp_stages(batches, best.candidate)
        values["ramp"] = [asdict(stage) for stage in stages]
        if request.tokens:
            values["run"] = run_answer(job, best.prediction, request.tokens, price, batches, stages)
        health = request.run.health
        if health.spikes == "rollback" and health.rollback_from != "disk":
            values["rollback"] = {"states": HELD_STATES, "host_memory_bytes": rollback_bytes(best.candidate)}
        values["reliability"] = failures_answer(best, request.failures)
        values["frameworks"] = _frameworks(best.candidate)
    return values


def _explanation(found: Search) -> list[str]:
    """Without what it says of the neighbours, which have a table of their own."""
    changes = tuple(f"{each.change}: " for each in found.neighbours)
    return [text for text in explain(found) if not text.startswith(changes)]


def _tight(best: Found, headroom: float) -> list[str]:
    """Said where less is left free than usual, and a prediction that is off by no more than usual would not fit."""
    left = 1.0 - best.prediction.memory * (1.0 - headroom) / best.prediction.memory_limit
    if headroom >= HEADROOM or not 0.0 <= left < MEMORY_ERROR:
        return []
    return [
        f"tight: {left:.1%} of the memory is left, and predictions of it are {MEMORY_ERROR:.0%} off in the mean; "
        f"--memory-headroom {MEMORY_ERROR:.0%} leaves that much free"
    ]


def _own(request: Request, layout: Callable[[Found], dict[str, Any]]) -> dict[str, Any] | None:
    """The layout that CONFIG asks for, the best micro-batch where it says auto, or the least where none fits. None
    where it is for another number of devices than was asked for."""
    run, job = request.run, request.job
    if not request.has_layout or Layout.of(run.parallel).world_size != job.n_devices:
        return None
    fixed = {key: getattr(run.parallel, key) for key in OF_PARALLEL} | {"recompute": run.train.recompute}
    if run.train.micro_batch != "auto":
        fixed["micro_batch"] = run.train.micro_batch
    found = search(job, Limits(fixed=fixed, headroom=request.limits.headroom), top=1)
    if found.best:
        return layout(found.best[0])
    if found.nothing_fits is None or not found.nothing_fits.attempts:
        return None
    asked = found.nothing_fits.attempts[0]
    return layout(Found(asked.candidate, asked.prediction))


def _frameworks(candidate: Candidate) -> list[dict[str, Any]]:
    """Which programs could run it, the first choice first; none for devices that no advice is known for."""
    vendor = candidate.device.vendor
    if vendor is None or not any(vendor in each.vendors for each in FRAMEWORKS):
        return []
    parallel = candidate.parallel
    facts = JobFacts(
        task="pretraining",
        parameters=count_parameters(candidate.model).total,
        n_devices=candidate.n_devices,
        vendor=vendor,
        axes=frozenset(axis for axis in ("tp", "pp", "cp", "ep") if getattr(parallel, axis) > 1),
        experts=candidate.model.n_experts > 0,
        offload=parallel.offload,
    )
    return [asdict(each) for each in frameworks_for(facts)]
