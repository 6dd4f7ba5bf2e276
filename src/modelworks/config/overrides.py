"""`key=value` from the command line onto the values of a file.

train.duration=100 steps        a value is read as YAML: 3e-4 is a number, [0.9, 0.99] a list
data.sources.0.weight=2         a number in the path is a place in a list
model.n_layers=4                on a preset's name, the preset with this key changed
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from modelworks.config.describe import section_fields
from modelworks.config.errors import Problem, UserError
from modelworks.config.run import RunConfig
from modelworks.config.yaml_text import parse_yaml


def apply_overrides(
    values: dict[str, Any], overrides: Sequence[str]
) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """A changed copy of `values`, the keys that were set, and what was wrong with overrides that were not."""
    result = copy.deepcopy(values)
    changed: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        key, equals, written = text.partition("=")
        key = key.strip().removeprefix("--")
        if not equals or not all(key.split(".")) or not written.strip():
            problems.append(Problem(key or text, text, "key=value, such as train.global_batch=32 (null for none)"))
            continue
        try:
            value = parse_yaml(written, key).value
        except UserError:
            value = written.strip()  # text that YAML would take for structure, such as `a: b: c`
        try:
            _set(result, key.split("."), value)
            changed.append(key)
        except ValueError as error:
            problems.append(Problem(key, value, str(error)))
    return result, changed, problems


def _set(values: dict[str, Any], parts: list[str], value: Any) -> None:
    at: Any = values
    for index, part in enumerate(parts[:-1]):
        so_far = ".".join(parts[: index + 1])
        if isinstance(at, list):
            at = at[_place(at, part, parts[:index])]
        else:
            if at.get(part) is None:
                at[part] = _start_of(parts[: index + 1])
            elif so_far == "model" and isinstance(at[part], str):
                at[part] = {"preset": at[part]}
            at = at[part]
        if not isinstance(at, (dict, list)):
            raise ValueError(f"no key below `{so_far}`, which is {at!r}")
    if isinstance(at, list):
        at[_place(at, parts[-1], parts[:-1])] = value
    else:
        at[parts[-1]] = value


def _place(items: list[Any], part: str, parents: list[str]) -> int:
    if not part.isdigit() or int(part) >= len(items):
        places = f"0 to {len(items) - 1}" if items else "none: it is empty"
        raise ValueError(f"a place in the list `{'.'.join(parents)}` ({places})")
    return int(part)


def _start_of(path: list[str]) -> Any:
    """What an unwritten key starts from: the default where that is a list (its places can be named), else a mapping."""
    fields, default = section_fields(RunConfig), None
    for part in path:
        field = fields.get(part)
        default = field.get_default(call_default_factory=True) if field else None
        fields = section_fields(type(default)) if isinstance(default, BaseModel) else {}
    if isinstance(default, list):  # only what was written: keys that do not apply must not appear
        return [
            item.model_dump(mode="json", exclude_unset=True) if isinstance(item, BaseModel) else item
            for item in default
        ]
    return {}
