"""Errors that are the user's to fix.

The idea: code anywhere in the package raises `UserError` with one clear sentence; only the command line
turns it into a line on stderr and exit code 2. A bare traceback therefore always means a defect of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class UserError(Exception):
    """A mistake the user can fix: says what, where, what was expected and, if possible, the nearest fix."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    key: dotted path, e.g. `optimizer.lr`. value: what was given, as the user would write it.
    expected: what is allowed. suggestion: the nearest valid key or value, or None.
    """

    key: str
    value: object
    expected: str
    suggestion: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean `{self.suggestion}`?)" if self.suggestion else ""
        return f"{self.key}: got {self.value!r}, expected {self.expected}{hint}"


class ConfigError(UserError):
    """Every problem of a configuration at once."""

    def __init__(self, where: str, problems: list[Problem]) -> None:
        self.where = where
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{where}: {count}", *(f"  {problem}" for problem in problems)]))


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None when nothing is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None
