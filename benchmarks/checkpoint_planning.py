"""How long one rank needs to plan a load from a checkpoint that 1,024 ranks wrote: metadata only, no weights.

    python -m benchmarks.checkpoint_planning            # the shapes of Llama 3 70B
    python -m benchmarks.checkpoint_planning --quick    # 8 of its 80 layers; writes no results

The checkpoint is as a run of tp 8, pp 4, dp_shard 32 writes it: weights in bf16; master weights and both moments of
AdamW in float32; every matrix cut by tensor parallelism and then by rows over dp_shard, norms by dp_shard alone. Rank 0
makes the manifest of 1,024 part files (`write_manifest`); a rank of a run of tp 4, pp 2, dp_shard 64 then reads and
checks it (`read_manifest`) and finds for every slice that it needs the pieces, files and boxes that hold it. Writes
results/checkpoint_planning.json.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._results import write_results
from modelworks.checkpoint.commit import Identity, write_manifest
from modelworks.checkpoint.formats.safetensors_files import DTYPES
from modelworks.checkpoint.grid import Box, cells_in, overlap, whole_box
from modelworks.checkpoint.manifest import Manifest, read_manifest
from modelworks.checkpoint.part import File, Part, Piece
from modelworks.config import ModelConfig, parameter_shapes
from modelworks.layout import ShardSpec

SHAPE = {"n_heads": 64, "n_kv_heads": 8, "d_model": 8192, "d_ff": 28672, "vocab_size": 128256, "max_seq_len": 8192}
WRITTEN, WANTED = {"tp": 8, "pp": 4, "dp": 32}, {"tp": 4, "pp": 2, "dp": 64}
STATES = [("model", "", "BF16"), *(("optimizer", f"/{state}", "F32") for state in ("master", "exp_avg", "exp_avg_sq"))]
TARGET = 2.0  # seconds, for reading, checking and planning
BLOCK = 1 << 21


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few layers; writes no results")
    parser.add_argument("--repeat", type=int, default=5, help="the median of so many is told")
    arguments = parser.parse_args()
    config = ModelConfig(**SHAPE, n_layers=8 if arguments.quick else 80)
    folder = Simulated()
    parts = [part_of(config, rank) for rank in range(math.prod(WRITTEN.values()))]
    n_pieces = sum(len(part.pieces) for part in parts)
    folder.files |= {file.name: file.bytes for part in parts for file in part.files}
    started = time.perf_counter()
    write_manifest(folder, 1000, Identity(config, None, WRITTEN, {}, {}, None), parts)
    figures: dict[str, Any] = {
        "ranks": len(parts),
        "tensors": len(STATES) * len(parameter_shapes(config)),
        "pieces": n_pieces,
        "manifest_bytes": folder.sizes()["manifest.json"],
        "write_manifest_seconds": time.perf_counter() - started,
    }
    del parts
    runs = [planned(folder, config, rank) for rank in range(arguments.repeat)]
    figures |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    started = time.perf_counter()
    everything = sum(1 for entry in read_manifest(folder).tensors for _ in cells_in(entry.cuts, whole_box(entry.shape)))
    assert everything == n_pieces
    figures["read_and_plan_all_pieces_seconds"] = time.perf_counter() - started
    total = figures["read_seconds"] + figures["plan_seconds"]
    figures |= {"read_and_plan_seconds": total, "target_seconds": TARGET, "met": total <= TARGET}
    print(
        f"{n_pieces:,} pieces of {figures['tensors']:,} tensors by {figures['ranks']:,} ranks: manifest of "
        f"{figures['manifest_bytes'] / 2**20:.1f} MiB made in {figures['write_manifest_seconds']:.2f} s; read and "
        f"checked in {figures['read_seconds']:.2f} s; one rank's load planned in {figures['plan_seconds']:.3f} s "
        f"({figures['reads']:,.0f} reads): {total:.2f} s of {TARGET:.0f} s"
    )
    if not arguments.quick:
        print(write_results("checkpoint_planning", figures))


def planned(folder: Simulated, config: ModelConfig, rank: int) -> dict[str, float]:
    started = time.perf_counter()
    manifest = read_manifest(folder)
    read = time.perf_counter()
    reads = sum(1 for _ in plan(manifest, config, rank))
    return {"read_seconds": read - started, "plan_seconds": time.perf_counter() - read, "reads": reads}


def plan(manifest: Manifest, config: ModelConfig, rank: int) -> Iterator[tuple[str, str, Box]]:
    """(file, key, box of the whole tensor) for all that a rank of the wanted layout holds."""
    wanted = {name: spec.bounds for name, spec in held(config, rank, WANTED)}
    for entry in manifest.tensors:
        bounds = wanted.get(entry.name.partition("/")[0])
        if bounds is not None:
            for cell in cells_in(entry.cuts, bounds):
                yield manifest.files[int(entry.files[cell.index])].name, entry.key, overlap(cell.box, bounds)


def held(config: ModelConfig, rank: int, layout: Mapping[str, int]) -> Iterator[tuple[str, ShardSpec]]:
    """What a rank holds, and writes: tensor parallel ranks vary fastest, then dp_shard, then stages."""
    tp, dp, pp = rank % layout["tp"], rank // layout["tp"] % layout["dp"], rank // (layout["tp"] * layout["dp"])
    for name, shape in parameter_shapes(config).items():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        last = pp == layout["pp"] - 1
        mine = (
            layer * layout["pp"] // config.n_layers == pp
            if layer is not None
            else (pp == 0 if name.startswith("embedding") else last)
        )
        if not mine:
            continue
        spec = ShardSpec.whole(name, shape)
        if len(shape) == 2:
            spec = spec.cut(1 if name.endswith(("attention.o.weight", "down.weight")) else 0, layout["tp"], tp)
        elif tp:
            continue
        yield name, spec.cut(0, layout["dp"], dp)


def part_of(config: ModelConfig, rank: int) -> Part:
    """What a rank would have written; the digests are random."""
    source = random.Random(rank)
    pieces, size = [], 100_000  # for the header
    for name, spec in held(config, rank, WRITTEN):
        for section, suffix, dtype in STATES:
            n_bytes = spec.n_local * DTYPES[dtype].itemsize
            digests = "".join(f"{source.getrandbits(64):016x}" for _ in range(-(-n_bytes // BLOCK)))
            pieces.append(Piece(section, name + suffix, dtype, spec.shape, spec.bounds, 0, digests))
            size += n_bytes
    return Part(rank, [File(f"rank-{rank:05d}.safetensors", size, f"{source.getrandbits(64):016x}")], pieces)


class Simulated:
    """A folder of files of which only those of the manifest have contents."""

    label, name = "simulated/step-00001000", "step-00001000"

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self._contents: dict[str, bytes] = {}

    def sizes(self) -> dict[str, int]:
        return self.files | {name: len(data) for name, data in self._contents.items()}

    def size(self, file: str) -> int | None:
        return self.sizes().get(file)

    def list(self) -> list[str]:
        return sorted(self.sizes())

    def local(self) -> Path | None:
        return None

    def read(self, file: str, start: int = 0, length: int | None = None) -> bytes | None:
        data = self._contents.get(file)
        return data if data is None or length is None else data[start : start + length]

    def file_name(self, stem: str, suffix: str) -> str:
        return f"{stem}{suffix}"

    @contextmanager
    def create(self, file: str) -> Iterator[io.BytesIO]:
        collected = io.BytesIO()
        yield collected
        self._contents[file] = collected.getvalue()


if __name__ == "__main__":
    main()
