"""A device by what people call it, this machine among them: as `modelworks plan --calibrate` measured it, else assumed.

Uncalibrated, the rates are those of the catalogue's reference machine, `CPU`, as if this one had more or fewer of the
same cores: right to a factor of two or so, and said to be. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from modelworks.config import UserError
from modelworks.hardware.catalogue import Device, MeasuredOn, catalogue, read_catalogue, user_directory
from modelworks.hardware.machine import MachineFacts, facts
from modelworks.hardware.rates import Rates

THIS_MACHINE = "this-machine"
REFERENCE = "CPU"
_ALSO_HERE = {THIS_MACHINE, "this machine", "this-cpu", "this cpu"}


def device(name: str, path: Path | None = None) -> Device:
    """A device of the catalogue by its name, `this-machine`, or the only one of the file that `name` is the path of
    (*.yaml). path: as for `catalogue`. Raises UserError naming the nearest."""
    if name.lower() in _ALSO_HERE:
        return this_machine()
    if not name.lower().endswith((".yaml", ".yml")):
        return catalogue(path).device(name)
    found = read_catalogue(Path(name).expanduser())
    if len(found.devices) != 1:
        names = ", ".join(found.devices) or "none"
        raise UserError(
            f"{name} holds {len(found.devices)} devices ({names}), expected one; put the file into {user_directory()} "
            "and name the device"
        )
    only = next(iter(found.devices.values()))
    if only.is_outdated:
        raise UserError(
            f"{name}: calibrated by an earlier version; modelworks plan --calibrate --out {name} does it anew"
        )
    return only


def this_machine() -> Device:
    """The machine that this process runs on, with the rates that were measured on it if they were (`is_calibrated`).

    Its ranks are processes that share its cores and its memory. Raises UserError for a user's file that is not valid.
    """
    found = facts()
    saved = catalogue().devices.get(THIS_MACHINE)
    if saved is not None and _is_of(saved.measured_on, found) and not saved.is_outdated:
        return saved
    return _assumed(found)


def unused_calibration() -> str | None:
    """Of a machine that is not calibrated: why the calibration that is there does not serve, None where none is."""
    there = catalogue().devices.get(THIS_MACHINE)
    if there is None or there.measured_on is None:
        return None
    on = there.measured_on
    if there.is_outdated:
        return f"the calibration that is there of {on.at[:10]} is an earlier version's: calibrate again"
    return f"the calibration that is there is of {on.cpu} with {on.cores} cores"


def calibration_file() -> Path:
    """Where `modelworks plan --calibrate` writes, and this machine's rates are looked for."""
    return user_directory() / f"{THIS_MACHINE}.yaml"


def write_device(device: Device, path: Path) -> None:
    """As a file that the catalogue reads. Raises UserError where it cannot be written."""
    content = {"devices": [_rounded(device.model_dump(mode="json", exclude_defaults=True))]}
    text = "# Written by `modelworks plan --calibrate`. Delete it to plan with the catalogue's figures again.\n"
    text += yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def calibrated_device(
    found: MachineFacts, rates: list[Rates], measured_on: MeasuredOn | None, *, peaks: Mapping[str, float] | None = None
) -> Device:
    """The device that rates make of this machine. rates: smallest number of ranks first. measured_on: None where they
    were not measured here. peaks: FLOP/s by dtype that were measured apart, where they are more than those of rates."""
    whole = rates[0]
    return Device(
        name=THIS_MACHINE,
        vendor="cpu",
        memory_gb=found.memory / 1e9,
        memory_bandwidth_tb_s=whole.memory_bandwidth_gb_s / 1e3,
        dense_tflops={dtype: (peaks[dtype] if peaks else whole.best_product(dtype)) / 1e12 for dtype in whole.products},
        measured=rates,
        measured_on=measured_on,
        source="" if measured_on is None else f"measured here with torch {measured_on.torch}, {measured_on.at}",
    )


def _rounded(value: Any) -> Any:
    """Figures to four digits: more were not measured."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return {key: _rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


def _is_of(measured_on: MeasuredOn | None, found: MachineFacts) -> bool:
    return measured_on is not None and (measured_on.cpu, measured_on.cores) == (found.cpu, found.cores)


def _assumed(found: MachineFacts) -> Device:
    whole_catalogue = catalogue()
    reference = whole_catalogue.device(REFERENCE)
    note = f"not calibrated: rates of {whole_catalogue.source(reference, 'measured')}"
    if why := unused_calibration():
        note += f" ({why})"
    whole = reference.measured[0]
    counts = [ranks for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256) if ranks <= found.cores]
    # a rank has cores / ranks threads where the reference had whole.threads
    rates = [
        whole.scaled(whole.threads * ranks / found.cores, ranks=ranks, threads=found.cores // ranks) for ranks in counts
    ]
    if found.cores == whole.threads:
        rates = reference.measured
    return calibrated_device(found, rates, None).model_copy(
        update={"source": f"{found.cpu}, {found.cores} cores, rates assumed", "note": note}
    )
