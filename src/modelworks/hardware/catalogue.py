"""The catalogue of devices: what vendors promise and what was measured, as data with a source for every figure.

Peaks are dense; see `devices.yaml` for the units and the sources. Files of one's own have the same form and are laid
over the built-in catalogue, where an entry with a known name replaces it: every `*.yaml` in the directory that
`MODELWORKS_HARDWARE` names, by default ~/.config/modelworks/hardware. A device may also be asked for by the path of a
file that holds it alone (`this_machine.device`). Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from modelworks.config import UserError, nearest
from modelworks.hardware.rates import Entry, Figure, Rates

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
AttentionKernel = Literal["triton", "flash", "fused"]
Vendor = Literal["nvidia", "amd", "intel", "google", "amazon", "huawei", "cpu"]  # which software can run on it
DIRECTORY_VARIABLE = "MODELWORKS_HARDWARE"
FORM = 2  # of `measured`, as this version writes and reads it; a calibration of another form counts as none


class Link(Entry):
    """The fast link between neighbouring devices. Rates in GB/s, one direction."""

    name: str
    gb_s: Figure  # per device, to all its neighbours together
    p2p_gb_s: Figure | None = None  # to one neighbour
    devices: Annotated[int, Field(gt=0)] | None = None
    latency_us: Figure | None = None  # of one step of a collective, software included


class MeasuredOn(Entry):
    """Which machine the rates of a device are from, and when (ISO 8601). form: of the rates; see `FORM`."""

    form: int = 1
    cpu: str
    cores: Annotated[int, Field(gt=0)]
    torch: str
    at: str
    accelerator: str | None = None


class Device(Entry):
    """One accelerator, or one machine whose cores the ranks share (`measured`). Units are in the names: 10^9 bytes,
    10^12 bytes/s, 10^12 FLOP/s, dense.

    measured: for several numbers of ranks, smallest first; empty where they are of a form that is not read any more.
    measured_on: None where those rates are another machine's.
    """

    name: str
    vendor: Vendor | None = None  # None: not said, then no program is advised or refused
    also: list[str] = []
    cuda_names: list[str] = []
    memory_gb: Figure
    memory_bandwidth_tb_s: Figure | None = None
    dense_tflops: dict[Dtype, Figure]
    link: Link | None = None
    network_gbit_s: Figure | None = None
    network_latency_us: Figure | None = None
    network_leaf_devices: Annotated[int, Field(gt=0)] | None = None  # below one switch or rail group; beyond it the
    network_oversubscription: Annotated[float, Field(ge=1.0)] | None = None  # network is so many times narrower
    units: Annotated[int, Field(gt=0)] | None = None  # that share out the tiles of a product (multiprocessors)
    measured_bf16_tflops: Figure | None = None
    measured_fp8_tflops: Figure | None = None
    sustained: Annotated[float, Field(gt=0.0, le=1.0)] | None = None  # of the measured products, under minutes of load
    attention_tflops: dict[AttentionKernel, tuple[Figure, Figure]] = {}  # forward and backward kernel, causal FLOPs
    measured: list[Rates] = []
    measured_on: MeasuredOn | None = None
    source: str
    sources: dict[str, str] = {}
    note: str = ""

    @property
    def is_calibrated(self) -> bool:
        """Whether its rates were measured on it by `modelworks plan --calibrate`."""
        return bool(self.measured) and self.measured_on is not None

    @property
    def is_outdated(self) -> bool:
        """Whether it was calibrated by a version whose rates are not read any more."""
        return self.measured_on is not None and self.measured_on.form != FORM

    def peak(self, dtype: Dtype) -> float | None:
        """Dense peak in FLOP/s, or None where the catalogue has no figure."""
        tflops = self.dense_tflops.get(dtype)
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True)
class Catalogue:
    """Devices by name, and the full text of the sources that they cite.

    figures: kinds of figures that have one source for all devices -> its key.
    """

    devices: Mapping[str, Device]
    sources: Mapping[str, str]
    figures: Mapping[str, str] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """The device of that name or other name, whatever the case. Raises UserError naming the nearest."""
        by_name = {key.lower(): entry for entry in self.devices.values() for key in (*entry.also, entry.name)}
        if found := by_name.get(name.lower()):
            return found
        close = nearest(name.lower(), by_name)
        hint = f"did you mean {by_name[close].name}?" if close else f"known: {', '.join(sorted(self.devices))}"
        raise UserError(f"no device is called {name!r} in the catalogue; {hint}")

    def match_cuda_name(self, cuda_name: str) -> Device | None:
        """The device for what CUDA calls it, or None. Only exact names match: a near miss may be half as fast."""
        wanted = cuda_name.strip().lower()
        for entry in self.devices.values():
            if wanted in (known.lower() for known in entry.cuda_names):
                return entry
        return None

    def source(self, entry: Device, figure: str) -> str:
        """Where a figure was read, e.g. `dense_tflops.bf16` or `memory_gb`."""
        kind = figure.split(".")[0]
        key = entry.sources.get(figure) or entry.sources.get(kind) or self.figures.get(kind) or entry.source
        return self.sources.get(key, key)


def catalogue(path: Path | None = None) -> Catalogue:
    """The built-in catalogue with the user's own files laid over it; with `path`, that file alone over the built-in
    one. Raises UserError that names the file, the device and the key."""
    own = user_files() if path is None else [path]
    return _laid_over(tuple((each, _stamp(each)) for each in own))


def user_directory() -> Path:
    """Where files of one's own are looked for, and where `modelworks plan --calibrate` writes."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "modelworks" / "hardware"


def user_files() -> list[Path]:
    """The user's own catalogues, in the order in which they are laid over each other."""
    directory = user_directory()
    if os.environ.get(DIRECTORY_VARIABLE) and not directory.is_dir():
        raise UserError(f"{DIRECTORY_VARIABLE} is {directory}, which is no directory of *.yaml files")
    return sorted(directory.glob("*.yaml"))


def match_cuda_name(cuda_name: str, path: Path | None = None) -> Device | None:
    """Shorthand for `catalogue(path).match_cuda_name(cuda_name)`."""
    return catalogue(path).match_cuda_name(cuda_name)


def read_catalogue(path: Path) -> Catalogue:
    """The devices of one file, alone."""
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the catalogue {path}: {error}") from error


@cache
def _built_in() -> Catalogue:
    """Accelerators, and the CPU that was measured."""
    room = files("modelworks.hardware")
    parts = [
        _parse((room / name).read_text(encoding="utf-8"), f"the built-in catalogue ({name})")
        for name in ("devices.yaml", "cpu.yaml")
    ]
    return _over(*parts)


@cache
def _laid_over(own: tuple[tuple[Path, int], ...]) -> Catalogue:
    """own: files with the time of their last change, so that a changed one is read again."""
    whole = _built_in()
    for path, _ in own:
        whole = _over(whole, read_catalogue(path))
    return whole


def _over(whole: Catalogue, more: Catalogue) -> Catalogue:
    return Catalogue(
        {**whole.devices, **more.devices},
        {**whole.sources, **more.sources},
        {**whole.figures, **more.figures},
    )


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # reading it says what is wrong


def _parse(text: str, where: str) -> Catalogue:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    entries = content.get("devices") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise UserError(f"{where}: expected a list under `devices:`")
    devices = {}
    for number, entry in enumerate(entries):
        label = entry.get("name", number) if isinstance(entry, dict) else number
        try:
            parsed = Device.model_validate(_without_outdated(entry))
        except ValidationError as error:
            raise UserError(f"{where}: device {label}: {_explain(error)}") from error
        devices[parsed.name] = parsed
    return Catalogue(devices, content.get("sources") or {}, content.get("figures") or {})


def _without_outdated(entry: Any) -> Any:
    """A calibration of an older form, without its rates: who asks for them is told (`this_machine`)."""
    on = entry.get("measured_on") if isinstance(entry, dict) else None
    if not isinstance(on, dict) or on.get("form", 1) == FORM:
        return entry
    return {key: value for key, value in entry.items() if key != "measured"}


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong, with the key that it is about."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{key}: {first['msg'][0].lower()}{first['msg'][1:]}"
    known = Link.model_fields if key.startswith("link.") else Rates.model_fields if "." in key else Device.model_fields
    close = nearest(key.rpartition(".")[2], known)
    return f"{key}: unknown key" + (f"; did you mean {close}?" if close else f"; known: {', '.join(known)}")
