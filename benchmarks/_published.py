"""Published measurements as candidates of the planner: how the columns of such a table are read.

A row says what was run; `_published_runs` says what that means for software, split and numerics. A row that cannot be
predicted (a device, a program or a precision that nobody knows, a size that is missing, no number, or impossible) is
left out with the reason, never guessed at. Columns other than those in `NEEDED` may be absent.

    feed-forward   gated where d_ff is not 4 d (GPT, MPT and Nemotron have two matrices, Llama and its kin three)
    vocabulary     filled up to 128 times tp, as Megatron's and others' are
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import _published_runs as runs
from modelworks.config import UserError
from modelworks.hardware import device
from modelworks.plan import Machine, Shape, Work

GIB = 2.0**30
TIERS = ("A", "B")  # of rows whose step time counts; a table without tiers counts whole
NEEDED = ("layers", "hidden", "seq", "gpu", "n_gpus", "micro_batch", "global_batch_seqs")
MEASURED = ("step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "memory_gib")
OPTIONAL = (
    "check_flag", "cp", "dp", "ep", "ffn_hidden", "heads", "id", "kv_heads", "model", "moe_ffn", "n_experts", "notes",
    "pp", "precision", "recompute", "sharding", "software", "source", "task", "tier", "top_k", "tp", "vocab", "vp",
)  # fmt: skip
POSITIVE = (
    *(name for name in NEEDED if name != "gpu"),
    *MEASURED,
    "cp",
    "dp",
    "ffn_hidden",
    "heads",
    "kv_heads",
    "pp",
    "tp",
)
NUMBERS = (*POSITIVE, "ep", "moe_ffn", "n_experts", "top_k", "vocab", "vp")  # the others may be 0: nothing of the kind

# What the models' public config.json say and the table has no column for: sparse layers, the shared expert (as one more
# that each token is sent to), and the width of an expert.
KNOWN = {
    "Maverick": {"n_sparse": 24.0, "experts_per_token": 2.0, "d_expert": 8192.0},
    "DeepSeek-V3": {"n_sparse": 58.0, "experts_per_token": 9.0, "d_expert": 2048.0},
}
DEVICES = {
    "A100-80GB-SXM": "A100-SXM-80GB",
    "A100-40GB-SXM": "A100-SXM-40GB",
    "A100-SXM": "A100-SXM-80GB",
    "H100-80GB-SXM": "H100-SXM-80GB",
    "V100-32GB": "V100-SXM2-32GB",
}


@dataclass(frozen=True)
class Row:
    """One measurement. device: the catalogue's name. step_time in seconds, memory in bytes; None where not printed."""

    id: str
    source: str
    device: str
    work: Work
    recompute: str
    step_time: float | None
    memory: float | None
    out_of_memory: bool
    cells: Mapping[str, str]


def read_rows(path: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows that can be predicted, and why others cannot: reason -> how many."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    for number, cells in enumerate(_table(path), 1):
        reason = _unusable(cells)
        if reason is None:
            try:
                rows.append(_row(cells, number))
            except UserError as error:
                reason = str(error)
        if reason is not None:
            skipped[reason] = skipped.get(reason, 0) + 1
    return rows, skipped


def stack(rows: Sequence[Row]) -> Work:
    """All rows as one `Work` of columns."""
    works = [row.work for row in rows]
    parts = {
        name: type(getattr(works[0], name)).stacked([getattr(work, name) for work in works])
        for name in ("shape", "split", "machine", "numerics", "software")
    }
    return replace(works[0], **parts)


def sources(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.source for row in rows))


def _table(path: Path) -> list[dict[str, str]]:
    """Its rows, every known column filled in with "" where it is absent. Raises UserError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = set(reader.fieldnames or ())
            table = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if absent := [name for name in NEEDED if name not in names]:
        raise UserError(f"{path}: no column {', '.join(absent)}")
    if not names & set(MEASURED):
        raise UserError(f"{path}: no column with measurements, expected one of {', '.join(MEASURED)}")
    known = (*NEEDED, *MEASURED, *OPTIONAL)
    return [{name: (cells.get(name) or "").strip() for name in known} for cells in table]


def _unusable(cells: Mapping[str, str]) -> str | None:
    if cells["tier"] not in ("", *TIERS, "B-mem"):
        return f"tier {cells['tier']}"
    if cells["check_flag"]:
        return "contradiction flagged in the table"
    if missing := [name for name in NEEDED if not cells[name]]:
        return f"no {', '.join(missing)}"
    if not any(cells[name] for name in MEASURED):
        return "nothing measured"
    if wrong := [name for name in NUMBERS if cells[name] and not _is_amount(cells[name], name in POSITIVE)]:
        return f"{', '.join(wrong)}: no number that can be"
    degrees = math.prod(runs.number(cells, name, 1.0) for name in ("tp", "pp", "cp", "dp"))
    if float(cells["n_gpus"]) % degrees:
        return "tp x pp x cp x dp does not divide the devices"
    if float(cells["layers"]) < runs.number(cells, "pp", 1.0):
        return "more stages than layers"
    try:
        device(_device(cells["gpu"]))
    except UserError:
        return f"device {cells['gpu']} is not in the catalogue"
    return None


def _is_amount(text: str, positive: bool) -> bool:
    try:
        return 0.0 <= float(text) < math.inf and (float(text) > 0.0 or not positive)
    except ValueError:
        return False


def _row(cells: Mapping[str, str], number: int) -> Row:
    program = runs.software(cells)
    split = runs.split(cells, program)
    numerics = runs.numerics(cells)
    precision = cells["precision"].lower() or "bf16"
    machine = Machine.of(device(_device(cells["gpu"])), precision, attention=runs.attention(program))
    if (network := runs.network(cells)) is not None:
        machine = machine.with_(network_bandwidth=network)
    name = cells["id"] or f"row-{number}"
    return Row(
        id=name,
        source=name.rsplit("-", 1)[0],
        device=device(_device(cells["gpu"])).name,
        work=Work(_shape(cells), split, machine, numerics, program),
        recompute=cells["recompute"],
        step_time=_step_time(cells) if cells["tier"] in ("", *TIERS) else None,
        memory=float(cells["memory_gib"]) * GIB if cells["memory_gib"] else None,
        out_of_memory="OUT OF MEMORY" in cells["notes"],
        cells=cells,
    )


def _step_time(cells: Mapping[str, str]) -> float | None:
    for name in ("step_time_s", "derived_step_time_s"):
        if cells[name]:
            return float(cells[name])
    if cells["tokens_per_s_per_gpu"]:
        tokens = float(cells["global_batch_seqs"]) * float(cells["seq"])
        return tokens / (float(cells["tokens_per_s_per_gpu"]) * float(cells["n_gpus"]))
    return None


def _shape(cells: Mapping[str, str]) -> Shape:
    hidden, layers = float(cells["hidden"]), float(cells["layers"])
    heads = runs.number(cells, "heads", max(1.0, hidden // 128))
    d_ff = runs.number(cells, "ffn_hidden", 4.0 * hidden)
    experts = runs.number(cells, "n_experts", 0.0)
    gated = d_ff != 4.0 * hidden
    known = next((facts for name, facts in KNOWN.items() if name in cells["model"]), {})
    shape = Shape(
        n_layers=layers,
        d_model=hidden,
        n_heads=heads,
        n_kv_heads=runs.number(cells, "kv_heads", heads),
        head_dim=hidden / heads,
        d_ff=d_ff,
        vocab_size=_padded(runs.number(cells, "vocab", 0.0) or 51200.0, 128.0 * runs.number(cells, "tp", 1.0)),
        matrices=3.0 if gated else 2.0,
        n_experts=experts,
        experts_per_token=runs.number(cells, "top_k", 0.0) if experts else 0.0,
        d_expert=runs.number(cells, "moe_ffn", d_ff) if experts else 0.0,
        n_sparse=layers if experts else 0.0,
        tied=0.0 if gated else 1.0,
        norms=1.0 if gated else 2.0,
        biases=0.0 if gated else 9.0 * hidden,
        position_rows=0.0,
        dropout=0.0,
        rotary=1.0 if gated else 0.0,
    )
    return shape.with_(**known)


def _padded(size: float, multiple: float) -> float:
    return -(-size // multiple) * multiple


def _device(name: str) -> str:
    return DEVICES.get(name, name.replace(" ", "-"))
