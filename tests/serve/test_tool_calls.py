"""Calls of tools: found in every style, whatever the cut of the stream; what is no call stays text."""

from __future__ import annotations

import json
from typing import Any

import fake_engine
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from modelworks.data import StreamDecoder, Tokenizer
from modelworks.serve.api.tool_calls import (
    BARE,
    FORCED,
    MARKED,
    TAGGED,
    Arguments,
    CallBegun,
    Style,
    Text,
    ToolCallStream,
    style_of,
)
from modelworks.serve.api.tools import Marker

PIECES = ['{"name"', ": ", '"a"', "{", "}", "[", "]", ",", "<tool_call>", "</tool_call>", "x", "\n", '"', "\\"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=6), JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


def written(style: Style, calls: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    """As models write them."""
    key = style.arguments[0]
    objects = [json.dumps({"name": name, key: arguments}, indent=indent) for name, arguments in calls]
    if style is TAGGED:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if style.listed:
        return style.begin + " [" + ", ".join(objects) + "]"
    return "; ".join(objects)


def read(style: Style, pieces: list[str], n_most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Text, and (name, arguments) of each call. Checks that a call's name comes once, before its arguments."""
    stream = ToolCallStream(style, n_most=n_most)
    text, calls = "", list[tuple[str, str]]()
    for news in [*(each for piece in pieces for each in stream.push(piece)), *stream.flush()]:
        if isinstance(news, Text):
            text += news.text
        elif isinstance(news, CallBegun):
            assert news.index == len(calls)
            calls.append((news.name, ""))
        else:
            assert isinstance(news, Arguments)
            assert news.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + news.text)
    assert stream.n_calls == len(calls)
    return text, calls


@settings(max_examples=50)
@given(st.sampled_from([TAGGED, MARKED, BARE, FORCED]), CALLS, st.sampled_from([None, 1]), st.data())
def test_calls_are_found_whatever_the_cut(
    style: Style, calls: list[tuple[str, dict[str, Any]]], indent: int | None, data: st.DataObject
) -> None:
    before = data.draw(st.sampled_from(["", "Let me see. < [TOOL", " \n"])) if style.begin else ""
    whole = before + written(style, calls, indent)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    text, found = read(style, pieces)
    assert text == before.rstrip(), "white space before a call is no text"
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert read(style, list(whole)) == (text, found)


@settings(max_examples=50)
@given(
    st.sampled_from([TAGGED, MARKED, BARE, FORCED]),
    st.lists(
        st.sampled_from(
            ['{"name"', ": ", '"a"', "{", "}", "[", "]", ",", "<tool_call>", "</tool_call>", "x", "\n", '"', "\\"]
        )
    ),
)
def test_no_text_breaks_it_and_every_cut_reads_the_same(style: Style, parts: list[str]) -> None:
    assert read(style, ["".join(parts)]) == read(style, list("".join(parts))) == read(style, parts)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (TAGGED, "no call at all, a < b and <tool"),
        (TAGGED, "text that ends in blanks \n"),
        (MARKED, "nor here [TOOL"),
        (BARE, "Hello {world}"),
        (BARE, '{"answer": 3}'),
        (BARE, '{"name": 3, "parameters": {}}'),
        (BARE, "{]"),
        (BARE, ""),
        (TAGGED, '<tool_call>{"arguments": {"a": 1}}'),
        (TAGGED, '<tool_call>{"nam'),
    ],
)
def test_what_is_no_call_is_text(style: Style, text: str) -> None:
    assert read(style, [text]) == (text, [])


def test_a_call_that_is_cut_off_is_told_as_far_as_it_came() -> None:
    assert read(TAGGED, ['<tool_call>{"name": "f", "arguments": {"a": "b']) == ("", [("f", '{"a": "b')])


def test_arguments_that_are_quoted_twice_or_missing() -> None:
    assert read(TAGGED, ['<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>']) == (
        "",
        [("f", '{"a": 1}')],
    )
    assert read(TAGGED, ['<tool_call>{"name": "f"}</tool_call>']) == ("", [("f", "{}")])


def test_at_most_one_call() -> None:
    whole = written(TAGGED, [("f", {}), ("g", {})], None)
    assert read(TAGGED, [whole], n_most=1) == ("", [("f", "{}")])


def test_the_style_follows_from_the_template() -> None:
    assert style_of('… <tool_call>\n{"name": … {{ tools }}') is TAGGED
    assert style_of("{{ '[TOOL_CALLS]' }}") is MARKED
    assert style_of('{% if tools %}{"name": function name, "parameters": …}') is BARE
    assert style_of("{{ messages }}") is None


@settings(max_examples=50)
@given(st.lists(st.text("aé日[", max_size=5), min_size=1, max_size=4), st.data())
def test_a_marker_that_is_no_text_is_put_back_where_it_stood(parts: list[str], data: st.DataObject) -> None:
    """However many tokens come at once, and however late their text."""
    backend = Backend.from_str(fake_engine.byte_tokenizer().to_json())
    backend.add_special_tokens([MARKED.begin])
    tokenizer = Tokenizer(backend, eos_id=0)
    mark = tokenizer.token_to_id(MARKED.begin)
    assert mark is not None
    ids, decoder, marker = (
        tokenizer.encode(MARKED.begin.join(parts)),
        StreamDecoder(tokenizer),
        Marker(MARKED.begin, mark, StreamDecoder(tokenizer)),
    )
    held = whole = ""
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        held += decoder.push_all(ids[:count])
        shown = len(held) if count == len(ids) else data.draw(st.integers(0, len(held)))
        whole += marker.put_back(ids[:count], held[:shown])
        ids, held = ids[count:], held[shown:]
    assert whole == MARKED.begin.join(parts)
