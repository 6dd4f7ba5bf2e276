"""Counts, sizes and durations: exact, refused when unclear, and read back from what they print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.config import Duration, format_bytes, format_count, parse_bytes, parse_count
from modelworks.config.quantities import exact_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("4M", 4_000_000), ("64k", 64_000), ("1.5B", 1_500_000_000), ("4,096", 4096), ("1e6", 10**6), ("2T", 2 * 10**12)],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "M", "-3", "1.5", "4 apples", "1e30", "1e999999999", "nan", "4MiB", True, 1e300])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole number|a count"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("512KiB", 512 * 1024), ("2 GB", 2 * 10**9), ("1.5MiB", 3 * 2**19), ("7b", 7), (7, 7), ("0B", 0)],
)
def test_byte_sizes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["512", "2 G", "KiB", "-1B", "1.0001KB B", "0.3B", "1e400GB", -1, False])
def test_byte_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"whole number|a size"):
        parse_bytes(text)


@given(st.integers(0, 10**18))
def test_exact_bytes_reads_back(value: int) -> None:
    assert parse_bytes(exact_bytes(value)) == value


@given(st.integers(0, 10**18), st.sampled_from(["steps", "tokens"]))
def test_whole_durations_read_back(value: int, unit: str) -> None:
    duration = Duration(value, unit)  # type: ignore[arg-type]
    assert Duration.parse(str(duration)) == duration


@given(st.floats(0, 1e6), st.sampled_from(["epochs", "percent"]))
def test_fractional_durations_read_back(value: float, unit: str) -> None:
    duration = Duration(min(value, 100) if unit == "percent" else value, unit)  # type: ignore[arg-type]
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize("text", ["2000", "2000 stepz", "1.5 steps", "101%", "-1 steps", 2000, None, "1e30 tokens", ""])
def test_durations_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match=r"duration|whole number|percentage"):
        Duration.parse(text)


def test_duration_in_steps() -> None:
    def steps(text: str, **more: int) -> int:
        return Duration.parse(text).steps(tokens_per_step=1000, steps_per_epoch=10.5, **more)

    assert steps("7 steps") == 7
    assert steps("1 tokens") == 1  # a part of a step is a step
    assert steps("4K tokens") == 4
    assert steps("4001 tokens") == 5
    assert steps("2 epochs") == 21
    assert steps("2%", total_steps=200) == 4


def test_for_people() -> None:
    assert format_count(15_735_168) == "15.7M"
    assert format_count(999) == "999"
    assert format_bytes(1_572_864) == "1.50 MiB"
    assert format_bytes(12) == "12 B"
