"""Layouts on the command line: `tp=8,pp=4,zero=1,micro_batch=1`, in the keys of a run description.

The keys are those of `parallel`, and `micro_batch` and `recompute` of `train`; their full names (`parallel.tp`) are
read too. Values are checked by the very rules of the configuration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modelworks.config import ConfigError, ParallelConfig, UserError, dump_yaml, nearest, parse_run_config, show_value
from modelworks.layout import layout_problems
from modelworks.plan.job import OF_TRAIN
from modelworks.plan.layout_keys import LAYOUT_KEYS

if TYPE_CHECKING:
    from modelworks.config import RunConfig

_COMMA = re.compile(r",(?![^\[]*\])")  # not inside a list
_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


def read_layout(text: str, flag: str) -> dict[str, str]:
    """Key -> value, both as written. Raises UserError for what is no list of known keys with values."""
    values: dict[str, str] = {}
    for part in filter(None, map(str.strip, _COMMA.split(text))):
        written, equals, value = (word.strip() for word in part.partition("="))
        section, _, key = written.rpartition(".")
        if not equals or not value:
            raise UserError(f"{flag}: got {part!r}, expected key=value, such as tp=8,pp=4")
        if key not in LAYOUT_KEYS or section not in ("", _section(key)):
            close = nearest(key, LAYOUT_KEYS)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(LAYOUT_KEYS)}"
            raise UserError(f"{flag}: no key of a layout is called {written!r}; {hint}")
        if key in values:
            raise UserError(f"{flag}: {key} is given twice")
        values[key] = value
    if not values:
        raise UserError(f"{flag}: got {show_value(text)}, expected key=value, such as tp=8,pp=4")
    return values


def with_values(run: RunConfig, values: Mapping[str, object], flag: str) -> RunConfig:
    """The run with these dotted keys changed. Raises UserError in one line for what the configuration refuses."""
    overrides = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    try:
        return parse_run_config(dump_yaml(run), flag, overrides)
    except ConfigError as error:
        raise UserError(f"{flag}: " + "; ".join(_without_section(str(each)) for each in error.problems)) from None


def with_layout(run: RunConfig, text: str, n_devices: int | None, flag: str = "--layout") -> RunConfig:
    """The run with this layout in place of its own: keys that are left out have their defaults.

    Raises UserError where it is incomplete, is not of `n_devices` ranks (where that is known), or nothing could run it.
    """
    written = read_layout(text, flag)
    defaults = {f"parallel.{key}": value for key, value in ParallelConfig() if key in LAYOUT_KEYS}
    defaults |= {"train.micro_batch": "auto", "train.recompute": "none"}
    values = {f"{_section(key)}.{key}": value for key, value in written.items()}
    changed = with_values(run, {**defaults, **values}, flag)
    parallel = changed.parallel
    ranks = math.prod(getattr(parallel, axis) for axis in _AXES)
    if n_devices is not None and ranks != n_devices:
        hint = _fill(parallel, ranks, n_devices)
        raise UserError(f"{flag}: {text} is for {ranks:,} GPUs, expected {n_devices:,}{hint}")
    if problems := list(layout_problems(changed)):
        raise UserError(f"{flag}: " + "; ".join(_without_section(problem) for problem in problems))
    if changed.train.micro_batch == "auto":
        rows = run.train.global_batch // (parallel.dp_replicate * parallel.dp_shard)
        raise UserError(f"{flag}: micro_batch is missing, expected a divisor of the {rows:,} rows of a rank, such as 1")
    return changed


def fixed_values(run: RunConfig, written: Mapping[str, str], flag: str) -> dict[str, Any]:
    """What was written, as the configuration reads it. Raises UserError."""
    if "auto" in (written.get("micro_batch"), written.get("pp_partition")):
        raise UserError(f"{flag}: auto fixes nothing, expected a value (or leave the key out)")
    changed = with_values(run, {f"{_section(key)}.{key}": value for key, value in written.items()}, flag)
    return {key: getattr(changed.train if key in OF_TRAIN else changed.parallel, key) for key in written}


def check_constraints(run: RunConfig, fixed: Mapping[str, Any], n_devices: int, flag: str = "--fix") -> None:
    """Raise UserError where no layout of `n_devices` can have these values together."""
    axes = {key: value for key, value in fixed.items() if key in _AXES}
    ranks = math.prod(axes.values())
    if n_devices % ranks:
        names = " * ".join(axes)
        raise UserError(f"{flag}: {names} = {ranks:,} does not divide {n_devices:,} GPUs")
    if fixed.get("dp_shard") == 1 and fixed.get("zero", 0) > 0:
        raise UserError(f"{flag}: zero={fixed['zero']} shards over dp_shard ranks, expected dp_shard above 1 beside it")
    rows = math.prod(fixed.get(key, 1) for key in ("dp_replicate", "dp_shard", "micro_batch"))
    if run.train.global_batch % rows:
        names = " * ".join(key for key in ("dp_replicate", "dp_shard", "micro_batch") if key in fixed)
        raise UserError(f"{flag}: {names} = {rows:,} does not divide a global batch of {run.train.global_batch:,} rows")
    if problems := _contradictions(run, fixed, n_devices):
        raise UserError(f"{flag}: " + "; ".join(_without_section(problem) for problem in problems))


def _contradictions(run: RunConfig, fixed: Mapping[str, Any], n_devices: int) -> list[str]:
    """What the rules for layouts say of one that has these values, the rest left as free as can be."""
    changes = {key: value for key, value in fixed.items() if key not in OF_TRAIN}
    free = n_devices // math.prod(changes.get(axis, 1) for axis in _AXES)
    if "pp" not in changes:
        if "pp_partition" in changes or free == 1:  # for a number of stages that is not known yet, or for none
            changes = {key: value for key, value in changes.items() if not key.startswith("pp_")}
        elif any(key.startswith("pp_") for key in changes):
            changes["pp"] = next(degree for degree in range(2, free + 1) if free % degree == 0)
            free //= changes["pp"]
    if changes.get("pp_schedule", "").startswith("interleaved"):
        changes.setdefault("pp_virtual", 2)
    elif "pp_virtual" in changes and "pp_schedule" not in changes and changes["pp_virtual"] > 1:
        changes["pp_schedule"] = "interleaved"
    if not {"dp_replicate", "dp_shard"} & changes.keys():
        changes["dp_replicate"] = free
    trial = run.model_copy(update={"parallel": ParallelConfig(**changes)})
    shared = (
        "train.global_batch",
        "train.batch_ramp",
        "train.micro_batch",
        "parallel.zero",
    )  # depend on what is still free
    return [problem for problem in layout_problems(trial) if not problem.startswith(shared)]


def _section(key: str) -> str:
    return "train" if key in OF_TRAIN else "parallel"


def _without_section(problem: str) -> str:
    return problem.removeprefix("parallel.").removeprefix("train.")


def _fill(parallel: ParallelConfig, ranks: int, n_devices: int) -> str:
    """The data-parallel degree that would make it so many, where one would."""
    if n_devices % ranks or n_devices < ranks:
        return ""
    times = n_devices // ranks
    if parallel.dp_shard > 1:
        return f" (dp_shard={parallel.dp_shard * times} would make them)"
    return f" (dp_replicate={parallel.dp_replicate * times}, or dp_shard={times},zero=1, would make them)"
