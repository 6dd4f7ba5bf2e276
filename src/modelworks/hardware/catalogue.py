"""The catalogue of accelerators: what vendors promise, as data with a source for every figure.

Peaks are dense; see `devices.yaml` for the units and the sources. A catalogue of one's own has the same form and
is laid over the built-in one: an entry with a known name replaces it. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelworks.config import UserError, nearest

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "fp4"]
AttentionKernel = Literal["triton", "flash", "fused"]
Figure = Annotated[float, Field(gt=0.0)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(_Entry):
    """The fast link between neighbouring devices. Rates in GB/s, one direction."""

    name: str
    gb_s: Figure  # per device, to all its neighbours together
    p2p_gb_s: Figure | None = None  # to one neighbour
    devices: Annotated[int, Field(gt=0)] | None = None
    latency_us: Figure | None = None  # of one step of a collective, software included


class Device(_Entry):
    """One accelerator. Units are in the names: 10^9 bytes, 10^12 bytes/s, 10^12 FLOP/s, dense."""

    name: str
    also: list[str] = []
    cuda_names: list[str] = []
    memory_gb: Figure
    memory_bandwidth_tb_s: Figure | None = None
    dense_tflops: dict[Dtype, Figure]
    link: Link | None = None
    network_gbit_s: Figure | None = None
    network_latency_us: Figure | None = None
    units: Annotated[int, Field(gt=0)] | None = None  # that share out the tiles of a product (multiprocessors)
    measured_bf16_tflops: Figure | None = None
    measured_fp8_tflops: Figure | None = None
    sustained: Annotated[float, Field(gt=0.0, le=1.0)] | None = None  # of the measured products, under minutes of load
    attention_tflops: dict[AttentionKernel, tuple[Figure, Figure]] = {}  # forward and backward kernel, causal FLOPs
    source: str
    sources: dict[str, str] = {}
    note: str = ""

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


@cache
def catalogue(path: Path | None = None) -> Catalogue:
    """The built-in catalogue; with `path`, a YAML file of the same form laid over it."""
    text = (files("modelworks.hardware") / "devices.yaml").read_text(encoding="utf-8")
    built_in = _parse(text, "the built-in catalogue")
    if path is None:
        return built_in
    try:
        own = _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the catalogue {path}: {error}") from error
    return Catalogue(
        {**built_in.devices, **own.devices},
        {**built_in.sources, **own.sources},
        {**built_in.figures, **own.figures},
    )


def device(name: str, path: Path | None = None) -> Device:
    """Shorthand for `catalogue(path).device(name)`."""
    return catalogue(path).device(name)


def match_cuda_name(cuda_name: str, path: Path | None = None) -> Device | None:
    """Shorthand for `catalogue(path).match_cuda_name(cuda_name)`."""
    return catalogue(path).match_cuda_name(cuda_name)


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
            parsed = Device.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(f"{where}: device {label}: {key}: {first['msg']}") from error
        devices[parsed.name] = parsed
    return Catalogue(devices, content.get("sources") or {}, content.get("figures") or {})
