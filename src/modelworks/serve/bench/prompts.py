"""What requests ask: excerpts of a real text in mixed lengths, or the lines of a file. Request i is a function of
(seed, i) alone, so that two servers, and two days, are asked the same."""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelworks.config import UserError, nearest, show_value

_FIELDS = ("prompt", "messages", "max_tokens", "body")
_SHARED = "Read this first.\n\n"


class Prompts(ABC):
    """Bodies of requests, without `model` and without what says how the answer is sent."""

    @abstractmethod
    def body(self, index: int) -> dict[str, Any]:
        """That of request `index`, from 0: `prompt` or `messages`, `max_tokens` and whatever else it sets."""


@dataclass(frozen=True)
class Excerpts(Prompts):
    """Excerpts that begin anywhere in a text.

    words: the text, at least `longest` of them. shortest, longest: words of an excerpt, evenly between. n_shared: words
    that all prompts begin with, as a system prompt or a document does; before these nothing differs. chat: as a user's
    message. seed: other seeds begin elsewhere, so that a second run finds nothing of the first in a prefix cache.
    """

    words: tuple[str, ...]
    shortest: int
    longest: int
    max_tokens: int
    n_shared: int = 0
    chat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        needed = max(self.longest, self.n_shared)
        if len(self.words) < needed:
            raise UserError(f"the text has {len(self.words):,} words, expected at least the {needed:,} of one prompt")

    def body(self, index: int) -> dict[str, Any]:
        draws = random.Random(f"{self.seed} {index}")
        text = self._excerpt(draws, draws.randint(self.shortest, self.longest))
        if self.n_shared:
            text = f"{_SHARED}{self._excerpt(random.Random(f'{self.seed} shared'), self.n_shared)}\n\n{text}"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        return {**asked, "max_tokens": self.max_tokens}

    def _excerpt(self, draws: random.Random, count: int) -> str:
        first = draws.randint(0, len(self.words) - count)
        return " ".join(self.words[first : first + count])


@dataclass(frozen=True)
class Listed(Prompts):
    """The requests of a file in order, from the first again after the last."""

    bodies: tuple[dict[str, Any], ...]

    def body(self, index: int) -> dict[str, Any]:
        return self.bodies[index % len(self.bodies)]

    @classmethod
    def read(cls, path: Path, *, chat: bool, max_tokens: int) -> Listed:
        """From JSON lines. Each has `prompt` (text or token ids), or `messages`, or a whole `body` as in a batch file;
        max_tokens: of those that name none. Raises UserError that names the line."""
        bodies = []
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                bodies.append({"max_tokens": max_tokens, **_parse(line, f"{path}, line {number}", chat)})
        if not bodies:
            raise UserError(f"{path}: holds no requests, expected one JSON object a line")
        return cls(tuple(bodies))


def read_text(path: Path | None) -> tuple[str, ...]:
    """The words of a text file. None: of Python's own language reference, which is installed with Python."""
    if path is not None:
        return tuple("\n".join(_lines(path)).split())
    from pydoc_data.topics import topics

    return tuple(" ".join(topics[name] for name in sorted(topics)).split())


def _parse(line: str, where: str, chat: bool) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if isinstance(found, dict) and isinstance(found.get("body"), dict):  # of a batch file
        found = {name: value for name, value in found["body"].items() if name not in ("model", "stream")}
    elif isinstance(found, dict):
        unknown = next((name for name in found if name not in _FIELDS), None)
        if unknown is not None:
            near = nearest(unknown, _FIELDS)
            raise UserError(f"{where}: unknown field {unknown!r}{f' (did you mean `{near}`?)' if near else ''}")
    wanted = "messages" if chat else "prompt"
    if not isinstance(found, dict) or wanted not in found:
        other = "prompt" if chat else "messages"
        hint = f"; it has `{other}`: {'leave out' if chat else 'give'} --chat" if found and other in found else ""
        raise UserError(f"{where}: got {show_value(found)}, expected an object with `{wanted}`{hint}")
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
