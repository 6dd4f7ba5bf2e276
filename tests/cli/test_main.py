"""The command line's frame: instant help, exit codes, one line for every failure, JSON last."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer

from modelworks.cli import main as frame
from modelworks.cli.output import JsonFlag, Output, json_line
from modelworks.config import UserError

PROGRAM = [sys.executable, "-c", "from modelworks.cli.main import run; run()"]


def shell(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=60, **more)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Makes a function the command `train`."""

    def install(function: Callable[..., None]) -> None:
        module = ModuleType("modelworks.cli.train")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "modelworks.cli.train", module)

    return install


def test_help_is_instant() -> None:
    def seconds() -> float:  # of processors, which others cannot make longer
        before = os.times()
        done = shell("--help")
        assert done.returncode == 0
        assert "train" in done.stdout
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.4


def test_help_imports_no_engine() -> None:
    code = (
        "import sys; from modelworks.cli.main import main; main(['--help']);"
        "print([name for name in ('torch', 'numpy', 'pydantic', 'yaml', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", list(frame.COMMANDS))
def test_every_command_has_help_with_an_example(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    module = frame.import_module(f"modelworks.cli.{name.replace('-', '_')}")
    functions = getattr(module, "commands", None)
    for words in [[name, inner] for inner in functions] if functions else [[name]]:
        assert frame.main([*words, "--help"]) == 0
        text = capfd.readouterr().out
        assert f"modelworks {' '.join(words)}" in text.partition("Example:")[2]
        assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["runs"], "Missing command"),
        (["runs", "lss"], "No such command 'lss'"),
        (["runs", "ls", "--jsn"], "No such option: --jsn"),
        (["runs", "show"], "Missing argument 'RUN'"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert "--help`)" in err
    assert err.count("\n") == 1


def test_version_and_no_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--version"]) == 0
    assert capfd.readouterr().out.startswith("modelworks 0.")
    assert frame.main([]) == 0
    assert "Commands:" in capfd.readouterr().out


def raising(error: BaseException) -> Callable[..., None]:
    def train(json: JsonFlag = False) -> None:
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("a file is missing"), 2, "error: a file is missing\n"),
        (typer.Exit(75), 75, ""),
        (typer.Exit(0), 0, ""),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (OSError("disk on\nfire"), 1, "error: internal error at main.py:"),
    ],
)
def test_every_end_has_its_exit_code(
    error: BaseException, code: int, message: str, command: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert frame.main(["train"]) == code
    out, err = capfd.readouterr()
    assert (out, err.startswith(message), err.count("\n")) == ("", True, message != "")
    assert "Traceback" not in err


def test_a_failure_under_json_is_an_object_too(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    command(raising(UserError("wrong")))
    assert frame.main(["train", "--json"]) == 2
    assert json.loads(capfd.readouterr().out) == {"error": "wrong", "exit_code": 2}


@pytest.mark.parametrize("by_variable", [True, False])
def test_developers_can_see_the_trace(
    by_variable: bool, command: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raising(ValueError("deep down")))
    if by_variable:
        monkeypatch.setenv("MODELWORKS_DEBUG", "1")
    assert frame.main(["train"] if by_variable else ["--debug", "train"]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_arguments_reach_the_function(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def train(
        config: str, changes: Annotated[list[str] | None, typer.Argument()] = None, json: JsonFlag = False
    ) -> None:
        output = Output(json=json)
        output.print("for people")
        output.console.print("a table")
        output.result({"config": config, "changes": changes, "loss": float("nan")})

    command(train)
    assert frame.main(["train", "a.yaml", "seed=1", "model.n_layers=2", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"config": "a.yaml", "changes": ["seed=1", "model.n_layers=2"], "loss": None}
    assert err == "for people\na table\n"
    assert frame.main(["train", "a.yaml"]) == 0
    assert capfd.readouterr().out == "for people\na table\n"


def test_a_reader_that_leaves_is_no_failure() -> None:
    program = subprocess.Popen([*PROGRAM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    with program.stderr:
        assert program.stderr.read() == b""
    assert program.wait(timeout=60) == 0


def test_json_is_strict() -> None:
    line = json_line({"a": [float("inf"), {"b": float("nan")}], 1: "x\ny", "path": frame.main})
    assert json.loads(line, parse_constant=pytest.fail)["a"] == [None, {"b": None}]
    assert "\n" not in line


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">/dev/full", 1, "error: writing failed (No space left on device)"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_no_trace(
    redirection: str, code: int, message: str, buffered: bool
) -> None:
    command = f"{shlex.join([*PROGRAM, '--version'])} {redirection}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr.strip()) == (code, message)


def test_a_file_that_cannot_be_written_is_named(command: Any, capfd: pytest.CaptureFixture[str]) -> None:
    command(raising(OSError(errno.ENOSPC, "No space left on device", "runs/a/config.yaml")))
    assert frame.main(["train"]) == 1
    assert capfd.readouterr().err == "error: runs/a/config.yaml: cannot be written (No space left on device)\n"
