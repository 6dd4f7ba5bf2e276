"""From a YAML file and `key=value` overrides to a `RunConfig`, and back to YAML that re-runs the run.

Every problem of a file is reported at once, each with its line, its key path, what was expected and the nearest
right key. A key that would be ignored is a problem too: nothing written in a file is silently without effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelworks.config.checks import cross_problems, unused_keys
from modelworks.config.errors import ConfigError, Problem, UserError, nearest
from modelworks.config.overrides import apply_overrides
from modelworks.config.run import RunConfig, Sections
from modelworks.config.validate import validate_sections
from modelworks.config.yaml_text import Document, parse_yaml, write_yaml


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run description. `overrides` are `key=value` with dotted keys, e.g. `data.sources.0.weight=2`.

    Raises ConfigError with every problem, UserError when the file cannot be read at all.
    """
    path = Path(path)
    return parse_run_config(_read(path), str(path), overrides)


def parse_run_config(text: str, where: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The same from text; `where` names it in messages."""
    document = parse_yaml(text, where)
    if not isinstance(document.value, dict):
        found = "nothing" if document.value is None else f"a {_kind(document.value)}"
        raise UserError(f"{where}: expected a mapping of keys such as `model: llama-tiny`, found {found}")
    raw, changed, problems = apply_overrides(document.value, overrides)
    problems += [_with_line(problem, document, changed) for problem in _problems(raw)]
    if problems:
        raise ConfigError(where, problems)
    sections, _ = validate_sections(raw)
    return RunConfig(**sections)


def dump_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that `load_run_config` reads back to an equal value.

    Keys without effect (a rotary base beside learned positions) are left out: a file may not write them.
    """
    values = config.model_dump(mode="json")
    for key in unused_keys(Sections.of(config)):
        _remove(values, key.split("."))
    return write_yaml(values)


def _problems(raw: dict[str, Any]) -> list[Problem]:
    valid, problems = validate_sections(raw)
    sections = Sections(**{name: valid.get(name) for name in Sections.names()})
    problems += cross_problems(sections)
    for key, reason in unused_keys(sections).items():
        if (written := _written(raw, key.split("."))) is not _NOT_WRITTEN:
            problems.append(Problem(key, written, f"nothing here, as it would be ignored: {reason}"))
    return problems


_NOT_WRITTEN = object()


def _written(raw: Any, parts: list[str]) -> Any:
    for part in parts:
        if isinstance(raw, dict) and part in raw:
            raw = raw[part]
        elif isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            return _NOT_WRITTEN
    return raw


def _remove(values: Any, parts: list[str]) -> None:
    for part in parts[:-1]:
        values = values[int(part)] if isinstance(values, list) else values.get(part)
        if values is None:
            return
    values.pop(parts[-1], None)


def _with_line(problem: Problem, document: Document, changed: list[str]) -> Problem:
    """Add the line of the key, or of the nearest enclosing key that is written; none for what an override set."""
    if any(f"{problem.key}.".startswith(f"{key}.") for key in changed):
        return problem
    parts = problem.key.split(".")
    while parts:
        if line := document.lines.get(".".join(parts)):
            return replace(problem, line=line)
        parts.pop()
    return problem


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, [name for name in names if name.endswith((".yaml", ".yml"))])
        hint = f" (did you mean `{path.parent / close}`?)" if close else ""
        raise UserError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        inside = path / "config.yaml"
        hint = f" (did you mean `{inside}`?)" if inside.is_file() else ""
        raise UserError(f"{path}: a directory, expected a YAML file{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _kind(value: Any) -> str:
    return {list: "list", str: "text", bool: "truth value"}.get(type(value), "number")
