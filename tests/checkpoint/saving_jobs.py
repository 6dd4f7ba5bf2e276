"""A tiny model's state on the ranks of any layout, and saving it: for the tests of saves and of crashes."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint import Identity, Outcome, Owners, Saver, Shard, open_checkpoint, whole_shards
from modelworks.checkpoint.faults import at_each_point
from modelworks.checkpoint.storage import Storage, open_storage
from modelworks.config import ModelConfig, ParallelConfig, RunConfig, parameter_shapes
from modelworks.layout import Layout, ShardSpec, plan_parameters
from modelworks.parallel import Mesh

MODEL = ModelConfig(n_layers=2, d_model=8, n_heads=2, vocab_size=31, d_ff=13, max_seq_len=16)
# Only carried along: a run's own checks would ask for a larger vocabulary than these tests need.
CONFIG = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192, d_ff=16))
SHAPES = parameter_shapes(MODEL)


def whole(section: str, name: str, step: int) -> Tensor:
    """What a tensor is at a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{section}/{name}/{step}".encode()))
    return torch.randn(SHAPES[name.partition("/")[0]], generator=generator)


def specs_of(layout: Layout, parallel: ParallelConfig) -> Callable[[int], dict[str, ShardSpec]]:
    stages = [[0], [1]] if layout.pp == 2 else [[0, 1]]
    return lambda rank: {n: p.stored for n, p in plan_parameters(MODEL, layout, parallel, rank, stages).items()}


def state_at(specs: dict[str, ShardSpec], step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's slices of the weights and of the optimiser's state."""
    weights = {name: whole("model", name, step)[spec.slices] for name, spec in specs.items()}
    moments = {f"{name}/exp_avg": whole("optimizer", f"{name}/exp_avg", step)[s.slices] for name, s in specs.items()}
    return weights, moments


def shards_of(mesh: Any, step: int, parallel: ParallelConfig | None = None) -> list[Shard]:
    specs = specs_of(mesh.layout, parallel or ParallelConfig())
    owners = Owners(specs, mesh.rank, mesh.layout.world_size)
    weights, moments = state_at(specs(mesh.rank), step)
    shards = owners.shards("model", weights) + owners.shards("optimizer", moments)
    # A tensor that only the first rank has, and one without elements.
    more = whole_shards("routing", {"bias": torch.full((3,), float(step)), "none": torch.zeros(0, 4)})
    return shards + (more if mesh.rank == 0 else [])


def identity(step: int, world_size: int = 1, tokenizer: Path | None = None) -> Identity:
    metrics = {"val_loss": 10.0 - step}
    return Identity.of_run(CONFIG, world_size=world_size, state={"step": step}, metrics=metrics, tokenizer=tokenizer)


def saved_step(storage: Storage, name: str) -> int:
    """Which step's values a checkpoint holds, all of them; fails where it is not complete, sound and of one step."""
    checkpoint = open_checkpoint(storage.folder(name))
    checkpoint.verify()
    step = int(checkpoint.state["step"])
    names = list(SHAPES)
    assert set(checkpoint.shapes("model")) == set(names)
    for section, own in (("model", names), ("optimizer", [f"{name}/exp_avg" for name in names])):
        for each in own:
            assert torch.equal(checkpoint.tensor(section, each), whole(section, each, step)), f"{section}/{each}"
    assert checkpoint.tensor("routing", "bias").tolist() == [step] * 3
    assert checkpoint.shapes("routing")["none"] == (0, 4)
    return step


def save(
    mesh: Mesh, where: str, parallel: dict[str, Any], steps: Sequence[int], **settings: Any
) -> list[dict[str, Any]]:
    """On every rank: save these steps one after the other; outcomes. The tensors change as soon as `begin` is back.

    settings: `fails` as (rank, step, point, kind of failure); the rest goes to the saver.
    """
    fails = settings.pop("fails", None)
    storage = open_storage(where)
    saver = Saver(mesh, storage, **{"background": True, **settings})
    outcomes = []
    for step in steps:
        shards = shards_of(mesh, step, ParallelConfig(**parallel))
        with _failing(fails, mesh.rank, step, where):
            saver.begin(step, shards, identity(step, mesh.layout.world_size))
            for shard in shards:
                shard.tensor.fill_(torch.nan)
            outcome = saver.wait()
        assert outcome is not None
        assert not saver.in_flight
        outcomes.append(asdict(outcome))
    return outcomes


def save_not_finite(mesh: Mesh, where: str, name: str) -> dict[str, Any]:
    """The outcome where the last rank's part of a parameter has an element that is infinite."""
    shards = shards_of(mesh, 1)
    if mesh.rank == mesh.layout.world_size - 1:
        [shard] = [shard for shard in shards if shard.section == "model" and shard.spec.name == name]
        shard.tensor.view(-1)[-1] = torch.inf
    saver = Saver(mesh, open_storage(where), background=True)
    saver.begin(1, shards, identity(1, mesh.layout.world_size))
    return asdict(_there(saver.wait()))


def save_to_slow_storage(mesh: Mesh, where: str) -> list[Any]:
    """The last rank's storage hangs: what the others see of the save meanwhile, and its end once it goes on."""
    goes_on = threading.Event()

    def hang(point: str) -> None:
        if point == "before a shard file" and mesh.rank == mesh.layout.world_size - 1:
            goes_on.wait()

    saver = Saver(mesh, open_storage(where), background=True)
    with at_each_point(hang):
        saver.begin(1, shards_of(mesh, 1), identity(1, mesh.layout.world_size))
        seen = [saver.poll(), saver.poll(), saver.wait(limit=0.05), saver.in_flight]
        goes_on.set()
        outcome = _there(saver.wait())
    return [*seen, outcome.error, saver.in_flight]


@contextmanager
def _failing(fails: tuple[int, int, str, str] | None, rank: int, step: int, where: str) -> Iterator[None]:
    """The storage of one rank fails from a point on, while one step is saved."""
    if fails is None or fails[:2] != (rank, step):
        yield
        return
    _, _, at, kind = fails

    def fail(point: str) -> None:
        if point != at:
            return
        if kind == "vanished":
            for path in Path(where).glob(".tmp-*"):
                gone = path.rename(path.with_name(f"gone-{path.name}"))  # at once, whoever writes there
                shutil.rmtree(gone, ignore_errors=True)
        elif kind == "not shared":
            for path in Path(where).glob(".tmp-*/rank-00001.safetensors"):
                path.unlink()
        else:
            raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    with at_each_point(fail):
        yield


def _there(outcome: Outcome | None) -> Outcome:
    assert outcome is not None
    return outcome
