"""Prices of runs: by hand, from the list, and none where none is known."""

from __future__ import annotations

import datetime
import math

import pytest

from modelworks.config import UserError
from modelworks.hardware import catalogue, device
from modelworks.plan.prices import list_prices, price_of, unknown_price


def test_a_run_costs_devices_times_hours_times_the_price_given() -> None:
    price = price_of(device("H100"), 2.5)
    assert price is not None
    assert price.of(1024, 7 * 86_400.0) == pytest.approx(1024 * 7 * 24 * 2.5)
    assert price.low == price.high == 2.5
    assert price.source == "$2.5 a device-hour, as given"


def test_the_list_gives_its_median_and_its_range_with_providers_and_days() -> None:
    offers = list_prices("H100-SXM-80GB")
    price = price_of("H100-SXM-80GB")
    assert price is not None
    assert [offer.usd for offer in offers] == sorted(offer.usd for offer in offers)
    half = len(offers) // 2
    assert sum(offer.usd < price.per_device_hour for offer in offers) <= half
    assert sum(offer.usd > price.per_device_hour for offer in offers) <= half
    assert (price.low, price.high) == (offers[0].usd, offers[-1].usd)
    assert price.of(8, 3600.0) == pytest.approx(8 * price.per_device_hour)
    assert offers[0].provider in price.source
    assert offers[-1].read in price.source


def test_a_device_without_a_list_price_has_none_and_the_message_says_what_to_do() -> None:
    assert price_of(device("TPU-v5p")) is None
    assert price_of(device("TPU-v5p"), 4.2) is not None
    assert unknown_price("TPU-v5p") == (
        "no list price of TPU-v5p is known: give one with --price, in US dollars an hour of one device"
    )


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_a_price_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(UserError, match="expected US dollars an hour of one device"):
        price_of(device("H100"), wrong)


def test_every_price_is_of_a_device_of_the_catalogue_and_has_a_provider_a_day_and_a_page() -> None:
    from modelworks.plan.prices import _table

    table = _table()
    assert set(table) <= set(catalogue().devices)
    for offers in table.values():
        assert offers
        for offer in offers:
            assert 0.1 < offer.usd < 50.0
            assert datetime.date.fromisoformat(offer.read) >= datetime.date(2026, 8, 1)
            assert offer.url.startswith("https://")
            assert offer.provider
            assert offer.offer
