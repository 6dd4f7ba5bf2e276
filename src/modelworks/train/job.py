"""`train`: one run from its configuration to its last checkpoint, in a directory of its own.

Nothing of an earlier run is touched before everything that the user may have to fix was found right (`preparation`).
What happens after each step besides training is the hooks' business.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from modelworks.checkpoint import Storage, open_storage
from modelworks.config import RunConfig, UserError
from modelworks.data import Batch, Dataset, compression_baselines
from modelworks.hardware import Machine
from modelworks.layout import Layout, check_layout
from modelworks.parallel import Mesh, single_process
from modelworks.train import run_directory
from modelworks.train.assembly import Hooks, build_hooks
from modelworks.train.beginning import job_peak, print_decisions, record_start
from modelworks.train.failing import tell_failure
from modelworks.train.forecast import Forecaster, compare_forecast, say_forecast
from modelworks.train.health.stop_report import STOP_REPORT
from modelworks.train.hooks import Recording, describe_speed
from modelworks.train.loop import Hook, TrainingFailed, run_steps
from modelworks.train.one_rank import on_rank_0
from modelworks.train.preparation import Prepared, take_directory
from modelworks.train.profiling import Profile
from modelworks.train.ready import Start
from modelworks.train.recording import RunLog
from modelworks.train.result import Result, build_result, with_earlier_figures
from modelworks.train.resuming import places_left
from modelworks.train.snapshots import choose_place
from modelworks.train.state import TrainState
from modelworks.train.step import data_rows
from modelworks.train.stopping import StopRequest, stop_on_signals


def train(
    config: RunConfig,
    run_dir: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    console: Console | None = None,
    machine: Machine | None = None,
    mesh: Mesh | None = None,
    forecaster: Forecaster | None = None,
    further: Sequence[Hook] = (),
    trial: bool = False,
) -> Result:
    """Run `config` in `run_dir`. console: where a person reads along; None is silent.

    machine: measured figures of this machine, None measures them (or reads what was measured before). mesh: of this
    rank where the run is split over processes, each of which calls this; rank 0 alone writes and speaks. forecaster:
    what predicts the run before its first step, for rank 0 to say. further: called after each step, behind the run's
    own hooks. trial: only losses are wanted: nothing is saved, and no compressor runs on the validation text.
    Raises `UserError` for what the user can fix, and `TrainingFailed` when the run cannot go on.
    """
    check_layout(config, mesh.layout.world_size if mesh else None)
    if mesh is None:
        if Layout.of(config.parallel).world_size > 1:
            raise ValueError("a run that is split needs the mesh of this rank (see modelworks.parallel.launch)")
        mesh = single_process(torch.device("cpu"))
    console = console or Console(quiet=True)
    started = time.monotonic()
    with ExitStack() as held:
        storage = take_directory(config, run_dir, mesh, console, held, resume=resume, overwrite=overwrite)
        start = Start(config, run_dir, mesh, console, resume, machine, held)
        prepared, state, memory, memory_report = start.begin()
        earlier_summary = run_directory.read_summary(run_dir) if not overwrite else {}
        prepared.loader.skips = state.skips
        states = None
        if config.health.spikes == "rollback":
            states = choose_place(state, config.health.rollback_from, prepared.ranks_here)
        on_rank_0(mesh, lambda: _take_over(run_dir, prepared, storage, state, console, overwrite=overwrite))
        log = RunLog(run_dir if mesh.is_main else None, first_step=state.step)
        held.callback(log.close)
        _say_and_record(prepared, state, log, console)
        peak = job_peak(prepared.derived, prepared.machine, prepared.n_hosts)
        saved = None if trial else storage
        hooks = build_hooks(prepared, state, run_dir, saved, log, memory, console, peak.flops, states, further)
        memory_report.kept = hooks.checkpoints.kept
        baselines = {} if trial else on_rank_0(mesh, lambda: _baselines(config, prepared.dataset, console))
        record_start(log, state, prepared.derived, baselines, prepared.machine, peak)
        forecast = None
        if forecaster is not None and mesh.is_main:
            hosts, recording = prepared.n_hosts, hooks.recording
            forecast = say_forecast(
                forecaster, prepared.derived.config, prepared.machine, hosts, recording, log, console, state.step
            )
        stop = _run(prepared, state, hooks, Profile(run_dir if profile and mesh.is_main else None, prepared.derived))
        result = build_result(
            state,
            prepared.derived,
            prepared.loader,
            hooks.recording,
            hooks.validation,
            hooks.checkpoints,
            baselines,
            started,
            stop.signal,
        )
        log.figure(state.step, "memory/training_peak", memory.peak() - memory.at_reset, "bytes")
        if forecast is not None:
            compare_forecast(forecast, hooks.recording, log, console, state.step)
            result = replace(result, predicted_step_seconds=forecast.step_seconds)
        if hooks.split:
            result = replace(result, parallel=hooks.split.latest)
        if not hooks.recording.losses:
            result = with_earlier_figures(result, earlier_summary)
        if mesh.is_main and not result.stopped_by:
            _end(run_dir, result, hooks.recording, console)
        return result


def _take_over(
    run_dir: Path, prepared: Prepared, storage: Storage, state: TrainState, console: Console, *, overwrite: bool
) -> None:
    """The directory is this run's from here on."""
    try:
        if overwrite:
            _start_over(run_dir, storage, console)
        run_directory.cut_records(run_dir / "records.jsonl", state.step, len(state.skips.history))
        for name in ("summary.json", STOP_REPORT):
            (run_dir / name).unlink(missing_ok=True)
        run_directory.write_config(run_dir, prepared.derived.config)
    except OSError as error:
        raise UserError(f"{error.filename or run_dir}: cannot be changed: {error.strerror or error}") from None


def _start_over(run_dir: Path, storage: Storage, console: Console) -> None:
    """Remove the earlier run, and say what of it stays."""
    own = str(run_dir / "checkpoints")
    for place in places_left(run_dir):
        if place != storage.label:
            console.print(f"checkpoints of the earlier run are left in {place}", markup=False)
    run_directory.clear(run_dir)
    storage.clear()
    inside = open_storage(own)
    if storage.label != own and inside.checkpoints():
        with inside.hold():
            inside.clear()


def _say_and_record(prepared: Prepared, state: TrainState, log: RunLog, console: Console) -> None:
    print_decisions(prepared.derived, console)
    if prepared.machine.disturbed:
        busy = "other programs were busy while this machine was measured: utilisation (MFU) reads too high"
        console.print(f"warning: {busy}", markup=False)
        log.event(state.step, "warning", busy)
    for text in [*prepared.remarks, *(f"changed on resume: {change}" for change in prepared.changes)]:
        console.print(text, markup=False)
        log.event(state.step, "remark", text)


def _run(prepared: Prepared, state: TrainState, hooks: Hooks, profile: Profile) -> StopRequest:
    """All steps, and the last checkpoint. Returns whether and by what it was stopped before its end."""
    derived = prepared.derived
    with hooks.terminal, stop_on_signals() as stop, profile as profiling:
        hooks.terminal.start(state.step)
        hooks.validation.catch_up(state)
        hooks.checkpoints.catch_up(state)
        if hooks.rollbacks:
            hooks.rollbacks.begin(state)
        try:
            while spike := run_steps(state, derived, _batches(prepared, state), [*hooks.all, profiling], stop):
                assert hooks.rollbacks is not None
                hooks.rollbacks.go_back(state, spike)
        except TrainingFailed as error:
            kept = tell_failure(prepared, state, hooks, error)
            raise TrainingFailed(f"{error}; {kept}") from error
        # Saved, or being saved, unless a signal stopped the run between two checkpoints.
        hooks.checkpoints.stop(state, lambda: stop.deadline(derived.config.checkpoint.grace))
    if profiling.table:
        hooks.terminal.console.print(profiling.table, markup=False)
    early = state.watch is not None and state.watch.ended
    if state.step < derived.total_steps and stop.signal is None and not early:
        stop.signal = signal.SIGTERM  # another rank was told, and all have agreed
    return stop


def _batches(prepared: Prepared, state: TrainState) -> Iterator[Batch]:
    """This rank's rows, from the present step on."""
    sizes, model = prepared.derived.batches, state.model
    return prepared.loader.iterate(state.step, lambda step: data_rows(model, sizes.rows(step)))


def _end(run_dir: Path, result: Result, recording: Recording, console: Console) -> None:
    try:
        run_directory.write_summary(run_dir, asdict(result))
    except OSError as error:
        console.print(f"warning: {error.filename}: cannot be written ({error.strerror})", markup=False)
    console.print(f"done: {result.steps} steps, {describe_speed(recording)}", markup=False)


def _baselines(config: RunConfig, dataset: Dataset, console: Console) -> dict[str, float]:
    compressors = compression_baselines(dataset, max_tokens=config.evaluate.max_tokens, progress=not console.quiet)
    return {name: row.best for name, row in compressors.items()}
