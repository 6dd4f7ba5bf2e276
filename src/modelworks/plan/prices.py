"""What a run costs: devices x hours x a price, the middle of public list prices unless the user has one of their own.

The list is data with provider, day and page for every figure (`modelworks/hardware/prices.yaml`). Prices of the same
device differ fourfold between providers, so the range goes with the answer. Where no list price is known there is no
answer, not a guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from modelworks.config import UserError
from modelworks.hardware import Device


@dataclass(frozen=True)
class Offer:
    """One list price: US dollars for an hour of one device, on demand, as of that day."""

    provider: str
    usd: float
    offer: str
    read: str
    url: str


@dataclass(frozen=True)
class Price:
    """US dollars an hour of one device. low, high: the range of the lists.

    offers: the list prices behind it, cheapest first; empty where the user gave the price. source: in a sentence.
    """

    per_device_hour: float
    low: float
    high: float
    offers: tuple[Offer, ...]
    source: str

    def of(self, n_devices: int, seconds: float) -> float:
        """US dollars for so many devices for so many seconds."""
        return n_devices * seconds / 3600.0 * self.per_device_hour


def price_of(device: Device | str, per_device_hour: float | None = None) -> Price | None:
    """What an hour of a device costs; None where no list price of it is known.

    device: of the catalogue, or its name there. per_device_hour: the user's own price in US dollars, which wins over
    the list. Raises UserError for a price that is not a positive number.
    """
    if per_device_hour is not None:
        if not (math.isfinite(per_device_hour) and per_device_hour > 0):
            raise UserError(f"price: got {per_device_hour}, expected US dollars an hour of one device, such as 2.50")
        each = per_device_hour
        return Price(each, each, each, (), f"${each:g} a device-hour, as given")
    offers = list_prices(device if isinstance(device, str) else device.name)
    if not offers:
        return None
    each = statistics.median(offer.usd for offer in offers)
    return Price(each, offers[0].usd, offers[-1].usd, offers, _source(offers, each))


def list_prices(name: str) -> tuple[Offer, ...]:
    """The known list prices of a device of the catalogue, cheapest first; none where none was found."""
    return _table().get(name, ())


def unknown_price(name: str) -> str:
    """What to say of a device where `price_of` has no answer."""
    return f"no list price of {name} is known: give one with --price, in US dollars an hour of one device"


def _source(offers: Sequence[Offer], middle: float) -> str:
    first = offers[0]
    if len(offers) == 1:
        return f"${middle:.2f} a device-hour, the list price of {first.provider} on {first.read}"
    last = offers[-1]
    return (
        f"${middle:.2f} a device-hour, the median of {len(offers)} list prices on demand, from ${first.usd:.2f} "
        f"({first.provider}, {first.read}) to ${last.usd:.2f} ({last.provider}, {last.read})"
    )


@cache
def _table() -> dict[str, tuple[Offer, ...]]:
    text = (files("modelworks.hardware") / "prices.yaml").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    sources = content["sources"]
    return {
        name: tuple(sorted((_offer(row, sources[row["source"]]) for row in rows), key=lambda offer: offer.usd))
        for name, rows in content["prices"].items()
    }


def _offer(row: dict[str, Any], source: dict[str, Any]) -> Offer:
    return Offer(source["provider"], float(row["usd"]), row["offer"], str(source["read"]), source["url"])
