"""YAML reading: YAML 1.1's traps are gone, and whatever is written reads back."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import UserError
from modelworks.config.yaml_text import parse_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.5E3", 1500.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("2000 steps", "2000 steps"),
        ("'5'", "5"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}", "x").value["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"x.yaml, line 3: the key `a` is written twice \(first on line 1\)"),
        ("a:\n  b: 1\n  b: 2", "line 3: the key `b` is written twice"),
        ("a: [1, 2", "line 1: not readable"),
        ("a:\n\tb: 1", "line 2: a tab"),
        ("a: !!python/object:os.system x", "line 1"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("? [1, 2]\n: 3", "line 1"),
        ("a: *b", "line 1: .*undefined alias"),
        ("a: \x00", "not readable"),
        ("a: " + "[" * 1500, "not readable"),
        ("a: " + "9" * 5000, "not readable"),
    ],
)
def test_unreadable(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text, "x.yaml")
    assert "\n" not in str(caught.value)


def test_lines_of_keys() -> None:
    lines = parse_yaml("a: 1\nb:\n  - c: 2\n  - c: 3\n    d: 4\n", "x").lines
    assert lines == {"a": 1, "b": 2, "b.0": 3, "b.0.c": 3, "b.1": 4, "b.1.c": 4, "b.1.d": 5}


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), _VALUES))
def test_what_is_written_reads_back(value: dict[str, object]) -> None:
    text = write_yaml(value)
    assert parse_yaml(text, "x").value == value


@pytest.mark.parametrize("word", ["off", "yes", "3e-4", "1:30", "010", "null", "2024-01-01", "<<", "=", "true", ""])
def test_text_is_quoted_for_other_readers_too(word: str) -> None:
    assert yaml.safe_load(write_yaml({"key": word})) == {"key": word}
