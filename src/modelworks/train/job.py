"""`train`: one run from its configuration to its last checkpoint, in a directory of its own.

The order is that of what can go wrong: what the user may have to fix (the directory, the data, the vocabulary, what a
resumed run may change) is checked before the first step, and nothing of an earlier run is touched before that.
"""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from modelworks.checkpoint import Checkpoint, latest_checkpoint, open_checkpoint, open_model
from modelworks.config import RunConfig, UserError, resume_differences, training_flops_per_token
from modelworks.data import Dataset, TrainLoader, build_dataset, compression_baselines, validation_batches
from modelworks.hardware import Machine, MachineFacts, choose_threads, facts, measure_machine
from modelworks.layout import Layout, check_layout
from modelworks.parallel import Mesh, single_process
from modelworks.train import run_directory
from modelworks.train.beginning import job_peak, print_decisions, record_start
from modelworks.train.derivation import Derived, derive
from modelworks.train.evaluation.samples import choose_prompts
from modelworks.train.experts import whole_model
from modelworks.train.hooks import Checkpoints, Questions, Recording, Validation, describe_speed
from modelworks.train.loop import Hook, TrainingFailed, run_steps
from modelworks.train.one_rank import on_rank_0
from modelworks.train.out_of_memory import OutOfMemory
from modelworks.train.profiling import Profile
from modelworks.train.recording import MemoryMeter, RunLog
from modelworks.train.result import Result, build_result, with_earlier_figures
from modelworks.train.split_records import SplitRecords
from modelworks.train.start import build_state, check_vocabulary
from modelworks.train.state import TrainState
from modelworks.train.step import data_rows
from modelworks.train.stopping import stop_on_signals
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
) -> Result:
    """Run `config` in `run_dir`. console: where a person reads along; None is silent.

    machine: measured figures of this machine, None measures them (or reads what was measured before). mesh: of this
    rank where the run is split over processes, each of which calls this; rank 0 alone writes and speaks.
    Raises `UserError` for what the user can fix, and `TrainingFailed` when the run cannot go on.
    """
    check_layout(config, mesh.layout.world_size if mesh else None)
    if mesh is None:
        if Layout.of(config.parallel).world_size > 1:
            raise ValueError("a run that is split needs the mesh of this rank (see modelworks.parallel.launch)")
        mesh = single_process(torch.device("cpu"))
    main = mesh.is_main
    console = console or Console(quiet=True)
    started = time.monotonic()
    hosts = mesh.group("world").gather_objects(socket.gethostname())
    ranks_here = hosts.count(socket.gethostname())
    with ExitStack() as held:

        def take_directory() -> Path | None:
            held.enter_context(run_directory.locked(run_dir))
            run_directory.check_use(run_dir, resume=resume, overwrite=overwrite)
            return _find_checkpoint(run_dir, console) if resume else None

        path = on_rank_0(mesh, take_directory)
        tasks = check_references(config)
        checkpoint = open_checkpoint(path) if path else None
        measured: Machine = mesh.shared(machine or (measure(config, console, ranks_here=ranks_here) if main else None))
        on_rank_0(mesh, lambda: _build_dataset(config, console))  # the others find it built
        dataset = build_dataset(config.data, progress=False)
        loader = TrainLoader(dataset, config.data, config.seed, config.train.global_batch)
        earlier = checkpoint.config if checkpoint else None
        epoch = loader.steps_per_epoch
        derived = on_rank_0(
            mesh,
            lambda: derive(config, measured, steps_per_epoch=epoch, earlier=earlier, ranks_here=ranks_here),
        )
        mesh.device = own_device(derived.device)
        changes = []
        if checkpoint:
            changes = resume_differences(
                checkpoint.config, derived.config, step=checkpoint.step, total_steps=derived.total_steps
            )
            _check_same_texts(checkpoint, dataset)
        remarks = check_vocabulary(config, dataset)
        questions = _questions(tasks, derived, dataset.tokenizer)

        memory = MemoryMeter(derived.device)
        memory.reset()
        memory_report = held.enter_context(OutOfMemory(derived, mesh, ranks_here))
        state = build_state(derived, mesh, checkpoint, scratch=run_dir / "offload")
        memory_report.state = state
        if checkpoint:
            state.restore(checkpoint)
            if _measure_of_best(checkpoint.config) != _measure_of_best(config):
                state.best = None  # of another measure: nothing to compare with
        earlier_summary = run_directory.read_summary(run_dir) if not overwrite else {}
        if main:
            if overwrite:
                run_directory.clear(run_dir)
            run_directory.cut_records(run_dir / "records.jsonl", state.step)
            (run_dir / "summary.json").unlink(missing_ok=True)
            run_directory.write_config(run_dir, derived.config)
        log = RunLog(run_dir if main else None, first_step=state.step)
        print_decisions(derived, console)
        if measured.disturbed:
            busy = "other programs were busy while this machine was measured: utilisation (MFU) reads too high"
            console.print(f"warning: {busy}", markup=False)
            log.event(state.step, "warning", busy)
        for text in [*remarks, *(f"changed on resume: {change}" for change in changes)]:
            console.print(text, markup=False)
            log.event(state.step, "remark", text)
        peak = job_peak(derived, measured, len(set(hosts)))
        terminal = Terminal(console, total_steps=derived.total_steps, log_every=config.train.log_every)
        recording = Recording(
            log,
            terminal,
            memory,
            loader.tokens_per_step,
            training_flops_per_token(config.model, config.data.seq_len).training,
            peak.flops,
        )
        validation = Validation(
            log,
            terminal,
            derived,
            validation_batches(
                dataset,
                seq_len=config.data.seq_len,
                rows=max(1, derived.micro_batch),
                packing=config.data.packing,
                max_tokens=config.evaluate.max_tokens,
            ),
            dataset,
            loader,
            choose_prompts(config.evaluate.prompts, dataset, config.evaluate.samples),
        )
        checkpoints = Checkpoints(
            log,
            terminal,
            derived,
            run_dir / "checkpoints",
            dataset,
            protect=[checkpoint.path] if checkpoint else [],
            latest=checkpoint.path if checkpoint else None,
        )
        memory_report.kept = checkpoints.kept
        baselines = on_rank_0(mesh, lambda: _baselines(config, dataset, console))
        record_start(log, state, derived, baselines, measured, peak)
        split = SplitRecords(log, derived, state, run_dir) if mesh.layout.world_size > 1 else None
        # Before the evaluation, which goes through the same executor.
        hooks: list[Hook] = [recording, *([split] if split else []), validation]
        if questions:
            hooks.append(Questions(log, terminal, derived.tasks_every, questions))
        hooks.append(checkpoints)
        try:
            with (
                terminal,
                stop_on_signals() as stop,
                Profile(run_dir if profile and main else None, derived) as profiling,
            ):
                hooks.append(profiling)
                terminal.start(state.step)
                validation.catch_up(state)
                checkpoints.catch_up(state)
                try:
                    rows = data_rows(state.model, config.train.global_batch)
                    run_steps(state, derived, loader.iterate(state.step, rows), hooks, stop)
                except TrainingFailed as error:
                    log.event(state.step, "warning", str(error))
                    checkpoints.save(state)
                    raise TrainingFailed(f"{error}; {checkpoints.kept()}") from error
                # Already saved unless a signal stopped the run between two checkpoints.
                checkpoints.save(state)
            if profiling.table:
                console.print(profiling.table, markup=False)
            if state.step < derived.total_steps and stop.signal is None:
                stop.signal = signal.SIGTERM  # another rank was told, and all have agreed
            result = build_result(
                state, derived, loader, recording, validation, checkpoints, baselines, started, stop.signal
            )
            log.figure(state.step, "memory/training_peak", memory.peak() - memory.at_reset, "bytes")
            if split:
                result = replace(result, parallel=split.latest)
            if not recording.losses:
                result = with_earlier_figures(result, earlier_summary)
            if main and not result.stopped_by:
                try:
                    run_directory.write_summary(run_dir, asdict(result))
                except OSError as error:
                    console.print(f"warning: {error.filename}: cannot be written ({error.strerror})", markup=False)
                console.print(f"done: {state.step} steps, {describe_speed(recording)}", markup=False)
            return result
        finally:
            log.close()


def check_references(config: RunConfig) -> TaskRunner | None:
    """What the configuration only names must be there: the weights to start from, the question sets, the best metric.

    Needs no data, so that a slip is told before they are built. Returns the question sets, ready to be asked.
    """
    if config.init_from:
        open_model(config.init_from)
    settings = config.evaluate
    known = ["val_loss", "val_perplexity", "val_bits_per_byte"]
    tasks = None
    if settings.tasks:
        from modelworks.train.evaluation.tasks import TaskRunner

        tasks = TaskRunner(settings.tasks, task_path=settings.task_path, limit=settings.tasks_limit)
        known += tasks.metric_names()
    if settings.best_metric not in known:
        raise UserError(
            f"evaluate.best_metric: got `{settings.best_metric}`, expected one that this run measures: "
            f"{', '.join(known)}"
        )
    return tasks


def measure(config: RunConfig, console: Console, *, ranks_here: int = 1) -> Machine:
    """This machine's figures, on the device that the run will use, with the threads that it will use.

    ranks_here: processes of the run on this machine, which wait meanwhile. Its threads are those of all of them.
    """
    found = facts(accelerator=True)
    own = int(choose_threads(found).value)
    torch.set_num_threads(min(found.cores, own * ranks_here))
    try:
        return _measure_device(config, console, found)
    finally:
        torch.set_num_threads(own)


def _measure_device(config: RunConfig, console: Console, found: MachineFacts) -> Machine:
    device = config.train.device
    if device == "cuda" and found.accelerator is None:
        raise UserError("train.device is cuda, but torch finds no GPU here; use cpu or auto")
    if device == "auto":
        device = "cuda" if found.accelerator else "cpu"
    return measure_machine(
        device=device, progress=lambda what: console.print(f"measuring this machine: {what}", markup=False)
    )


def _build_dataset(config: RunConfig, console: Console) -> None:
    build_dataset(config.data, progress=not console.quiet)


def _baselines(config: RunConfig, dataset: Dataset, console: Console) -> dict[str, float]:
    compressors = compression_baselines(dataset, max_tokens=config.evaluate.max_tokens, progress=not console.quiet)
    return {name: row.best for name, row in compressors.items()}


def own_device(device: torch.device) -> torch.device:
    """This process's own device of that kind."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def _find_checkpoint(run_dir: Path, console: Console) -> Path | None:
    """The newest complete checkpoint; None for a run that was killed before it had one, which starts again."""

    def skipped(path: Path, reason: str) -> None:
        console.print(f"warning: {path.name} is not used: {reason}", markup=False)

    path = latest_checkpoint(run_dir / "checkpoints", on_skip=skipped)
    if path is None:
        console.print(f"no checkpoint in {run_dir} yet: starting from the beginning", markup=False)
        return None
    console.print(f"resuming from {path} (step {open_checkpoint(path).step})", markup=False)
    return Path(path)


def _check_same_texts(checkpoint: Checkpoint, dataset: Dataset) -> None:
    """The configuration only says where the texts lie; that they are still the same is for their hash to say."""
    key = checkpoint.state.get("dataset", dataset.key)
    if key != dataset.key:
        raise UserError(
            f"cannot resume from {checkpoint.path}: the texts or the tokenizer changed since (data set {key}, now "
            f"{dataset.key}); restore the sources' files, or start another run (another `name`, with init_from)"
        )


def _measure_of_best(config: RunConfig) -> tuple[str, str]:
    return config.evaluate.best_metric, config.evaluate.best_mode


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
