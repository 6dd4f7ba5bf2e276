"""Streams of text against the text as a whole: whatever the split, the same comes out."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.serve.text import StopStrings, TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_each_byte(tokens: Sequence[int]) -> str:
    """As byte-fallback tokenisers do: of a run that is no text, each byte is one U+FFFD."""
    try:
        return bytes(tokens).decode("utf-8")
    except UnicodeDecodeError as error:
        rest = decode_each_byte(tokens[error.end :]) if error.end < len(tokens) else ""
        return bytes(tokens[: error.start]).decode("utf-8") + "\ufffd" * (error.end - error.start) + rest


@given(st.text(max_size=30), st.sampled_from([decode_bytes, decode_each_byte]))
def test_text_comes_out_whole_and_never_in_halves(text: str, decode: object) -> None:
    stream = TextStream(decode)  # type: ignore[arg-type]
    shown = [stream.push(token) for token in text.encode()]
    assert "".join(shown) + stream.flush() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)
        assert "".join(shown) == text, "a whole character waits for nothing"


@given(st.binary(max_size=40), st.sampled_from([decode_bytes, decode_each_byte]))
def test_bytes_that_are_no_text_come_out_as_they_decode(data: bytes, decode: object) -> None:
    stream = TextStream(decode)  # type: ignore[arg-type]
    assert "".join(map(stream.push, data)) + stream.flush() == decode(data)  # type: ignore[operator]


def test_endless_bytes_that_are_no_text_cost_no_more_each() -> None:
    lengths: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode_bytes(tokens)

    stream = TextStream(decode)
    shown = "".join(stream.push(0x80) for _ in range(1000)) + stream.flush()
    assert shown == "\ufffd" * 1000
    assert max(lengths) < 200


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


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
