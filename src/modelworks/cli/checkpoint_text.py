"""What `modelworks checkpoint` prints about checkpoints, for people and as JSON."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from modelworks.config import Difference, count_parameters, format_bytes, format_count, show_value

if TYPE_CHECKING:
    from modelworks.checkpoint import Checkpoint, Listed

_METRICS_SHOWN = 3
_PROBLEM_WIDTH = 100


def listing_table(listed: Sequence[Listed]) -> Any:
    """One row for each checkpoint."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, side in (("step", "right"), ("size", "right"), ("age", "right"), ("metrics", "left"), ("", "left")):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    for entry in listed:
        row = [
            f"{entry.step:,}",
            format_bytes(entry.bytes),
            _age(entry.created),
            _metrics(entry.metrics),
            _state(entry),
        ]
        table.add_row(*map(Text, row))
    return table


def as_json(entry: Listed) -> dict[str, Any]:
    return {
        "name": entry.folder.name,
        "path": entry.folder.label,
        "step": entry.step,
        "bytes": entry.bytes,
        "created": entry.created.isoformat() if entry.created else None,
        "metrics": entry.metrics,
        "state": entry.state,
        "problem": entry.problem or None,
        "marks": list(entry.marks),
    }


@dataclass(frozen=True)
class Description:
    """lines: (name, text) for people. json: the same values."""

    lines: list[tuple[str, str]]
    json: dict[str, Any]


def describe(checkpoint: Checkpoint) -> Description:
    """What a complete checkpoint is and holds."""
    head = checkpoint.manifest.head
    sizes = checkpoint.folder.sizes()
    model = checkpoint.model_config
    layout = {key: value for key, value in checkpoint.layout.items() if not isinstance(value, dict | list)}
    sections = {section: _section(checkpoint, section) for section in checkpoint.sections()}
    lines = [
        ("checkpoint", checkpoint.label),
        ("step", f"{checkpoint.step:,}"),
        ("saved", f"{head.created} by {head.writer}, format version {head.version}"),
        ("model", f"{model.family}, {format_count(count_parameters(model).total)} parameters"),
        (
            "run",
            f"none: {head.state.get('origin', 'a model alone')}" if head.config is None else _run_name(head.config),
        ),
        *([("resumed from", str(resumed))] if (resumed := head.state.get("resumed_from")) else []),
        ("layout", _layout(layout)),
        ("files", f"{len(sizes)} files, {format_bytes(sum(sizes.values()))}"),
        ("tokenizer", "yes" if head.tokenizer else "no"),
        ("metrics", _metrics(checkpoint.metrics, limit=None) or "none"),
    ]
    for name, section in sections.items():
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in section["dtypes"].items())
        lines.append((name, f"{section['tensors']:,} tensors ({dtypes}), {format_bytes(section['bytes'])}"))
    values = {
        "step": checkpoint.step,
        "created": head.created,
        "writer": head.writer,
        "version": head.version,
        "model": head.model,
        "layout": checkpoint.layout,
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "metrics": checkpoint.metrics,
        "sections": sections,
    }
    return Description(lines, values)


def tensor_table(checkpoint: Checkpoint) -> Any:
    """Every tensor: full name, dtype, shape, bytes, and in how many pieces it lies."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, side in (("tensor", "left"), ("dtype", "left"), ("shape", "left"), ("size", "right")):
        table.add_column(heading, justify=side, overflow="fold")  # type: ignore[arg-type]
    table.add_column("pieces", justify="right")
    for entry in checkpoint.manifest.tensors:
        pieces = entry.piece_bytes()
        row = [entry.full_name, entry.dtype, str(list(entry.shape)), format_bytes(int(pieces.sum())), str(len(pieces))]
        table.add_row(*map(Text, row))
    return table


def difference_lines(changes: Sequence[Difference]) -> list[str]:
    return [f"{change.key}: {show_value(change.before)} here, {show_value(change.after)} there" for change in changes]


def _section(checkpoint: Checkpoint, section: str) -> dict[str, Any]:
    types = checkpoint.tensor_types(section)
    dtypes: dict[str, int] = {}
    for dtype, _ in types.values():
        name = str(dtype).removeprefix("torch.")
        dtypes[name] = dtypes.get(name, 0) + 1
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in types.values())
    return {"tensors": len(types), "bytes": size, "dtypes": dtypes}


def _run_name(config: dict[str, Any]) -> str:
    return str(config.get("name", "without a name"))


def _layout(values: dict[str, Any]) -> str:
    """The axes that split something, and the rest only where there is nothing else."""
    split = [f"{key} {value}" for key, value in values.items() if type(value) is int and value > 1]
    return ", ".join(split) or "one process"


def _metrics(metrics: dict[str, Any], limit: int | None = _METRICS_SHOWN) -> str:
    shown = list(metrics.items())[:limit]
    text = ", ".join(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in shown)
    return text + (f" and {len(metrics) - len(shown)} more" if len(metrics) > len(shown) else "")


def _state(entry: Listed) -> str:
    if entry.state == "complete":
        return ", ".join(entry.marks)
    problem = entry.problem if len(entry.problem) <= _PROBLEM_WIDTH else f"{entry.problem[:_PROBLEM_WIDTH]}…"
    return f"{entry.state}: {problem}"


def _age(created: datetime.datetime | None) -> str:
    if created is None:
        return "-"
    seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - created).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
