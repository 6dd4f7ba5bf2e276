"""Everything that must be right before a run may touch its directory, and what it then starts from.

In the order of what can go wrong: the layout, the directory, the checkpoint, what the configuration only names, the
data, what is derived, the vocabulary, what a resumed run may change. Raises `UserError` at the first that is not.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from modelworks.checkpoint import Checkpoint, Storage, configured_storage, open_model, open_storage
from modelworks.config import Difference, RunConfig, UserError, resume_differences
from modelworks.data import Dataset, TrainLoader, build_dataset
from modelworks.hardware import Machine, MachineFacts, choose_threads, facts, measure_machine
from modelworks.parallel import Mesh
from modelworks.train import run_directory
from modelworks.train.derivation import Derived, derive
from modelworks.train.one_rank import on_rank_0
from modelworks.train.resuming import Candidate, Found, check_memory, check_storage, find_candidate, place_of
from modelworks.train.start import check_vocabulary

if TYPE_CHECKING:
    from modelworks.train.evaluation.tasks import TaskRunner


@dataclass(frozen=True)
class Prepared:
    """resumed: the checkpoint to go on from, None for a start. tasks: question sets. changes: of a resumed run's
    configuration. remarks: what looks odd. n_hosts, ranks_here: machines of the run, and its processes on this one."""

    derived: Derived
    machine: Machine
    dataset: Dataset
    loader: TrainLoader
    resumed: Found | None
    tasks: TaskRunner | None
    changes: list[Difference]
    remarks: list[str]
    n_hosts: int
    ranks_here: int


def prepare(
    config: RunConfig,
    run_dir: Path,
    mesh: Mesh,
    console: Console,
    *,
    resume: bool,
    machine: Machine | None,
    unusable: Collection[Candidate] = (),
) -> Prepared:
    """All ranks call it; rank 0 does what only one should. unusable: checkpoints found to be damaged."""
    hosts = mesh.group("world").gather_objects(socket.gethostname())
    ranks_here = hosts.count(socket.gethostname())
    candidate = on_rank_0(mesh, lambda: find_candidate(config, run_dir, console, unusable) if resume else None)
    tasks = check_references(config)
    resumed = Found.open(candidate) if candidate else None
    checkpoint = resumed.checkpoint if resumed else None
    main = mesh.is_main
    measured: Machine = mesh.shared(machine or (measure(config, console, ranks_here=ranks_here) if main else None))
    on_rank_0(mesh, lambda: _build_dataset(config, console))  # the others find it built
    dataset = build_dataset(config.data, progress=False)
    loader = TrainLoader(dataset, config.data, config.seed, config.batches)
    earlier = checkpoint.config if checkpoint else None
    epoch = loader.samples_per_epoch
    derived = on_rank_0(
        mesh, lambda: derive(config, measured, samples_per_epoch=epoch, earlier=earlier, ranks_here=ranks_here)
    )
    mesh.device = own_device(derived.device)
    changes = []
    if checkpoint:
        changes = resume_differences(
            checkpoint.config, derived.config, step=checkpoint.step, total_steps=derived.total_steps
        )
        _check_same_texts(checkpoint, dataset)
    remarks = check_vocabulary(config, dataset)
    n_hosts = len(set(hosts))
    return Prepared(
        derived,
        measured,
        dataset,
        loader,
        resumed,
        tasks,
        changes,
        remarks,
        n_hosts,
        ranks_here,
    )


def take_directory(
    config: RunConfig,
    run_dir: Path,
    mesh: Mesh,
    console: Console,
    held: ExitStack,
    *,
    resume: bool,
    overwrite: bool,
) -> Storage:
    """Lock the run's directory and the storage of its checkpoints until `held` closes, and make sure that this run may
    use what is there. Returns the storage, which rank 0 holds."""
    place = place_of(config, run_dir)
    check_memory(place, mesh.layout.world_size)
    storage = open_storage(place)

    def take() -> None:
        held.enter_context(run_directory.locked(run_dir))
        run_directory.check_use(run_dir, resume=resume, overwrite=overwrite)
        if config.checkpoint.storage is not None:
            ours = configured_storage(run_dir) == place
            check_storage(config, storage, resume=resume, overwrite=overwrite, ours=ours)
        remark = held.enter_context(storage.hold())
        if remark is not None:
            console.print(f"warning: {remark}", markup=False)

    on_rank_0(mesh, take)
    return storage


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


def own_device(device: torch.device) -> torch.device:
    """This process's own device of that kind."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def _check_same_texts(checkpoint: Checkpoint, dataset: Dataset) -> None:
    """The configuration only says where the texts lie; that they are still the same is for their hash to say."""
    key = checkpoint.state.get("dataset", dataset.key)
    if key != dataset.key:
        raise UserError(
            f"cannot resume from {checkpoint.label}: the texts or the tokenizer changed since (data set {key}, now "
            f"{dataset.key}); restore the sources' files, or start another run (another `name`, with init_from)"
        )
