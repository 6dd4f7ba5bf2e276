"""Errors that are the user's to fix.

The idea: code anywhere in the package raises `UserError` with one clear sentence; only the command line
turns it into a line on stderr and exit code 2. A bare traceback therefore always means a defect of ours.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass


class UserError(Exception):
    """A mistake the user can fix: says what, where, what was expected and, if possible, the nearest fix."""


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()  # the value of a problem whose key is missing


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    key: dotted path, e.g. `optimizer.lr`. value: what was given, or ABSENT. expected: what is allowed.
    suggestion: the nearest valid key or value, or None. line: where it is written in the file, or None.
    """

    key: str
    value: object
    expected: str
    suggestion: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        hint = f" (did you mean `{self.suggestion}`?)" if self.suggestion else ""
        return f"{place}{self.key}: got {show_value(self.value)}, expected {self.expected}{hint}"


class ConfigError(UserError):
    """Every problem of a configuration at once."""

    def __init__(self, where: str, problems: list[Problem]) -> None:
        self.where = where
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{where}: {count}", *(f"  {problem}" for problem in problems)]))


class ProblemsError(ValueError):
    """Raised by a section's own validation to say several things at once; loading turns it into a ConfigError.

    Keys are relative to the section that raises.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems)))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None when nothing is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def show_value(value: object) -> str:
    """A value as it would be written in YAML, shortened so that a message stays a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlong = 40
_SHORT.maxlevel = 2  # nested lists are shortened at each level, which alone still multiplies
