"""`modelworks`: finds the command, imports its file alone, and turns every outcome into an exit code.

How to add a command: write its line in `COMMANDS` below and a file `cli/<command>.py` that defines either

    def command(...) -> None: ...                      a plain function with typer annotations, or
    commands = {"ls": list_runs, "show": show_run}     several, for `modelworks <command> <name>`.

The function's docstring is its help; what follows a line `Example:` there is printed last, as it is written.
A command returns normally (exit code 0), raises `UserError` (2) or `typer.Exit(75)` when preempted; anything else
is a defect of ours (1). Under `--json` (`output.JsonFlag`) the last line of stdout is one JSON object.

The file of a command is imported only when that command is called, so `modelworks --help` is instant.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from modelworks import __version__
from modelworks.cli.exit_codes import DONE, FAILED, INTERRUPTED, USER_ERROR
from modelworks.cli.output import write_error
from modelworks.config import UserError

SUMMARY = "Plan, verify, train, align, compress and serve language models from one run description."
COMMANDS = {
    "plan": "Predict memory, time and cost of a run, and find its best layout.",
    "train": "Train a model from a run description.",
    "verify": "Prove that a layout computes what one process does.",
    "tune": "Find the batch and the learning rate of a run; check µP.",
    "runs": "List, show and compare runs.",
    "generate": "Continue a prompt with a model.",
    "serve": "Serve a model over HTTP, with OpenAI's API.",
    "batch": "Answer a file of requests with a model, offline.",
    "bench-serve": "Measure an OpenAI-compatible endpoint under a load.",
    "eval": "Measure a model on text or on question sets.",
    "checkpoint": "List, verify and prune checkpoints; export and import models.",
    "convert": "Convert a model between formats.",
    "data": "Build and inspect tokenised data.",
    "doctor": "Say what this machine has and what will be chosen for it.",
}

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EISDIR)

# typer does not export these two: the base of all its complaints about a command line, whatever its version
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def run() -> None:
    """The console script: runs the command line and exits."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`): Python then has no stream at all
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  open as long as the process
    code = DONE
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()  # what is still buffered: a reader that left is no failure here either
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:  # stdout itself cannot be written, such as a file on a full disk
        _silence_stdout()
        if code == DONE:  # else the command has failed and said why
            print(f"error: writing failed ({error.strerror})", file=sys.stderr)
            code = FAILED
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name); returns the exit code."""
    debug = "--debug" in arguments[:1] or os.environ.get("MODELWORKS_DEBUG", "") not in ("", "0")
    json = "--json" in arguments
    try:
        result = build_app(arguments)(list(arguments) or ["--help"], prog_name="modelworks", standalone_mode=False)
        if result == INTERRUPTED:  # typer turns KeyboardInterrupt into this code
            raise KeyboardInterrupt
        return result if isinstance(result, int) else DONE
    except SystemExit as stop:  # typer's answer to a broken pipe
        if isinstance(stop.__context__, BrokenPipeError):
            _silence_stdout()
            return DONE
        return stop.code if isinstance(stop.code, int) else FAILED
    except typer.Exit as stop:  # raised outside a command by some versions of typer
        return stop.exit_code
    except UserError as error:
        write_error(str(error), USER_ERROR, json=json)
        return USER_ERROR
    except (KeyboardInterrupt, typer.Abort):
        write_error("interrupted", INTERRUPTED, json=json)
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return DONE
    except _CommandLineError as error:
        write_error(f"{error.format_message()}{_see_help(error)}", USER_ERROR, json=json)  # type: ignore[attr-defined]
        return USER_ERROR
    except Exception as error:
        if debug:
            traceback.print_exc()
        write_error(_not_written(error) or _unexpected(error), FAILED, json=json)
        return FAILED


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command tree for this command line: the command that is called, whole, and the names of the others."""
    app = typer.Typer(
        help=SUMMARY,
        epilog="Start here: modelworks train configs/quickstart.yaml",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == called:
            _add_command(app, name, summary)
        else:
            app.command(name, help=summary)(_not_called)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"modelworks {__version__}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: MODELWORKS_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    # `main` reads --debug itself: it must hold before any command is parsed
    return None


def _not_called() -> None:
    raise AssertionError("a command that was not named cannot run")


def _add_command(app: typer.Typer, name: str, summary: str) -> None:
    module = import_module(f"modelworks.cli.{name.replace('-', '_')}")
    group: dict[str, Callable[..., Any]] | None = getattr(module, "commands", None)
    if group is None:
        _register(app, name, module.command)
        return
    inner = typer.Typer(help=summary, rich_markup_mode=None)
    inner.callback()(lambda: None)
    for inner_name, function in group.items():
        _register(inner, inner_name, function)
    app.add_typer(inner, name=name)


def _register(app: typer.Typer, name: str, function: Callable[..., Any]) -> None:
    text, _, example = inspect.cleandoc(function.__doc__ or "").partition("Example:")
    # \b keeps typer from joining the lines of an example
    epilog = "\b\nExample:\n" + "\n".join(f"  {line.strip()}" for line in example.strip().splitlines())
    app.command(name, help=text.strip(), epilog=epilog if example else None)(function)


def _see_help(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f" (see `{context.command_path} --help`)" if context else ""


def _not_written(error: Exception) -> str | None:
    """What to say where a file cannot be written: a full disk, a place without permission. None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _CANNOT_WRITE:
        return None
    place = error.filename2 or error.filename
    return f"{place}: cannot be written ({error.strerror})" if place else f"writing failed ({error.strerror})"


def _unexpected(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}modelworks{os.sep}" in frame.filename] or frames
    place = f" at {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
    text = " ".join(str(error).split()) or "no message"
    return f"internal error{place}: {type(error).__name__}: {text} (MODELWORKS_DEBUG=1 shows the trace)"


def _silence_stdout() -> None:
    """The reader of our output left (`| head`): what remains goes nowhere, without a complaint at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
