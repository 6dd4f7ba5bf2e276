"""Turning pydantic's errors into ours: the key as written, the value, what was expected, the nearest right key.

`validate_sections` checks each section on its own, so that one bad section hides no problem of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from modelworks.config.describe import (
    describe_field,
    literal_values,
    section_fields,
    sections_in,
)
from modelworks.config.errors import ABSENT, ConfigError, Problem, ProblemsError, nearest
from modelworks.config.keys import unknown_key
from modelworks.config.model import ModelConfig
from modelworks.config.named_models import expand_model, preset_names
from modelworks.config.run import RunConfig


def validate_sections(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Validate every top-level key of a run description.

    Returns the values that are valid, by attribute of RunConfig (keys not written take their default), and the
    problems of the rest.
    """
    valid: dict[str, Any] = {}
    fields = section_fields(RunConfig)
    problems = [unknown_key(str(key), value) for key, value in raw.items() if key not in fields]
    for key, field in fields.items():
        value = raw.get(key, ABSENT)
        try:
            if key == "model":
                valid[key] = _model(value)
            elif value is ABSENT:
                valid[key] = field.get_default(call_default_factory=True)
            else:
                annotation: Any = field.annotation
                whole: Any = Annotated[(annotation, *field.metadata)] if field.metadata else annotation
                valid[key] = TypeAdapter(whole).validate_python(value)
        except ValidationError as error:
            problems.extend(_translate(error, key, field, value))
        except ProblemsError as error:
            problems.extend(error.problems)
    return valid, problems


def parse_model_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """A ModelConfig from plain values; raises ConfigError naming every problem, as for a file called `where`."""
    try:
        return ModelConfig.model_validate(dict(values))
    except ValidationError as error:
        field = FieldInfo(annotation=ModelConfig)
        raise ConfigError(where, _translate(error, "", field, dict(values))) from None


def _model(value: Any) -> ModelConfig:
    if value is ABSENT or value is None:
        expected = "the name of a preset, such as llama-tiny, or a mapping"
        raise ProblemsError([Problem("model", value, expected)])
    name = value.get("preset") if isinstance(value, dict) else value
    if isinstance(name, str) and name not in preset_names():
        expected = "a preset: " + ", ".join(preset_names())
        key = "model" if isinstance(value, str) else "model.preset"
        raise ProblemsError([Problem(key, name, expected, nearest(name, preset_names()))])
    return ModelConfig.model_validate(expand_model(value))


def _translate(error: ValidationError, prefix: str, field: FieldInfo, raw: Any) -> list[Problem]:
    """One problem for each key at fault, in the file's order of keys."""
    problems: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        for problem in _problems_of(item, prefix, field, raw):
            problems.setdefault(problem.key, problem)
    return list(problems.values())


def _problems_of(item: Any, prefix: str, field: FieldInfo, raw: Any) -> list[Problem]:
    found = _locate(list(item["loc"]), prefix, field, raw)
    if found is None:
        return []
    path, at, value = found
    kind, cause = item["type"], item.get("ctx", {}).get("error")
    if isinstance(cause, ProblemsError):
        start = f"{path}." if path else ""
        return [
            Problem(start + problem.key, problem.value, problem.expected, problem.suggestion)
            for problem in cause.problems
        ]
    if kind == "extra_forbidden":
        return [unknown_key(path, value)]
    if kind == "missing" and isinstance(item["loc"][-1], int):  # too short a list: the list is at fault
        return _problems_of({**item, "type": "too_short", "loc": item["loc"][:-1]}, prefix, field, raw)
    if kind == "missing":
        return [Problem(path, ABSENT, describe_field(at))]
    expected = describe_field(at)
    is_union = len(_members(at.annotation)) > 1
    if isinstance(cause, ValueError) and str(cause) not in expected and not is_union:
        expected = str(cause)
    choices = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in _choices(at)]
    suggestion = nearest(str(value), choices) if isinstance(value, str) else None
    return [Problem(path, value, expected, suggestion or _boolean_hint(at, value))]


def _locate(loc: list[Any], prefix: str, field: FieldInfo, raw: Any) -> tuple[str, FieldInfo, Any] | None:
    """Follow pydantic's path, which also names branches of unions, to (key path, field, value as given).

    None when the error belongs to a branch that the value was plainly not meant for.
    """
    path, value = prefix, raw
    while loc:
        step = loc[0]
        members = _members(field.annotation)
        if len(members) > 1:  # a union: this step names the branch
            branch = _branch(members, value)
            if branch is None or not _names(str(step), branch):
                return (path, field, value) if branch is None else None
            loc, field = loc[1:], FieldInfo(annotation=branch)
            continue
        member = members[0]
        loc = loc[1:]
        sections = list(sections_in(member)) if isinstance(member, type) else []
        if sections:
            field = section_fields(sections[0]).get(str(step)) or FieldInfo(annotation=Any)
        elif loc[:1] == ["[key]"]:
            return f"{path}.{step}", FieldInfo(annotation=str), step
        else:
            arguments = get_args(member)
            field = FieldInfo(annotation=arguments[-1] if arguments else Any)
        path = f"{path}.{step}" if path else str(step)
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            value = ABSENT
    return path, field, value


def _members(annotation: Any) -> list[Any]:
    """The types of a union without None; `[annotation]` when it is none."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if "Union" not in str(get_origin(annotation)):
        return [annotation]
    return [member for member in get_args(annotation) if member is not type(None)]


def _branch(members: list[Any], value: Any) -> Any:
    """The member that a mapping or a list was meant for; None when the value is neither."""
    wanted: type | None = BaseModel if isinstance(value, dict) else list if isinstance(value, list) else None
    for member in members:
        plain = get_origin(member) or member
        if wanted is not None and isinstance(plain, type) and issubclass(plain, wanted):
            return member
    return None


def _names(step: str, branch: Any) -> bool:
    if get_origin(branch) is list:
        return step.startswith("list[")
    return step == getattr(branch, "__name__", "")


def _choices(field: FieldInfo) -> list[Any]:
    return [True, False] if field.annotation is bool else literal_values(field.annotation)


def _boolean_hint(field: FieldInfo, value: Any) -> str | None:
    if field.annotation is bool and isinstance(value, str):
        return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(value.lower())
    return f'"{value}"' if field.annotation is str and isinstance(value, (int, float)) else None
