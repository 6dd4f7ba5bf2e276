"""Numbers for people never fall into exponents or odd thousands."""

import pytest

from modelworks.config import format_count
from modelworks.report.numbers import count


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (15_700_000, "15.7M"),
        (8_995.4, "8,995"),
        (999.7, "1,000"),
        (9_999.0, "10K"),
        (999_700, "1M"),
        (12, "12"),
        (0.5, "0.5"),
    ],
)
def test_count(value: float, written: str) -> None:
    assert count(value) == written


@pytest.mark.parametrize(("value", "written"), [(999.7, "1K"), (999_700, "1M"), (8_995.4, "9K"), (12, "12")])
def test_format_count(value: float, written: str) -> None:
    assert format_count(value) == written
