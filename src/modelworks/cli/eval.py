"""`modelworks eval`: a model measured on text, or on public question sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelworks.cli.output import JsonFlag, Output
from modelworks.config import UserError

if TYPE_CHECKING:
    from modelworks.checkpoint import LoadedModel

ROW_TOKENS = 4096  # tokens scored at once


def command(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, a Hugging Face directory or a GGUF file.")],
    data: Annotated[list[Path] | None, typer.Option("--data", help="A text file to score; may be repeated.")] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Question sets, e.g. arc_easy,hellaswag.")] = None,
    task_path: Annotated[
        str | None, typer.Option("--task-path", help="Directory of local task data: <task>/<split>.jsonl or .parquet.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Questions of each task.", min=1)] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens of a row; default: the model's longest.", min=2)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Measure a model: loss, perplexity and bits per byte on text, or accuracy on question sets of lm-eval.

    Example:
    modelworks eval my-run --data notes.txt --data more.txt
    modelworks eval my-run --tasks arc_easy,piqa --limit 100
    """
    if not data and not tasks:
        raise UserError("nothing to measure: give --data FILE or --tasks NAME,…")
    if not tasks and (task_path or limit):
        raise UserError("--task-path and --limit belong to --tasks, which is not given")
    if not data and seq_len:
        raise UserError("--seq-len belongs to --data, which is not given")
    from modelworks.checkpoint import load_model

    output = Output(json=json)
    loaded = load_model(model)
    if loaded.tokenizer is None:
        raise UserError(f"{model}: this model has no tokenizer, so it cannot read text")
    values: dict[str, Any] = {"model": loaded.source}
    if data:
        values |= _score(loaded, data, seq_len, output)
    if tasks:
        values |= _ask(loaded, [name.strip() for name in tasks.split(",") if name.strip()], task_path, limit, output)
    output.result(values)


def _score(loaded: LoadedModel, paths: list[Path], seq_len: int | None, output: Output) -> dict[str, Any]:
    from modelworks.data import text_batches
    from modelworks.train import score_text

    longest = loaded.config.max_seq_len
    if seq_len is not None and seq_len > longest:
        raise UserError(f"--seq-len: got {seq_len}, the model reaches {longest}")
    length = seq_len or min(longest, ROW_TOKENS)
    assert loaded.tokenizer is not None
    text = text_batches(map(_read, paths), loaded.tokenizer, seq_len=length, rows=max(1, ROW_TOKENS // length))
    from rich.progress import Progress

    with Progress(console=output.console, transient=True, disable=not output.console.is_terminal) as bar:
        task = bar.add_task("scoring", total=len(text))
        score = score_text(loaded.model, text, advance=lambda: bar.advance(task))
    output.print(
        f"loss {score.loss:.4f} nats per token, perplexity {score.perplexity:.3f}, "
        f"{score.bits_per_byte:.4f} bits per byte ({score.tokens:,} tokens, {score.n_bytes:,} bytes)"
    )
    return {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
        "tokens": score.tokens,
        "bytes": score.n_bytes,
        "seq_len": length,
    }


def _ask(
    loaded: LoadedModel, names: list[str], task_path: str | None, limit: int | None, output: Output
) -> dict[str, Any]:
    from modelworks.train import TaskRunner

    assert loaded.tokenizer is not None
    runner = TaskRunner(names, task_path=task_path, limit=limit)
    figures = runner.run(loaded.model, loaded.tokenizer, console=output.console)
    for name, value in figures.items():
        output.print(f"{name} {value:.4f}")
    return figures


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # as it is: read_text would make one character of two at \r\n
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a directory, expected a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})") from None
