"""Streams of text against the text as a whole: whatever the split, the same comes out."""

from __future__ import annotations

from codecs import getincrementaldecoder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.serve import Request, SamplingParams
from modelworks.serve.group import Group
from modelworks.serve.text import CompletionText, StopStrings


class Bytes:
    """Tokens are bytes; a character comes out once it is whole."""

    n_pushed = 0  # by all of them

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> Bytes:
        copy = Bytes()
        copy._decoder.setstate(self._decoder.getstate())
        return copy

    def push(self, token_id: int) -> str:
        Bytes.n_pushed += 1
        return self._decoder.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("añ€", max_size=20), st.lists(st.text("añ€", min_size=1, max_size=3), max_size=3), st.integers(0, 9))
def test_a_completion_is_its_text_up_to_a_stop_that_ends_after_its_first_tokens(
    text: str, stops: list[str], first: int
) -> None:
    """By every occurrence of every stop string, wherever it begins: it counts if its last byte is a later token."""
    completion = CompletionText(Bytes(), stops, first_checked=first)
    shown = ""
    for token in text.encode():
        completion = completion.copy()  # which changes nothing
        shown += completion.push(token)
    shown += completion.flush()
    cuts = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and len(text[: start + len(stop)].encode()) > first
    ]
    assert shown == (text[: min(cuts)[1]] if cuts else text)
    assert (completion.found is not None) == bool(cuts)


@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), max_size=12), STOPS, st.integers(0, 12))
def test_every_split_into_tokens_ends_at_the_same_stop(pieces: list[str], stops: list[str], first: int) -> None:
    """`min_tokens` moves in characters here: what counts is where that many characters end, not how they came."""

    def shown(parts: list[str]) -> tuple[str, str | None]:
        stream, text, n = StopStrings(stops), "", 0
        for part in parts:
            n += len(part)
            text += stream.push(part, ends=n > first)
        return text + stream.flush(), stream.found

    text = "".join(pieces)
    whole = [part for part in (text[:first], text[first:]) if part]
    assert shown(list(text)) == shown(whole)


def test_a_stop_string_across_the_point_of_min_tokens_ends_the_text() -> None:
    completion = CompletionText(Bytes(), ["END"], first_checked=5)
    assert "".join(map(completion.push, b"abcEND")) == "abc"
    assert completion.found == "END"
    before = CompletionText(Bytes(), ["END"], first_checked=6)
    assert "".join(map(before.push, b"abcENDx")) == "abcENDx"
    assert before.found is None


def test_a_search_decodes_as_many_tokens_at_its_end_as_at_its_beginning() -> None:
    params = SamplingParams(beams=2, stop=("xyz",), max_tokens=400)
    group = Group(
        Request("a", [1], params),
        ends=frozenset(),
        decoder=Bytes,
        longest=400,
        vocab_size=256,
    )
    assert group.search is not None
    counts = []
    for _ in range(300):
        before = Bytes.n_pushed
        group.search.advance([[(97, -1.0), (98, -1.1), (99, -1.2), (100, -1.3)]] * len(group.search.running))
        counts.append(Bytes.n_pushed - before)
    assert max(counts) <= 8  # each candidate's own token
    for letter in b"xyz":
        group.search.advance([[(letter, -0.1), (97, -5.0), (98, -5.1), (99, -5.2)]] * 2)
    assert group.search.best(1, "length")[0].ending == ("stop", "xyz")


@given(st.text("abc", max_size=30), STOPS, st.lists(st.integers(1, 4), max_size=30), st.booleans())
def test_every_split_of_a_text_ends_at_the_same_stop(
    text: str, stops: list[str], sizes: list[int], inside: bool
) -> None:
    stream, rest, shown = StopStrings(stops, included=inside), text, ""
    for size in [*sizes, len(text) or 1]:
        shown, rest = shown + stream.push(rest[:size]), rest[size:]
        assert not any(stop in shown for stop in stops) or inside
    shown += stream.flush()

    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(ends)[0 if inside else 1]] if ends else text)
    assert (stream.found is not None) == bool(ends)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["x", ""])
