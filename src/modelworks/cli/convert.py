"""`modelworks convert`: a model from one format to another, checked before it appears."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError, format_bytes, nearest, parse_bytes

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TARGETS = ("hf", "modelworks")


DtypeName = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; without it weights stay as they are.")
]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", help="Size of one weight file.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a model that lies at DST.")]


def command(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A run, checkpoint, Hugging Face directory or GGUF file.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The directory to write.")],
    to: Annotated[str, typer.Option("--to", help="hf (a Hugging Face directory) or modelworks (a checkpoint).")],
    dtype: DtypeName = None,
    max_shard_size: MaxShardSize = "4GiB",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Convert a model between our checkpoint and Hugging Face's directory, both ways, and from GGUF.

    The result is read back and its logits compared with the source's before it appears at DST.

    Example:
    modelworks convert my-run exported --to hf
    modelworks convert model.gguf imported --to modelworks
    """
    if to not in TARGETS:
        raise UserError(f"--to: got {to!r}, expected hf or modelworks{_hint(to, TARGETS)}")
    run_conversion(src, dst, to, None, dtype, max_shard_size, overwrite, json)


def run_conversion(
    src: str,
    dst: Path,
    to: str,
    model: str | None,
    dtype: str | None,
    max_shard_size: str,
    overwrite: bool,
    json: bool,
) -> None:
    """What `convert`, `checkpoint export` and `checkpoint import` do; the arguments are those of the command line."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: got {dtype!r}, expected fp32, bf16 or fp16{_hint(dtype, DTYPES)}")
    try:
        max_shard_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise UserError(f"--max-shard-size: got {max_shard_size!r}, expected {error}") from None
    if max_shard_bytes == 0:
        raise UserError("--max-shard-size: got 0, expected a size such as 4GiB")
    import torch

    from modelworks.checkpoint import convert

    output = Output(json=json)
    started = time.monotonic()
    try:
        with _Progress(output) as progress:
            done = convert(
                src,
                dst,
                to,  # type: ignore[arg-type]  # checked above
                model=model,
                dtype=getattr(torch, DTYPES[dtype]) if dtype else None,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                progress=progress,
            )
    except OSError as error:
        raise UserError(f"{dst}: cannot be written ({error.strerror or error})") from None
    seconds = time.monotonic() - started
    output.print(f"{done.source} -> {done.path}")
    for remark in done.remarks:
        output.print(remark)
    output.print(
        f"{done.tensors} tensors, {format_bytes(done.bytes)}; "
        f"logits read back: largest difference {done.max_difference:.1e}; {seconds:.1f} s"
    )
    output.result(
        {
            "source": done.source,
            "path": str(done.path),
            "to": done.to,
            "tensors": done.tensors,
            "bytes": done.bytes,
            "max_difference": done.max_difference,
            "remarks": list(done.remarks),
            "seconds": round(seconds, 3),
        }
    )


def _hint(word: str, known: tuple[str, ...] | dict[str, str]) -> str:
    near = nearest(word, known)
    return f" (did you mean `{near}`?)" if near else ""


class _Progress:
    """A bar on the console, moved by bytes written; called with (done, total)."""

    def __init__(self, output: Output) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=output.console,
            transient=True,
        )
        self._task = self._bar.add_task("converting", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        doing = "converting" if done < total else "reading back and comparing logits"
        self._bar.update(self._task, completed=done, total=total, description=doing)
