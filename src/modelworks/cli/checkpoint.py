"""`modelworks checkpoint`: what is saved, whether it is whole, what to keep; and models in and out.

A place is a run, a directory of checkpoints or a URL of one (`s3://…`); a checkpoint is `PLACE@STEP`, a directory
`step-…` or its URL, and of a place the newest complete one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from modelworks.cli.checkpoint_text import as_json, describe, difference_lines, listing_table, tensor_table
from modelworks.cli.convert import DtypeName, MaxShardSize, Overwrite, run_conversion
from modelworks.cli.exit_codes import FAILED
from modelworks.cli.output import JsonFlag, Output, write_error
from modelworks.config import UserError, format_bytes, nearest

if TYPE_CHECKING:
    from modelworks.checkpoint import Checkpoint, Folder
    from modelworks.checkpoint import Place as Found

Place = Annotated[str, typer.Argument(metavar="PLACE", help="A run, a directory of checkpoints, or a URL of one.")]
One = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="RUN, RUN@STEP, or a checkpoint's directory or URL.")]
_PROGRESS_BYTES = 256 << 20  # checked between two movements of the bar


def list_(place: Place, json: JsonFlag = False) -> None:
    """List checkpoints: step, size, age, metrics, complete or not; the latest, the best, milestones, the resumed one.

    A run that has saved nothing yet has an empty list; any other place without checkpoints is an error.

    Example:
    modelworks checkpoint ls my-run
    modelworks checkpoint ls s3://bucket/my-run
    """
    from modelworks.checkpoint import find_storage, list_checkpoints

    output = Output(json=json)
    with _reading(place):
        found = find_storage(place)
        listed = list_checkpoints(found)
        if not listed:
            _allow_empty(found, place)
    if listed:
        output.console.print(listing_table(listed))
        complete = [entry for entry in listed if entry.state == "complete"]
        total = format_bytes(sum(entry.bytes for entry in listed))
        output.print(f"{found.storage.label}: {len(complete)} complete of {len(listed)}, {total}")
    else:
        output.print(f"no checkpoint in {found.storage.label} yet")
    output.result({"storage": found.storage.label, "checkpoints": [as_json(entry) for entry in listed]})


def show(
    checkpoint: One,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    against: Annotated[
        str | None, typer.Option("--against", help="Another checkpoint or run: show what its configuration has else.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show one checkpoint: layout, sections, sizes; of a half-written one, how far it came.

    Example:
    modelworks checkpoint show my-run
    modelworks checkpoint show my-run@2000 --against other-run
    """
    from modelworks.checkpoint import explain_unfinished, find_folder, names_manifest, open_checkpoint

    output = Output(json=json)
    with _reading(checkpoint):
        folder = find_folder(checkpoint)
        if not names_manifest(folder):
            reasons = list(explain_unfinished(folder, _world_size_nearby(folder)))
            output.print(f"{folder.label}: not complete")
            for reason in reasons:
                output.print(f"  {reason}")
            output.result({"checkpoint": folder.label, "complete": False, "reasons": reasons})
            return
        opened = open_checkpoint(folder)
        values = describe(opened)
        for name, text in values.lines:
            output.print(f"{name:<12} {text}")
        if tensors:
            output.console.print(tensor_table(opened))
        result = {"checkpoint": folder.label, "complete": True, **values.json}
        if against is not None:
            changes = _differences(opened, against)
            output.print()
            for line in difference_lines(changes) or [f"the configuration is that of {against}"]:
                output.print(line)
            result["differences"] = [
                {"key": change.key, "this": change.before, "other": change.after} for change in changes
            ]
    output.result(result)


def verify(
    checkpoint: One,
    everything: Annotated[bool, typer.Option("--all", help="Verify every checkpoint of the place.")] = False,
    json: JsonFlag = False,
) -> None:
    """Read everything once and compare all checksums. Exit code 1 names the file and the tensor that differ.

    Example:
    modelworks checkpoint verify my-run
    modelworks checkpoint verify s3://bucket/my-run --all
    """
    from modelworks.checkpoint import CheckpointError, find_storage

    output = Output(json=json)
    with _reading(checkpoint):
        if everything:
            storage = find_storage(checkpoint).storage
            folders = [storage.folder(name) for name in storage.checkpoints()]
            if not folders:
                raise UserError(f"{storage.label}: no checkpoint is here")
        else:
            folders = _newest_and_damaged(checkpoint)
    failures, checked = [], 0
    for folder in folders:
        try:
            size = _verify(folder, output)
        except (CheckpointError, OSError) as error:
            failures.append(str(error))
        else:
            checked += size
            output.print(f"{folder.label}: whole ({format_bytes(size)} checked)")
    if failures:
        for failure in failures[:-1]:
            write_error(failure, FAILED)
        write_error(failures[-1], FAILED, json=json)
        raise typer.Exit(FAILED)
    output.result({"checkpoints": [folder.label for folder in folders], "bytes": checked, "whole": True})


def prune(
    place: Place,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Keep this many of the newest.")] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, help="Keep multiples of N steps.")] = None,
    best: Annotated[str | None, typer.Option("--best", help="Keep the best by this metric, e.g. val_loss.")] = None,
    highest: Annotated[bool, typer.Option("--highest", help="With --best: the highest value is the best.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, remove nothing.")] = False,
    json: JsonFlag = False,
) -> None:
    """Remove complete checkpoints that need not be kept. At least one complete one always stays.

    Damaged and half-written ones are neither counted nor removed. While a run saves there, it is refused.

    Example:
    modelworks checkpoint prune my-run --keep-last 3 --keep-every 1000 --best val_loss --dry-run
    """
    from modelworks.checkpoint import Retention, find_storage

    output = Output(json=json)
    if keep_last is None and keep_every is None and best is None:
        raise UserError("say what to keep: --keep-last N, --keep-every N or --best METRIC (--dry-run only shows it)")
    with _reading(place), ExitStack() as held:
        found = find_storage(place)
        storage, names = found.storage, found.storage.checkpoints()
        if not names:
            _allow_empty(found, place)
        _check_metric(storage, best)
        if not dry_run:
            held.enter_context(storage.hold())  # not beside a run, which removes by its own rules
        modes: dict[bool, Literal["min", "max"]] = {True: "max", False: "min"}
        retention = Retention(storage, keep_last or 1, keep_every, None if best is None else (best, modes[highest]))
        surplus = retention.surplus()
        sizes = {name: sum(storage.folder(name).sizes().values()) for name in surplus}
        for name in surplus:
            if not dry_run:
                storage.remove(name)
            output.print(f"{'would remove' if dry_run else 'removed'} {name} ({format_bytes(sizes[name])})")
    verb = "would free" if dry_run else "freed"
    output.print(f"{len(names) - len(surplus)} kept, {verb} {format_bytes(sum(sizes.values()))}")
    output.result(
        {"storage": storage.label, "removed": surplus, "dry_run": dry_run, "bytes": sum(sizes.values())},
    )


def export(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A run, a checkpoint or its URL, or another model.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The Hugging Face directory to write.")],
    dtype: DtypeName = None,
    max_shard_size: MaxShardSize = "4GiB",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Write a model as a Hugging Face directory: safetensors by size, index, config, tokeniser.

    Tensors stream through, so that the model is never whole in memory; then logits are compared, layer by layer.

    Example:
    modelworks checkpoint export my-run@best exported --max-shard-size 2GiB --dtype bf16
    """
    run_conversion(src, dst, "hf", None, dtype, max_shard_size, overwrite, json)


def import_(
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A Hugging Face directory, GGUF file, DeepSpeed or Megatron checkpoint."),
    ],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The checkpoint to write.")],
    model: Annotated[
        str | None,
        typer.Option("--model", help="What a DeepSpeed or Megatron checkpoint holds: a preset, YAML, or config.json."),
    ] = None,
    dtype: DtypeName = None,
    max_shard_size: MaxShardSize = "4GiB",
    overwrite: Overwrite = False,
    json: JsonFlag = False,
) -> None:
    """Read a model of another program into a checkpoint, which `init_from`, `generate` and `eval` take.

    Example:
    modelworks checkpoint import SmolLM2-135M smollm2
    modelworks checkpoint import megatron/iter_0001000 imported --model llama-3-8b
    """
    run_conversion(src, dst, "modelworks", model, dtype, max_shard_size, overwrite, json)


commands: dict[str, Callable[..., None]] = {
    "ls": list_,
    "show": show,
    "verify": verify,
    "prune": prune,
    "export": export,
    "import": import_,
}


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Storage that cannot be reached is the user's to put right."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror or error})") from None


def _newest_and_damaged(checkpoint: str) -> list[Folder]:
    """The checkpoint that is asked for; of a place the newest complete one, and those after it, which are not."""
    from modelworks.checkpoint import CheckpointError, find_folder, find_storage

    folder = find_folder(checkpoint)
    try:
        storage = find_storage(checkpoint).storage
    except CheckpointError:  # it is a checkpoint itself
        return [folder]
    names = storage.checkpoints()
    later = names[names.index(folder.name) + 1 :] if "@" not in checkpoint and folder.name in names else []
    return [folder, *map(storage.folder, later)]


def _verify(folder: Folder, output: Output) -> int:
    """All checksums of one checkpoint, with a bar; returns the bytes checked."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from modelworks.checkpoint import open_checkpoint

    opened = open_checkpoint(folder)
    total = sum(folder.sizes().values())
    count = max(1, min(1000, -(-total // _PROGRESS_BYTES)))
    checked = 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=output.console, transient=True, disable=not output.console.is_terminal) as bar:
        task = bar.add_task(folder.name, total=total)
        for index in range(count):
            checked += opened.verify(part=(index, count))
            bar.update(task, completed=checked)
    return checked


def _world_size_nearby(folder: Folder) -> int | None:
    """How many ranks a run has, by the other checkpoints beside an unfinished one."""
    from modelworks.checkpoint import CheckpointError, find_storage, open_checkpoint

    parent = str(folder.label).rpartition("/")[0]
    try:
        storage = find_storage(parent or ".").storage
        names = storage.checkpoints()
    except (CheckpointError, OSError):
        return None
    for name in reversed(names):
        try:
            size = open_checkpoint(storage.folder(name)).layout.get("world_size")
        except (CheckpointError, OSError):
            continue
        return size if isinstance(size, int) else None
    return None


def _differences(opened: Checkpoint, against: str) -> list[Any]:
    """What the configuration of `against`, a run or a checkpoint, has else."""
    from modelworks.checkpoint import find_folder, find_storage, open_checkpoint
    from modelworks.config import differences

    other = None
    if ("@" not in against and (Path(against) / "config.yaml").is_file()) or (Path("runs") / against).is_dir():
        other = find_storage(against).config
    if other is None:
        other = open_checkpoint(find_folder(against)).config
    return differences(opened.config, other)


def _allow_empty(found: Found, place: str) -> None:
    """A run that has saved nothing yet is none of the user's mistakes; any other place without checkpoints is."""
    from modelworks.checkpoint import MANIFEST

    if (Path(place).expanduser() / MANIFEST).is_file():
        raise UserError(f"{place}: is one checkpoint itself; `modelworks checkpoint show {place}` describes it")
    if not found.may_be_empty:
        raise UserError(f"{found.storage.label}: no checkpoint is here (looked for step-…)")


def _check_metric(storage: Any, metric: str | None) -> None:
    """A metric that no checkpoint carries would keep nothing, and say nothing."""
    from modelworks.checkpoint import complete_checkpoints

    if metric is None:
        return
    known = sorted({name for metrics in complete_checkpoints(storage).values() for name in metrics})
    if metric not in known:
        near = nearest(metric, known)
        hint = f"did you mean `{near}`?" if near else f"there are: {', '.join(known) or 'none'}"
        raise UserError(f"--best: no checkpoint in {storage.label} carries `{metric}`; {hint}")
