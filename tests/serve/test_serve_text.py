"""Streams of text against the text as a whole: whatever the split, the same comes out."""

from codecs import getincrementaldecoder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.serve.text import CompletionText, StopStrings


class Bytes:
    """Tokens are bytes; a character comes out once it is whole."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@given(st.text("añ€", max_size=20), st.lists(st.text("añ€", min_size=1, max_size=3), max_size=3), st.integers(0, 9))
def test_a_completion_is_its_text_up_to_a_stop_after_its_first_tokens(text: str, stops: list[str], first: int) -> None:
    data = text.encode()
    completion = CompletionText(Bytes(), stops, first_checked=first)
    shown = "".join(map(completion.push, data)) + completion.flush()
    free = data[:first].decode(errors="ignore")  # whole characters that came before any stop was looked for
    rest = text[len(free) :]
    cuts = [(rest.find(stop) + len(stop), rest.find(stop)) for stop in stops if stop in rest]
    assert shown == free + (rest[: min(cuts)[1]] if cuts else rest)
    assert (completion.found is not None) == bool(cuts)


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
