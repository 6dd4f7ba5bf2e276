"""The whole answer of `modelworks plan`: the search or the one layout, and what they mean for the run.

Everything ends up in one object of plain values; what is printed and what is drawn is made from it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelworks.cli.plan_request import read_hyper
from modelworks.config import UserError, count_parameters, nearest
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
from modelworks.plan.emit import TARGETS, emit, refusals
from modelworks.plan.explain import explain
from modelworks.plan.frameworks import FRAMEWORKS, JobFacts, frameworks_for
from modelworks.plan.job import OF_PARALLEL
from modelworks.plan.layout_keys import layout_text
from modelworks.plan.reliability import reliability

if TYPE_CHECKING:
    from modelworks.cli.plan_request import Asked, Request
    from modelworks.plan import Search

# What reliability is computed with, as no run is there yet that could tell.
COPY_BYTES_PER_SECOND = 10e9  # of one device, to its host: training stands still meanwhile
WRITE_BYTES_PER_SECOND = 1e9  # of one device, to storage: training goes on meanwhile
RESTART_SECONDS = 600.0  # noticing a failure, replacing the node, starting, loading
FEWEST_DEVICES = 16  # below it failures are so rare that there is nothing to plan


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


def check_target(target: str) -> None:
    """Raises UserError for a name that `write_files` does not know."""
    if target not in TARGETS:
        close = nearest(target, TARGETS)
        hint = f" (did you mean {close}?)" if close else ""
        raise UserError(f"--emit: got {target}, expected one of {', '.join(TARGETS)}{hint}")


def write_files(target: str, directory: Path, answered: Answered, request: Request) -> dict[str, Any]:
    """Files that run the best layout that `target` can express. Raises UserError where it can express none."""
    passed_over: list[str] = []
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
    raise UserError(f"--emit: {passed_over[0] if passed_over else 'nothing fits, so nothing is written'}")


def _values(request: Request, found: Search | None, ranked: list[Found]) -> dict[str, Any]:
    job, limits = request.job, request.limits
    price, price_values = price_answer(job, request.price)
    hourly = None if price is None else price.per_device_hour

    def layout(each: Found) -> dict[str, Any]:
        return layout_answer(each.candidate, each.prediction, price=hourly)

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
        "reliability": None,
        "frameworks": [],
        "hyper": hyper_answer(request.hyper) if request.hyper else None,
    }
    if ranked:
        best = Found(ranked[0].candidate, evaluate(ranked[0].candidate, headroom=limits.headroom))  # with its timeline
        values["winner"] = {**layout(best), **details_answer(best.prediction)}
        values["run"] = run_answer(job, best.prediction, request.tokens, price) if request.tokens else None
        values["reliability"] = _reliability(best)
        values["frameworks"] = _frameworks(best.candidate)
    return values


def _explanation(found: Search) -> list[str]:
    """Without what it says of the neighbours, which have a table of their own."""
    changes = tuple(f"{each.change}: " for each in found.neighbours)
    return [text for text in explain(found) if not text.startswith(changes)]


def _own(request: Request, layout: Callable[[Found], dict[str, Any]]) -> dict[str, Any] | None:
    """The layout that CONFIG asks for, the best micro-batch where it says auto. None where it does not fit, or is for
    another number of devices than was asked for."""
    run, job = request.run, request.job
    if not request.has_layout or Layout.of(run.parallel).world_size != job.n_devices:
        return None
    fixed = {key: getattr(run.parallel, key) for key in OF_PARALLEL} | {"recompute": run.train.recompute}
    if run.train.micro_batch != "auto":
        fixed["micro_batch"] = run.train.micro_batch
    found = search(job, Limits(fixed=fixed, headroom=request.limits.headroom), top=1)
    return layout(found.best[0]) if found.best else None


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


def _reliability(best: Found) -> dict[str, Any] | None:
    """What failures cost a long run, how often to save. None for few devices."""
    candidate, prediction = best.candidate, best.prediction
    if candidate.n_devices < FEWEST_DEVICES:
        return None
    parallel = candidate.parallel
    everywhere = parallel.dp_replicate * parallel.dp_shard * parallel.cp  # ranks with the same parameters: one saves
    of_parameters = parallel.dp_replicate if parallel.zero == 3 else everywhere
    of_optimizer = parallel.dp_replicate if parallel.zero >= 1 else everywhere
    saved = max(held.parameters / of_parameters + held.optimizer / of_optimizer for held in prediction.by_stage)
    save, write = max(saved / COPY_BYTES_PER_SECOND, 1e-3), max(saved / WRITE_BYTES_PER_SECOND, 1e-3)
    found = reliability(candidate.n_devices, save, RESTART_SECONDS, write_seconds=write)
    return {
        "mean_hours_between_failures": found.mean_hours_between_failures,
        "save_every_seconds": found.save_every_seconds,
        "save_every_steps": max(1, round(found.save_every_seconds / prediction.step_seconds)),
        "goodput": found.goodput,
        "goodput_low": found.goodput_range[0],
        "goodput_high": found.goodput_range[1],
        "saved_bytes_per_gpu": saved,
        "save_seconds": save,
        "write_seconds": write,
        "restart_seconds": RESTART_SECONDS,
        "reasons": found.reasons,
    }
