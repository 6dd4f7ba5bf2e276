"""Calls of tools within what a model writes, found character by character, so that no cut of a stream changes them.

How a model writes a call follows from its chat template, which is where it learnt it:

    Qwen, Hermes    text <tool_call>{"name": "f", "arguments": {…}}</tool_call>   several one after the other
    Mistral         text [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
    Llama 3         {"name": "f", "parameters": {…}}                              the whole output, or none of it

A call is told of as OpenAI's streams do: its name and id once, then its arguments, as they were written, piece by
piece. What looks like a call and is none (no name, not JSON) is text after all. White space before a call is no text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelworks.serve.api.json_scanner import ObjectScanner


@dataclass(frozen=True)
class Style:
    """How calls are written. begin, end: what stands around them; an empty begin: the output itself is calls. listed:
    calls are items of a JSON list. arguments: the names that they may have."""

    begin: str
    end: str
    listed: bool
    arguments: tuple[str, ...]


TAGGED = Style("<tool_call>", "</tool_call>", listed=False, arguments=("arguments",))
MARKED = Style("[TOOL_CALLS]", "", listed=True, arguments=("arguments",))
BARE = Style("", "", listed=False, arguments=("parameters", "arguments"))
FORCED = Style("", "", listed=True, arguments=("parameters",))  # what a JSON schema of ours makes of any model


def style_of(template: str) -> Style | None:
    """That of the models with this chat template; None where it is not known."""
    if TAGGED.begin in template:
        return TAGGED
    if MARKED.begin in template:
        return MARKED
    return BARE if '"parameters"' in template and "tools" in template else None


@dataclass(frozen=True)
class Text:
    """Text that is part of no call."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call: the first that is told of it. index: among the calls of this output."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, JSON as it was written."""

    index: int
    text: str


News = Text | CallBegun | Arguments


class ToolCallStream:
    """Reads an output in `style`. n_most: calls that are told of; later ones are dropped."""

    def __init__(self, style: Style, *, n_most: int | None = None) -> None:
        self._style, self._n_most = style, n_most
        self._n_calls = 0
        self._held = ""  # text that may be the beginning of `begin`, or white space before it
        self._inside = not style.begin  # in the part where calls are
        self._scanner: ObjectScanner | None = None
        self._told = False  # whether the scanner's call has begun for the reader
        self._raw = ""  # of the object that the scanner reads
        self._plain = False  # the rest is text

    @property
    def n_calls(self) -> int:
        return self._n_calls

    def push(self, text: str) -> list[News]:
        """What is certain with this text."""
        return _joined([news for character in text for news in self._take(character)])

    def flush(self) -> list[News]:
        """The output has ended: what was held back."""
        rest = self._held
        if self._scanner is not None and not self._told:
            rest += ("" if self._n_calls else self._style.begin) + self._raw  # half a call without a name is text
        self._held, self._raw, self._scanner = "", "", None
        return [Text(rest)] if rest and not (self._n_calls and rest.isspace()) else []

    def _take(self, character: str) -> Iterator[News]:
        if self._plain:
            yield Text(character)
        elif self._scanner is not None:
            yield from self._scan(character)
        elif self._inside:
            yield from self._between(character)
        else:
            yield from self._outside(character)

    def _outside(self, character: str) -> Iterator[News]:
        """Text, until `begin` is complete."""
        begin = self._style.begin
        self._held += character
        if self._held.endswith(begin):
            before = self._held[: -len(begin)].rstrip()
            self._held, self._inside = "", True
            if before:
                yield Text(before)
            return
        kept = next(
            size for size in range(min(len(begin) - 1, len(self._held)), -1, -1) if self._held.endswith(begin[:size])
        )
        certain = self._held[: len(self._held) - kept].rstrip()
        if certain:
            self._held = self._held[len(certain) :]
            yield Text(certain)

    def _between(self, character: str) -> Iterator[News]:
        """Around the objects: brackets, commas, the end."""
        style = self._style
        if character == "{":
            self._scanner = ObjectScanner(("name",), style.arguments)
            self._told, self._raw, self._held = False, self._held, ""
            yield from self._scan(character)
            return
        self._held += character
        if style.end and self._held.endswith(style.end):
            self._held, self._inside = "", False
        elif not style.begin and not self._n_calls and not (character.isspace() or (style.listed and character == "[")):
            yield from self._as_text(self._held)
        elif self._n_calls and not style.end and (character.isspace() or character in "[],;"):
            self._held = ""

    def _scan(self, character: str) -> Iterator[News]:
        scanner = self._scanner
        assert scanner is not None
        self._raw += character
        scanner.take(character)
        dropped = self._n_most is not None and self._n_calls >= self._n_most and not self._told
        if scanner.name is not None and not self._told and not dropped and scanner.arguments_begun:
            self._told = True
            yield CallBegun(self._n_calls, f"call_{secrets.token_hex(12)}", scanner.name)
            self._n_calls += 1
        if self._told and (more := scanner.take_arguments()):
            yield Arguments(self._n_calls - 1, more)
        if not (scanner.complete or scanner.broken):
            return
        raw, told = self._raw, self._told
        self._scanner, self._raw = None, ""
        if told:
            self._plain = scanner.broken
        elif not dropped or scanner.broken:
            yield from self._unnamed(scanner, raw)

    def _unnamed(self, scanner: ObjectScanner, raw: str) -> Iterator[News]:
        """An object that has ended without arguments: a call without any, or no call."""
        if scanner.complete and scanner.name is not None:
            yield CallBegun(self._n_calls, f"call_{secrets.token_hex(12)}", scanner.name)
            yield Arguments(self._n_calls, "{}")
            self._n_calls += 1
        else:
            yield from self._as_text((self._style.begin if not self._n_calls else "") + raw)

    def _as_text(self, text: str) -> Iterator[News]:
        self._held, self._plain = "", True
        yield Text(text)


class NamedCall:
    """An output that is nothing but the arguments of one call, as a JSON schema of ours makes it."""

    def __init__(self, name: str) -> None:
        self._begun: CallBegun | None = CallBegun(0, f"call_{secrets.token_hex(12)}", name)
        self.n_calls = 1

    def push(self, text: str) -> list[News]:
        news: list[News] = []
        if text and self._begun is not None:
            news.append(self._begun)
            self._begun = None
        return [*news, Arguments(0, text)] if text else news

    def flush(self) -> list[News]:
        return []


def _joined(news: Sequence[News]) -> list[News]:
    """Neighbours of one kind as one."""
    joined: list[News] = []
    for each in news:
        last = joined[-1] if joined else None
        if isinstance(each, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + each.text)
        elif isinstance(each, Arguments) and isinstance(last, Arguments) and last.index == each.index:
            joined[-1] = Arguments(each.index, last.text + each.text)
        else:
            joined.append(each)
    return joined


def required_schema(tools: Sequence[tuple[str, dict[str, object]]]) -> str:
    """The JSON schema of a list of calls of these tools, each (name, schema of its parameters)."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, parameters in tools
    ]
    return json.dumps({"type": "array", "minItems": 1, "items": {"anyOf": calls}})
