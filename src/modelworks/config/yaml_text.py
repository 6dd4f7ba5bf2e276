"""YAML in and out, without YAML 1.1's surprises.

PyYAML reads YAML 1.1, where `3e-4` is text, `off` is false, `010` is eight, `1:30` is ninety and a date is an
object. Here scalars follow the core schema of YAML 1.2: only `true` and `false` are booleans, every usual way of
writing a number is a number, everything else is text. A key written twice is an error, not a silent winner.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import yaml

from modelworks.config.errors import UserError

_SCALARS: list[tuple[str, str, str]] = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
]


@dataclass(frozen=True)
class Document:
    """A parsed file: its value, and the line (from 1) on which each dotted key path is written."""

    value: Any
    lines: dict[str, int]


class _Loader(yaml.SafeLoader):
    """The safe loader with the scalars of YAML 1.2 and no duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        # base 10 even with leading zeros: a person who writes 010 means ten
        return int(text, 16) if text.lower().startswith("0x") else int(text, 10)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        text = str(self.construct_scalar(node)).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None,
                        None,
                        f"the key `{key.value}` is written twice (first on line {seen[key.value]})",
                        key.start_mark,
                    )
                if isinstance(key, yaml.ScalarNode):
                    seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)  # type: ignore[arg-type]  # it raises for any other node


def _register(loader: type[yaml.SafeLoader]) -> None:
    for tag, pattern, first in _SCALARS:
        starts = ["" if letter == "\0" else letter for letter in first]
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), starts)
    loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<$"), ["<"])


_register(_Loader)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or our reading would take for something else."""

    yaml_implicit_resolvers = {
        letter: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(letter, []),
            *_Loader.yaml_implicit_resolvers.get(letter, []),
        ]
        for letter in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Other styles fold unusual line breaks into spaces; double quotes escape them.
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, where: str) -> Document:
    """Read one YAML document. Raises UserError naming `where`, the line and what is wrong there."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise UserError(f"{place}: {_plain(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(f"{where}: not readable as YAML: {reason}") from None
    lines: dict[str, int] = {}
    if node is not None:
        _collect_lines(node, "", lines, set())
    return Document(value, lines)


def write_yaml(value: Any) -> str:
    """The value as block YAML, keys in the given order; reads back equal with `parse_yaml`."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000, default_flow_style=False
    )
    return text


def _plain(error: yaml.MarkedYAMLError) -> str:
    problem = (error.problem or "not readable as YAML").replace("could not determine a constructor for the", "unknown")
    if "cannot start any token" in problem and "\\t" in problem:
        return "a tab is used for indentation; YAML allows only spaces"
    if problem.startswith("the key"):
        return problem
    return f"not readable as YAML: {problem}"


def _collect_lines(node: yaml.Node, path: str, lines: dict[str, int], seen: set[int]) -> None:
    if id(node) in seen:  # an alias: walked where it stands first, as a few of them can stand for billions of places
        return
    seen.add(id(node))
    children: list[tuple[str, yaml.Node, int]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), value, key.start_mark.line) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), value, value.start_mark.line) for index, value in enumerate(node.value)]
    for name, value, line in children:
        key = f"{path}.{name}" if path else name
        if key not in lines:
            lines[key] = line + 1
            _collect_lines(value, key, lines, seen)
