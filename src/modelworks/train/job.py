"""`train`: one run from its configuration to its last checkpoint, in a directory of its own.

Nothing of an earlier run is touched before everything that the user may have to fix was found right (`preparation`).
What happens after each step besides training is the hooks' business.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from modelworks.checkpoint import Storage, open_storage
from modelworks.config import RunConfig, UserError, training_flops_per_token
from modelworks.data import Batch, Dataset, compression_baselines, validation_batches
from modelworks.hardware import Machine
from modelworks.layout import Layout, check_layout
from modelworks.parallel import Mesh, agree, single_process
from modelworks.train import run_directory
from modelworks.train.beginning import job_peak, print_decisions, record_start
from modelworks.train.derivation import Decision, Derived
from modelworks.train.evaluation.samples import choose_prompts
from modelworks.train.experts import whole_model
from modelworks.train.forecast import Forecaster, compare_forecast, say_forecast
from modelworks.train.health.judging import Judging
from modelworks.train.health.records import HealthRecords
from modelworks.train.health.stop_report import STOP_REPORT, write_stop_report
from modelworks.train.hooks import Questions, Recording, Validation, describe_speed
from modelworks.train.loop import Hook, TrainingFailed, run_steps
from modelworks.train.one_rank import on_rank_0
from modelworks.train.preparation import Prepared, take_directory
from modelworks.train.profiling import Profile
from modelworks.train.ready import Start
from modelworks.train.recording import MemoryMeter, RunLog
from modelworks.train.result import Result, build_result, with_earlier_figures
from modelworks.train.resuming import places_left
from modelworks.train.rollback import Rollbacks
from modelworks.train.saving import Checkpoints, build_checkpoints
from modelworks.train.snapshots import choose_place
from modelworks.train.split_records import SplitRecords
from modelworks.train.state import TrainState
from modelworks.train.step import data_rows
from modelworks.train.stopping import StopRequest, stop_on_signals
from modelworks.train.terminal import Terminal

if TYPE_CHECKING:
    from modelworks.train.evaluation.tasks import TaskRunner


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
        hooks = _build_hooks(prepared, state, run_dir, saved, log, memory, console, peak.flops, states, further)
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


@dataclass
class _Hooks:
    """What happens after a step, in the order of `all`: an evaluation comes before the checkpoint that stores it."""

    log: RunLog
    terminal: Terminal
    recording: Recording
    health: HealthRecords | None
    split: SplitRecords | None
    validation: Validation
    questions: Questions | None
    checkpoints: Checkpoints
    rollbacks: Rollbacks | None
    judging: Judging | None
    run_dir: Path
    further: Sequence[Hook]

    @property
    def all(self) -> list[Hook]:
        # Records of the split before the evaluation, which goes through the same executor.
        before = (self.recording, self.health, self.split, self.validation, self.questions, self.judging)
        own = (*before, self.checkpoints, self.rollbacks)
        return [*(hook for hook in own if hook is not None), *self.further]


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


def _build_hooks(
    prepared: Prepared,
    state: TrainState,
    run_dir: Path,
    storage: Storage | None,
    log: RunLog,
    memory: MemoryMeter,
    console: Console,
    peak_flops: float,
    states: Decision | None,
    further: Sequence[Hook],
) -> _Hooks:
    """states: where those to go back to are kept; None: nowhere."""
    derived, dataset, loader = prepared.derived, prepared.dataset, prepared.loader
    config = derived.config
    terminal = Terminal(console, total_steps=derived.total_steps, log_every=config.train.log_every)
    flops = training_flops_per_token(config.model, config.data.seq_len).training
    text = validation_batches(
        dataset,
        seq_len=config.data.seq_len,
        rows=max(1, derived.micro_batch),
        packing=config.data.packing,
        max_tokens=config.evaluate.max_tokens,
    )
    prompts = choose_prompts(config.evaluate.prompts, dataset, config.evaluate.samples)
    questions = _questions(prepared.tasks, derived, dataset.tokenizer)
    checkpoints = build_checkpoints(derived, state, dataset, log, terminal, storage, prepared.resumed)
    rollbacks = None
    if states:
        rollbacks = Rollbacks(config, run_dir, loader, checkpoints, log, terminal, states)
    health = HealthRecords(log, terminal, loader, state.model.mesh) if state.watch else None
    return _Hooks(
        log,
        terminal,
        recording=Recording(log, terminal, memory, loader, flops, peak_flops),
        health=health,
        split=SplitRecords(log, derived, state, run_dir) if state.model.mesh.layout.world_size > 1 else None,
        validation=Validation(log, terminal, derived, text, dataset, loader, prompts),
        questions=Questions(log, terminal, derived.tasks_every, questions) if questions else None,
        checkpoints=checkpoints,
        rollbacks=rollbacks,
        judging=Judging(log, terminal, health) if health and config.health.judgements else None,
        run_dir=run_dir,
        further=further,
    )


def _run(prepared: Prepared, state: TrainState, hooks: _Hooks, profile: Profile) -> StopRequest:
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
            kept = _tell_failure(prepared, state, hooks, error)
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


def _tell_failure(prepared: Prepared, state: TrainState, hooks: _Hooks, error: TrainingFailed) -> str:
    """Save what is worth it, and write the stop report. Returns in words what there is to go back to."""
    log, checkpoints = hooks.log, hooks.checkpoints
    log.event(state.step, "warning", str(error))
    if error.judgement:
        assert state.watch is not None
        assert state.watch.monitor is not None
        checkpoints.finish(state)  # and no more: its weights may be ruined
        kept = checkpoints.kept_until(state, state.watch.monitor.good_before(state.step))
    else:
        checkpoints.stop(state)
        kept = checkpoints.kept()
    if hooks.health and error.bad:
        hooks.health.tell_failed(state.step + 1, error.bad)
    if not (error.judgement or error.bad):
        return kept
    mesh, written = state.model.mesh, False
    path = hooks.run_dir / STOP_REPORT
    if mesh.is_main:
        try:
            write_stop_report(hooks.run_dir, state.step, str(error), kept, prepared.dataset)
            written = True
        except OSError as problem:
            log.event(state.step, "warning", f"{problem.filename}: cannot be written ({problem.strerror})")
    if agree(written, mesh):  # all ranks fail with the same words
        kept += f"; the batches, their documents and what to do: {path}"
    return kept


def _end(run_dir: Path, result: Result, recording: Recording, console: Console) -> None:
    try:
        run_directory.write_summary(run_dir, asdict(result))
    except OSError as error:
        console.print(f"warning: {error.filename}: cannot be written ({error.strerror})", markup=False)
    console.print(f"done: {result.steps} steps, {describe_speed(recording)}", markup=False)


def _baselines(config: RunConfig, dataset: Dataset, console: Console) -> dict[str, float]:
    compressors = compression_baselines(dataset, max_tokens=config.evaluate.max_tokens, progress=not console.quiet)
    return {name: row.best for name, row in compressors.items()}


def _questions(tasks: TaskRunner | None, derived: Derived, tokenizer: Any) -> Any:
    """What asks the configured question sets; None where there are none."""
    if tasks is None:
        return None

    def run(state: TrainState) -> dict[str, float]:
        """Asked by rank 0 of the whole model; the answers are everybody's, since they may decide which step is best."""
        model = whole_model(state.model)

        def ask() -> dict[str, float]:
            assert model is not None
            return dict(tasks.run(model, tokenizer, precision=derived.precision))

        return on_rank_0(state.model.mesh, ask)

    return run
