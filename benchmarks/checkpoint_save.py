"""What saving costs: how long training stands still, and how fast the disk is used, beside torch's own checkpoints.

    python -m benchmarks.checkpoint_save                        # about 1.3 GB of state, 1, 2 and 4 ranks
    python -m benchmarks.checkpoint_save --quick                # 80 MB, to see that it runs
    python -m benchmarks.checkpoint_save --directory /mnt/disk  # measure that disk

Weights and AdamW state of a 110M-parameter transformer in float32, cut evenly over the ranks. In each round every
contender saves the same bytes once, one after the other, so that all meet the disk in the same mood:

    memcpy       a plain copy into memory that was written before     the least that a snapshot can cost
    disk         one file a rank, blocks of 16 MiB, then fsync        the most that the disk takes, as `dd` would
    sync, async  ours: `Saver`, in the foreground and in the background
    dcp          torch.distributed.checkpoint.save
    dcp_async    async_save as it comes; dcp_staged: with a stager that keeps its buffers

stall: seconds until the caller may change its tensors. write: until the bytes are on the disk (for ours, this rank's
shard files and part file). Both of the slowest rank. Medians over rounds, without the first, which allocates memory.
Ours computes a checksum of every block and looks for weights that are not finite; the others do not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks._ranks import run_ranks
from benchmarks._results import write_results
from modelworks.checkpoint import Identity, Saver, Shard
from modelworks.checkpoint.storage import open_storage
from modelworks.config import ModelConfig, RunConfig, parameter_shapes
from modelworks.layout import Layout, ShardSpec
from modelworks.parallel import Mesh, build_mesh

BLOCK = 16 << 20
FULL = {"n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 32768, "d_ff": 2048}
QUICK = {"n_layers": 4, "d_model": 256, "n_heads": 4, "vocab_size": 8192, "d_ff": 688}

Measured = dict[str, float]  # stall and write, in seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little state and few rounds; writes no results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=None, help="the first one does not count")
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the temporary directory")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 6)
    results = []
    for ranks in arguments.ranks:
        directory = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=arguments.directory))
        try:
            by_rank = run_ranks(ranks, measure, str(directory), QUICK if arguments.quick else FULL, rounds)
        finally:
            shutil.rmtree(directory)
        results.append(summary(ranks, by_rank))
        show(results[-1])
    if not arguments.quick:
        print(write_results("checkpoint_save", results))


def measure(rank: int, directory: str, shape: dict[str, int], rounds: int) -> dict[str, Any]:
    """On one rank: what each contender took in each round, and the bytes of this rank's state."""
    warnings.simplefilter("ignore")  # torch's checkpoints warn about what they do themselves
    ranks = dist.get_world_size()
    mesh = build_mesh(Layout(dp_shard=ranks), torch.device("cpu"))
    config = RunConfig(model=ModelConfig(**shape), data={"tokenizer": {"train": "bpe", "vocab_size": 4096}})
    shards = state_of(config.model, rank, ranks)
    where = Path(directory)
    contenders: list[Contender] = [Dcp(rank, shards, where, kind) for kind in ("dcp", "dcp_async", "dcp_staged")]
    contenders.append(Ours(mesh, config, shards, where, background=False))
    # Side by side, because the ratios that matter most are between these.
    contenders += [Disk(shards, where), Memory(shards), Ours(mesh, config, shards, where, background=True)]
    taken: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            dist.barrier()
            taken[contender.name].append(contender.save(number))
            dist.barrier()
            if rank == 0:
                for left in where.iterdir():
                    shutil.rmtree(left)
            dist.barrier()
    for contender in contenders:
        contender.close()
    return {"bytes": sum(shard.bytes for shard in shards), "taken": taken}


def state_of(model: ModelConfig, rank: int, ranks: int) -> list[Shard]:
    """This rank's rows of every weight and of both of its moments."""
    shards = []
    for section, suffix in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq")):
        for name, shape in parameter_shapes(model).items():
            spec = ShardSpec.whole(f"{name}{suffix}", shape).cut(0, ranks, rank)
            shards.append(Shard(section, spec, torch.randn(spec.local_shape)))
    return shards


class Contender:
    """name: in the results. save: one round."""

    name: str

    def save(self, number: int) -> Measured:
        raise NotImplementedError

    def close(self) -> None:
        """No more rounds."""


class Memory(Contender):
    name = "memcpy"

    def __init__(self, shards: list[Shard]) -> None:
        self._tensors = [shard.tensor for shard in shards]
        self._copies = [torch.zeros_like(tensor) for tensor in self._tensors]

    def save(self, number: int) -> Measured:
        with _timed() as seconds:
            for copy, tensor in zip(self._copies, self._tensors, strict=True):
                copy.copy_(tensor)
        return {"stall": seconds()}


class Disk(Contender):
    name = "disk"

    def __init__(self, shards: list[Shard], directory: Path) -> None:
        self._directory = directory
        self._size = sum(shard.bytes for shard in shards)
        self._block = torch.randint(256, (BLOCK,), dtype=torch.uint8).numpy()

    def save(self, number: int) -> Measured:
        path = self._directory / f"disk-{dist.get_rank()}"
        path.mkdir()
        with _timed() as seconds, (path / "file").open("wb", buffering=0) as file:
            left = self._size
            while left:
                left -= os.write(file.fileno(), memoryview(self._block)[: min(left, BLOCK)])
            os.fsync(file.fileno())
        return {"stall": seconds(), "write": seconds()}


class Ours(Contender):
    def __init__(
        self, mesh: Mesh, config: RunConfig, shards: list[Shard], directory: Path, *, background: bool
    ) -> None:
        self.name = "async" if background else "sync"
        self._shards = shards
        self._saver = Saver(mesh, open_storage(directory / self.name), background=background)
        ranks = mesh.layout.world_size
        self._identity = Identity.of_run(config, world_size=ranks, state={}, metrics={}, tokenizer=None)

    def save(self, number: int) -> Measured:
        begun = self._saver.begin(number, self._shards, self._identity)
        outcome = self._saver.wait()
        assert outcome is not None
        assert outcome.error is None, outcome.error
        return {"stall": begun.stall_seconds, "write": outcome.write_seconds}


class Dcp(Contender):
    """Tensors of one process each, under names of their own: then torch has no plan to make beyond its lists."""

    def __init__(self, rank: int, shards: list[Shard], directory: Path, kind: str) -> None:
        self.name, self._directory = kind, directory
        self._state: dict[str, Tensor] = {f"{rank}/{shard.key}": shard.tensor for shard in shards}
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options) if kind == "dcp_staged" else None

    def save(self, number: int) -> Measured:
        path = self._directory / f"{self.name}-{number}"
        with _timed() as seconds:
            if self.name == "dcp":
                dcp.save(self._state, checkpoint_id=path)
                return {"stall": seconds(), "write": seconds()}
            future = dcp.async_save(self._state, checkpoint_id=path, async_stager=self._stager)
            stall = seconds()
            future.result()
            return {"stall": stall, "write": seconds() - stall}

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def summary(ranks: int, by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds of the slowest rank, and the ratios that matter."""
    total = sum(result["bytes"] for result in by_rank)

    def slowest(name: str, what: str) -> list[float]:
        rounds = zip(*([taken.get(what) for taken in result["taken"][name]] for result in by_rank), strict=True)
        return [max(round_) for round_ in rounds if None not in round_][1:]

    names = list(by_rank[0]["taken"])
    rows = {}
    for name in names:
        stall, write = slowest(name, "stall"), slowest(name, "write")
        rows[name] = {
            "stall_seconds": statistics.median(stall),
            "write_seconds": statistics.median(write) if write else None,
            "bytes_per_second": statistics.median(total / seconds for seconds in write) if write else None,
            "all_stalls": stall,
            "all_writes": write,
        }

    def ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, other, strict=True))

    stall = slowest("async", "stall")
    ratios = {
        "async stall / memcpy": ratio(stall, slowest("memcpy", "stall")),
        "async stall / sync stall": ratio(stall, slowest("sync", "stall")),
        "async stall / dcp_async stall": ratio(stall, slowest("dcp_async", "stall")),
        "async stall / dcp_staged stall": ratio(stall, slowest("dcp_staged", "stall")),
        "async bandwidth / disk": ratio(slowest("disk", "write"), slowest("async", "write")),
        "sync bandwidth / disk": ratio(slowest("disk", "write"), slowest("sync", "write")),
        "sync stall / dcp stall": ratio(slowest("sync", "stall"), slowest("dcp", "stall")),
    }
    return {"ranks": ranks, "bytes": total, "contenders": rows, "ratios": ratios}


def show(result: dict[str, Any]) -> None:
    print(f"{result['ranks']} ranks, {result['bytes'] / 1e9:.2f} GB")
    for name, row in result["contenders"].items():
        write = "" if row["write_seconds"] is None else f"{row['write_seconds']:8.3f} s write"
        speed = "" if row["bytes_per_second"] is None else f"{row['bytes_per_second'] / 1e9:8.2f} GB/s"
        print(f"  {name:12}{row['stall_seconds']:8.3f} s stall{write}{speed}")
    for name, value in result["ratios"].items():
        print(f"  {name:32}{value:6.2f}")


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Gives what tells the seconds since the block began."""
    started = time.perf_counter()
    yield lambda: time.perf_counter() - started


if __name__ == "__main__":
    main()
