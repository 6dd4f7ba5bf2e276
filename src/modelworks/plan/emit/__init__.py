"""Files that run a layout: in this trainer, and in other people's.

    paths = emit("torchtitan", candidate, Path("there"))     the files, with launch.sh and slurm.sh
    read_back("torchtitan", Path("there"))                   what they say, in the config's own keys

Invariant: what is written reads back to what was wanted, key by key; anything else is refused with a `UserError`
before a file is left. Each target is one module with `refusals`, `files`, `program` and `read`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from modelworks.config import RunConfig, UserError, nearest, show_value
from modelworks.hardware import Device
from modelworks.plan.candidate import Candidate
from modelworks.plan.emit import to_deepspeed, to_fsdp, to_megatron, to_modelworks, to_torchtitan
from modelworks.plan.emit.launch import LAUNCH, Nodes, plain, scripts
from modelworks.plan.emit.settings import OFF, Wanted, effective
from modelworks.plan.frameworks import runs_on
from modelworks.plan.layout_keys import layout_text

__all__ = ["TARGETS", "check_device", "emit", "read_back", "refusals"]

_TARGETS: dict[str, ModuleType] = {
    "modelworks": to_modelworks,
    "torchtitan": to_torchtitan,
    "megatron": to_megatron,
    "deepspeed": to_deepspeed,
    "fsdp": to_fsdp,
}
TARGETS = tuple(_TARGETS)
MARK = "Written by modelworks"


def emit(target: str, candidate: Candidate, out: Path, *, run: RunConfig | None = None) -> list[Path]:
    """Write the files that run `candidate` with `target` into the directory `out`, and answer their paths.

    run: the run that the layout belongs to, for what a layout does not say (optimiser, schedule, length); by default
    one of defaults. Raises UserError for an unknown target, for what the target cannot express, and where `out` holds
    another file under a name that would be written.
    """
    module = _module(target)
    check_device(target, candidate.device)
    wanted, nodes = Wanted.of(candidate, run), Nodes.of(candidate.device, candidate.n_devices)
    if reasons := _refusals(target, wanted):
        raise UserError(f"{target} cannot run this layout: " + "; ".join(reasons))
    texts = _texts(module, wanted, nodes)
    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch), texts)
        if lost := _lost(wanted, read_back(target, Path(scratch))):
            raise UserError(f"{target} cannot express: " + "; ".join(lost))
    return _place(texts, out)


def refusals(target: str, candidate: Candidate, run: RunConfig | None = None) -> list[str]:
    """What stands in the way of writing this layout for this target, each with a way out; empty where nothing does."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            emit(target, candidate, Path(scratch), run=run)
    except UserError as error:
        return [str(error)]
    return []


def check_device(target: str, device: Device) -> None:
    """Raise UserError where what the scripts start does not run on such devices, by its own word."""
    _module(target)
    known = runs_on(target)
    if device.vendor is not None and device.vendor not in known:
        raise UserError(
            f"{target} runs on {', '.join(known)}, by its own word, not on {plain(device.name)} ({device.vendor})"
        )


def read_back(target: str, directory: Path) -> dict[str, Any]:
    """What the files of `target` in `directory` say, in the config's own keys: those that have an effect.

    Durations are in steps. Raises UserError where a file is missing.
    """
    module = _module(target)
    try:
        return effective(OFF | module.read(directory))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file; {target} is read from what `--emit {target}` wrote") from None


def _module(target: str) -> ModuleType:
    if target not in _TARGETS:
        close = nearest(target, TARGETS)
        hint = f"; did you mean {close}?" if close else ""
        raise UserError(f"no target is called {plain(target)!r}, expected one of {', '.join(TARGETS)}{hint}")
    return _TARGETS[target]


def _refusals(target: str, wanted: Wanted) -> list[str]:
    reasons: list[str] = _TARGETS[target].refusals(wanted)
    if target == "modelworks":
        return reasons
    if wanted["init_from"] is not None:
        reasons.append("init_from: weights are not carried over; export them with `modelworks convert`")
    if wanted.config.train.batch_ramp is not None:
        reasons.append("train.batch_ramp: ramps are not written for other programs; set it to null, and add theirs")
    if wanted["model.mup_base_width"] is not None:
        reasons.append(
            "model.mup_base_width: rates and initial values of µP are not written; use the target modelworks"
        )
    rows = wanted["parallel.dp_replicate"] * wanted["parallel.dp_shard"] * wanted["train.micro_batch"]
    if wanted["train.global_batch"] % rows:
        reasons.append(
            f"train.micro_batch: {rows} rows at a time do not divide a global batch of {wanted['train.global_batch']}, "
            "and its micro-batches are all of one size"
        )
    durations = ("train.duration", "schedule.warmup")
    return reasons + [
        f"{key}: it counts steps, and how many {wanted[key]} are depends on the data"
        for key in durations
        if not str(wanted[key]).endswith(" steps")
    ]


def _texts(module: ModuleType, wanted: Wanted, nodes: Nodes) -> dict[str, str]:
    candidate = wanted.candidate
    header = [
        f"{MARK}; checked with {module.CHECKED_WITH}.",
        f"Layout: {layout_text(candidate)} on {candidate.n_devices} x {candidate.device.name}",
    ]
    command, prelude = module.program(wanted)
    texts: dict[str, str] = module.files(wanted, header)
    return texts | scripts(wanted.config.name, nodes, header, command, prelude)


def _lost(wanted: Wanted, found: dict[str, Any]) -> list[str]:
    """Keys that read back as something else, or that only one side has."""
    keys = sorted({*wanted.values, *found})
    nothing = object()
    pairs = ((key, wanted.values.get(key, nothing), found.get(key, nothing)) for key in keys)
    return [
        f"{key}: wanted {_shown(mine, nothing)}, its files would say {_shown(theirs, nothing)}"
        for key, mine, theirs in pairs
        if mine != theirs
    ]


def _shown(value: object, nothing: object) -> str:
    return "nothing" if value is nothing else show_value(value)


def _write(directory: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _place(texts: dict[str, str], out: Path) -> list[Path]:
    """In place of what an earlier call wrote; never over files of the user's."""
    paths = [out / name for name in texts]
    try:
        ours = (out / LAUNCH).is_file() and MARK in (out / LAUNCH).read_text(encoding="utf-8", errors="replace")
        taken = [] if ours else [path for path in paths if path.exists()]
        if taken:
            raise UserError(
                f"{plain(str(taken[0]))}: exists, and is not ours; choose another directory, or move it away"
            )
        out.mkdir(parents=True, exist_ok=True)
        _write(out, texts)
        for path in paths:
            if path.suffix == ".sh":
                path.chmod(0o755)
    except OSError as error:
        raise UserError(f"{plain(str(error.filename or out))}: cannot be written: {error.strerror}") from None
    return paths
