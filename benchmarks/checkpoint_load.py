"""What checking costs when a checkpoint is loaded: the time with checksums, and without.

    python -m benchmarks.checkpoint_load                        # 1 GB in the temporary directory
    python -m benchmarks.checkpoint_load --directory /mnt/disk  # from that disk
    python -m benchmarks.checkpoint_load --quick                # 64 MB, to see that it runs; writes no results

The model section of a checkpoint of two ranks (half of the rows each) is loaded into a model's parameters: whole, and
as one of three ranks would load its rows, which fall across the pieces. Once with the files in the page cache (warm),
once after the kernel was told to drop them (cold). Without checksums the same code runs with a digest that looks at
nothing. Both alternate, and medians over rounds are compared. A thread checks while the next block is read, so all of
it is measured again with the process kept on one core, where the two take turns. Writes results/checkpoint_load.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from benchmarks._results import write_results
from modelworks.checkpoint import Checkpoint, Identity, Shard, open_checkpoint, open_storage
from modelworks.checkpoint.commit import commit
from modelworks.checkpoint.part import PartWriter
from modelworks.config import ModelConfig
from modelworks.layout import ShardSpec, split_evenly

TARGET = 0.10  # of the time of a load
SHAPE = (4096, 2048)  # of each tensor, float32: 32 MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="little data; writes no results")
    arguments = parser.parse_args()
    count = 2 if arguments.quick else 32
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = written(Path(directory), count)
        parameters = {f"w{index}": torch.zeros(SHAPE) for index in range(count)}
        rows = split_evenly(SHAPE[0], 3, 1)
        part = {name: torch.zeros(rows[1] - rows[0], SHAPE[1]) for name in parameters}

        def load_part(checkpoint: Checkpoint) -> None:
            for name, target in part.items():
                target.copy_(checkpoint.slice("model", name, [rows, (0, SHAPE[1])]))

        figures = []
        for cores in sorted({1, os.cpu_count() or 1}, reverse=True):
            with on_cores(cores):
                for cold in (False, True):
                    whole = compared(path, lambda c: c.load("model", parameters), cold, arguments.rounds)
                    figures.append(told("whole", cores, cold, parameters, whole))
                    slices = compared(path, load_part, cold, arguments.rounds)
                    figures.append(told("a third of the rows", cores, cold, part, slices))
    if not arguments.quick:
        print(write_results("checkpoint_load", figures))


def written(directory: Path, count: int) -> Path:
    """A checkpoint of `count` tensors by two ranks."""
    storage = open_storage(directory)
    attempt = storage.begin("step-00000001")
    for rank in range(2):
        writer = PartWriter(storage.writing(attempt), rank, Event())
        specs = [ShardSpec.whole(f"w{index}", SHAPE).cut(0, 2, rank) for index in range(count)]
        writer.add([Shard("model", spec, torch.randn(spec.local_shape)) for spec in specs])
        writer.finish()
    config = ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=512)
    folder = commit(storage, attempt, 1, Identity(config, None, {"world_size": 2}, {}, {}, None), 2)
    return Path(folder.label)


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """This process on so many cores."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:count]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def compared(path: Path, work: Callable[[Checkpoint], None], cold: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, without the first, in which memory is allocated."""
    seconds: dict[str, list[float]] = {"checked": [], "unchecked": []}
    for _ in range(rounds + 1):
        for kind, taken in seconds.items():
            drop_or_read(path, cold)
            started = time.perf_counter()
            checkpoint = open_checkpoint(path)
            work(checkpoint if kind == "checked" else unchecked(checkpoint))
            taken.append(time.perf_counter() - started)
    return {kind: taken[1:] for kind, taken in seconds.items()}


def told(
    what: str, cores: int, cold: bool, tensors: dict[str, Tensor], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    checked, plain = (statistics.median(seconds[kind]) for kind in ("checked", "unchecked"))
    size = sum(tensor.nbytes for tensor in tensors.values())
    share = 1 - plain / checked
    state = "cold" if cold else "warm"
    print(
        f"{what}, {state}, on {cores} cores: {size / 2**20:,.0f} MiB in {checked:.3f} s "
        f"({size / checked / 1e9:.2f} GB/s), {plain:.3f} s without checksums: "
        f"{share:.1%} of the load (target: at most {TARGET:.0%})",
        flush=True,
    )
    return {
        "what": what,
        "cores": cores,
        "page_cache": state,
        "bytes": size,
        "checked_seconds": checked,
        "unchecked_seconds": plain,
        "share_of_checksums": share,
        "target": TARGET,
        "all_seconds": seconds,
    }


def unchecked(checkpoint: Checkpoint) -> Checkpoint:
    """The same, with a digest that looks at nothing."""
    manifest = checkpoint.manifest
    scheme = replace(manifest.scheme, digits=0, digest=lambda data: "")
    files = [file.model_copy(update={"header": None}) for file in manifest.files]
    return Checkpoint(checkpoint.folder, replace(manifest, scheme=scheme, files=files))


def drop_or_read(path: Path, cold: bool) -> None:
    """Leave the files' pages out of the page cache, or in it."""
    for file in path.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            if cold:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while os.read(descriptor, 1 << 24):
                    pass
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    main()
