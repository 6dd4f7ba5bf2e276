"""What a configuration key accepts, in plain words, read from its type.

One description serves the error messages and the reference page, so that neither can drift from the code.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modelworks.config.quantities import Duration, Words


def describe_field(field: FieldInfo) -> str:
    """What a field accepts: `a whole number above 0 or auto`."""
    return _describe(field.annotation, list(field.metadata))


def field_key(name: str, field: FieldInfo) -> str:
    """The key as written in a file (`async` for the attribute `async_`)."""
    return field.alias or name


def section_fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Key as written -> field."""
    return {field_key(name, field): field for name, field in section.model_fields.items()}


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config sections that a type may hold, directly or as one of a union or the item of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        if isinstance(argument, type) or get_args(argument):
            yield from sections_in(argument)


def literal_values(annotation: Any) -> list[Any]:
    """The fixed values that a type allows, e.g. `auto`."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for argument in get_args(annotation) for value in literal_values(argument)]


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    words = next((item.text for item in metadata if isinstance(item, Words)), None)
    if words:
        return words
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(_member(argument, metadata) for argument in arguments)
    if origin is Literal:
        values = _written(arguments)
        return f"only {values[0]} in this version" if len(values) == 1 else "one of " + ", ".join(values)
    if origin is list:
        return f"a list of {_plural(_describe(arguments[0], []))}"
    if origin is tuple:
        return f"a list of {len(arguments)} values, each {_describe(arguments[0], [])}"
    if origin is dict:
        return f"a mapping of {_plural(_describe(arguments[0], []))} to {_describe(arguments[1], [])}"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    simple = {bool: "true or false", str: "text", type(None): "null", Duration: Duration.expected}
    if annotation in simple:
        return simple[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    return str(annotation)


def _member(annotation: Any, metadata: list[Any]) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(_written(get_args(annotation)))
    return _describe(annotation, metadata if annotation in (int, float) else [])


def _written(values: tuple[Any, ...]) -> list[str]:
    """Fixed values as they are written in YAML."""
    return [str(value).lower() if isinstance(value, bool) else str(value) for value in values]


def _plural(text: str) -> str:
    return {"a mapping": "mappings", "text": "texts"}.get(text, text)


def _bounds(metadata: list[Any]) -> str:
    low: str | None = None
    high: str | None = None
    # Field(gt=0) inside Annotated arrives whole; its bounds are in its own metadata
    bounds = [bound for item in metadata for bound in (item.metadata if isinstance(item, FieldInfo) else [item])]
    for item in bounds:
        if isinstance(item, Gt):
            low = f"above {_number(item.gt)}"
        elif isinstance(item, Ge):
            low = f"of at least {_number(item.ge)}"
        elif isinstance(item, Lt):
            high = f"below {_number(item.lt)}"
        elif isinstance(item, Le):
            high = f"at most {_number(item.le)}"
    return "".join(f"{joint}{bound}" for joint, bound in zip((" ", " and "), filter(None, (low, high)), strict=False))


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
