"""The stop report: why a run ended by itself, which batches and documents led there, and what to do. A page of text.

Made from the run's records, so that it also knows of spikes before the last resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelworks.data import Dataset
from modelworks.records import Record, read_records
from modelworks.train.run_directory import write_atomically

STOP_REPORT = "stopped.md"
_TOLD = ("spike", "rollback", "divergence")
_SPIKES = 16  # the last ones
_DOCUMENTS = 8  # whose text is shown
_CHARACTERS = 240


def write_stop_report(run_dir: Path, step: int, reason: str, kept: str, dataset: Dataset) -> None:
    """step: the last one. reason: what ended the run. kept: in words, what can be gone back to. Raises OSError."""
    events = [row for row in read_records(run_dir / "records.jsonl") if row.name in _TOLD][-_SPIKES:]
    lines = [f"# {run_dir.name} stopped at step {step:,}", "", reason, "", f"What is left: {kept}.", ""]
    if events:
        lines += ["## What led there", "", *_table(events), ""]
        lines += _texts([_fields(event) for event in events if event.name == "spike"], dataset)
    lines += ["## What to do", "", *_advice(dataset)]
    write_atomically(run_dir / STOP_REPORT, "\n".join(lines) + "\n")


def _table(events: Sequence[Record]) -> Iterator[str]:
    yield "| step | what was seen | answer | samples of the batch | highest loss in | documents, by source |"
    yield "|---|---|---|---|---|---|"
    for event in events:
        fields = _fields(event)
        if event.name == "rollback":
            left_out = _span(fields["samples"])
            yield f"| {event.step:,} | | back to step {fields['restarted']:,} | {left_out} were left out | | |"
        elif event.name == "divergence":
            yield f"| {event.step:,} | {fields['text']} | {fields['answer']} | | | |"
        else:
            places = "; ".join(f"{source} {numbers}" for source, numbers in _documents(fields))
            yield (
                f"| {event.step:,} | {fields['reason']} | {fields['answer']} | {_span(fields['samples'])} | "
                f"{_span(fields['highest_loss'])} | {places} |"
            )


def _texts(spikes: Sequence[Mapping[str, Any]], dataset: Dataset) -> Iterator[str]:
    """The beginnings of the documents in the samples with the highest loss, those of the last spikes first."""
    sources = {source.name: source.train for source in dataset.sources}
    seen: dict[tuple[str, int], None] = {}
    for spike in reversed(spikes):
        for row in _suspects(spike):
            for number in range(row["documents"][0], row["documents"][1] + 1):
                seen.setdefault((row["source"], number))
    for source, number in list(seen)[:_DOCUMENTS]:
        if source not in sources or number >= sources[source].n_documents:
            continue
        ids = sources[source].document(number)[:_CHARACTERS].tolist()
        text = dataset.tokenizer.decode(ids)[:_CHARACTERS]
        yield f"Document {number:,} of {source} begins: {json.dumps(text, ensure_ascii=False)}"
        yield ""


def _advice(dataset: Dataset) -> Iterator[str]:
    yield "- Look at the documents above; for the whole of one (here number 12):"
    yield f"  `modelworks data inspect {dataset.directory} --document {dataset.sources[0].name}:12`."
    yield "  Take bad ones out of the source, and start the run anew."
    yield "- Where the documents are fine the rate is too high for the model: lower `optimizer.lr`, lengthen"
    yield "  `schedule.warmup`, or clip harder with `train.grad_clip`."
    yield "- `--resume` goes on from the newest checkpoint. If that is newer than the last good one, remove it first."
    yield "  With `health.spikes=rollback` the resumed run goes back by itself, and leaves the data out."


def _documents(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for row in _suspects(fields)[:_DOCUMENTS]:
        first, last = row["documents"]
        yield row["source"], f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _suspects(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the samples with the highest loss, or of all where that is not known."""
    rows, span = fields["documents"], fields["highest_loss"]
    return [row for row in rows if span is None or span[0] <= row["sample"] <= span[1]]


def _fields(event: Record) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(str(event.value))
    return fields


def _span(samples: Sequence[int] | None) -> str:
    return "" if samples is None else f"{samples[0]:,} to {samples[1]:,}"
