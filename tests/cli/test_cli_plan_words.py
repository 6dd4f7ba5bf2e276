"""Batches, shares and layouts as they are written on the command line of `modelworks plan`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.cli.plan_layouts import read_layout
from modelworks.cli.plan_quantities import parse_batch, parse_gpus, parse_share
from modelworks.cli.plan_text import dollars, seconds
from modelworks.config import UserError


@pytest.mark.parametrize(
    ("text", "seq_len", "rows", "exact"),
    [
        ("512", 8192, 512, True),
        ("512 rows", 8192, 512, True),
        ("4000000", 8192, 4_000_000, True),  # a bare number counts rows
        ("1 row", 8192, 1, True),
        ("4194304 tokens", 8192, 512, True),
        ("4M", 1000, 4000, True),  # whole rows are kept
        ("4M", 8192, 512, False),  # 488.3 rows
        ("4M tokens", 4096, 1024, False),
        ("16M", 8192, 2048, False),
        ("0.5M", 2048, 256, False),
        ("3.2M", 2048, 1536, False),  # 1562.5: no power of two within 5 %
        ("12K", 8192, 1, False),  # 1.46 rows: nothing within 5 %
    ],
)
def test_batches(text: str, seq_len: int, rows: int, exact: bool) -> None:
    found = parse_batch(text, seq_len)
    assert found.rows == rows
    assert ("no whole number" in found.how) is not exact


@given(st.integers(1, 2**17), st.integers(1, 2000), st.integers(0, 2**17 - 1))
def test_rows_of_tokens_are_near_and_the_roundest(seq_len: int, whole: int, rest: int) -> None:
    tokens = whole * seq_len + rest % seq_len
    exact, rows = tokens / seq_len, parse_batch(f"{tokens} tokens", seq_len).rows
    near = [number for number in range(1, int(exact * 1.05) + 1) if abs(number - exact) <= 0.05 * exact]
    if tokens % seq_len == 0:
        assert rows == whole
    elif not near:
        assert rows == max(1, round(exact))
    else:
        assert rows in near
        assert all(rows & -rows >= number & -number for number in near)


@pytest.mark.parametrize("text", ["", "rows", "-4", "4.5", "4 sheets", "1e30", "nan"])
def test_no_batch(text: str) -> None:
    with pytest.raises(UserError, match="--global-batch: got"):
        parse_batch(text, 8192)


def test_gpus_and_shares() -> None:
    assert [parse_gpus(text) for text in ("1", "1K", "1e3", "1048576")] == [1, 1000, 1000, 2**20]
    assert [parse_share(text, "--x") for text in ("0", "10%", "0.25")] == [0.0, 0.1, 0.25]
    for text in ("100%", "1", "-0.1", "nan", "x", ""):
        with pytest.raises(UserError, match="--x: got"):
            parse_share(text, "--x")


def test_layouts() -> None:
    assert read_layout("tp=8, parallel.pp=4,train.micro_batch=1,", "--fix") == {
        "tp": "8",
        "pp": "4",
        "micro_batch": "1",
    }
    assert read_layout("pp=2,pp_partition=[3,1],tp=2", "--fix")["pp_partition"] == "[3,1]"
    for text, said in (("train.tp=2", "'train.tp'"), ("lr=3", "known: tp"), (" ", "expected key=value")):
        with pytest.raises(UserError, match=said):
            read_layout(text, "--fix")


def test_figures() -> None:
    times = {0.0123: "12.3 ms", 38.06: "38.1 s", 1500.0: "25 min", 15_000.0: "4.17 h", 31 * 86400.0: "31 d"}
    assert {value: seconds(value) for value in times} == times
    assert [dollars(value) for value in (None, 0.0123, 1.4, 1234.5, 2.2e7)] == ["", "$0.012", "$1.40", "$1,234", "$22M"]
