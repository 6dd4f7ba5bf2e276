"""`modelworks data build` and `modelworks data inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError, format_bytes, load_run_config, nearest

if TYPE_CHECKING:
    from modelworks.data import Dataset
    from modelworks.data.dataset import SourceData


def build(
    config: Annotated[Path, typer.Argument(help="A run description (YAML).", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value changes.", metavar="KEY=VALUE")] = None,
    json: JsonFlag = False,
) -> None:
    """Read, tokenise and store the data of a run description; training does it too. Done before: found again at once.

    Example:
    modelworks data build configs/quickstart.yaml data.validation=2%
    """
    from modelworks.data import build_dataset

    output = Output(json=json)
    run = load_run_config(config, overrides or [])
    dataset = build_dataset(run.data)
    _print_table(dataset, output)
    output.result({**_figures(dataset), "reused": dataset.reused})


def inspect(
    directory: Annotated[
        Path, typer.Argument(help="A data set's directory, as `data build` prints it.", metavar="DIR")
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    samples: Annotated[int, typer.Option("--samples", help="Documents to show, decoded from their tokens.", min=0)] = 2,
    documents: Annotated[
        list[str] | None,
        typer.Option("--document", help="Show this training document whole.", metavar="SOURCE:NUMBER"),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show what a data set holds: sources, documents, tokens, bytes, and samples of its text.

    Example:
    modelworks data inspect ~/.cache/modelworks/data/datasets/ce69602a33c59ebf68551921 --verify
    """
    from modelworks.data import open_dataset

    output = Output(json=json)
    dataset = open_dataset(directory)
    asked = [_place(dataset, text) for text in documents or []]
    _print_table(dataset, output)
    shown: list[dict[str, Any]] = [
        {"source": source.name, "document": number, "text": _decoded(dataset, source.train, number)}
        for source in dataset.sources
        for number in ([] if asked else _evenly(source.train.n_documents, samples))
    ]
    shown += [
        {"source": source.name, "document": number, "text": _decoded(dataset, source.train, number, whole=True)}
        for source, number in asked
    ]
    for sample in shown:
        output.print(f"\n--- {sample['source']}, training document {sample['document']}")
        output.print(sample["text"])
    verified = dataset.verify() if verify else None
    if verified is not None:
        output.print(f"\nverified: {verified} files match their checksums")
    output.result({**_figures(dataset), "samples": shown, "verified_files": verified})


commands = {"build": build, "inspect": inspect}

_SAMPLE_TOKENS = 64


def _place(dataset: Dataset, text: str) -> tuple[SourceData, int]:
    """Of `SOURCE:NUMBER`."""
    name, _, number = text.rpartition(":")
    sources = {source.name: source for source in dataset.sources}
    if name not in sources or not number.isdecimal():
        near = nearest(name, sources)
        hint = f" (did you mean `{near}:{number}`?)" if near and near != name else ""
        raise UserError(
            f"--document: got {text!r}, expected a source and a number, as in `{next(iter(sources))}:0`{hint}"
        )
    count = sources[name].train.n_documents
    if int(number) >= count:
        raise UserError(f"--document: {name} has {count:,} training documents, numbered from 0; got {number}")
    return sources[name], int(number)


def _decoded(dataset: Dataset, stream: Any, number: int, *, whole: bool = False) -> str:
    ids = stream.document(number)
    if whole:
        return dataset.tokenizer.decode(ids.tolist())
    text = dataset.tokenizer.decode(ids[:_SAMPLE_TOKENS].tolist())
    return text + (" …" if len(ids) > _SAMPLE_TOKENS else "")


def _evenly(count: int, wanted: int) -> list[int]:
    """Up to `wanted` places spread over [0, count)."""
    return sorted({place * count // wanted for place in range(wanted)}) if count else []


def _figures(dataset: Dataset) -> dict[str, Any]:
    sources = []
    for source in dataset.sources:
        for split, stream in (("train", source.train), ("validation", source.validation)):
            sources.append(
                {
                    "source": source.name,
                    "split": split,
                    "documents": stream.n_documents,
                    "tokens": len(stream),
                    "text_bytes": stream.record.text_bytes,
                    "bytes_per_token": stream.record.text_bytes / len(stream) if len(stream) else None,
                }
            )
    return {
        "directory": str(dataset.directory),
        "vocab_size": dataset.vocab_size,
        "train_tokens": dataset.train_tokens,
        "validation_tokens": dataset.validation_tokens,
        "streams": sources,
        "skipped": {source.name: source.skipped for source in dataset.sources},
    }


def _print_table(dataset: Dataset, output: Output) -> None:
    from rich.table import Table

    table = Table("source", "split", box=None)
    for heading in ("documents", "tokens", "text", "bytes/token"):
        table.add_column(heading, justify="right")
    for row in _figures(dataset)["streams"]:
        ratio = row["bytes_per_token"]
        table.add_row(
            row["source"],
            row["split"],
            f"{row['documents']:,}",
            f"{row['tokens']:,}",
            format_bytes(row["text_bytes"]),
            "" if ratio is None else f"{ratio:.2f}",
        )
    output.console.print(table)
    output.print(f"vocabulary {dataset.vocab_size:,}, {dataset.dtype.itemsize} bytes a token on disk")
    output.print(str(dataset.directory))
