"""Sampling parameters that a model's authors recommend: a Hugging Face directory's generation_config.json, or the
`general.sampling.*` of a GGUF file. A checkpoint of ours recommends none.

Only what was published for drawing is read: where `do_sample` is false, a temperature beside it means nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelworks.checkpoint.formats.gguf_header import read_gguf_header
from modelworks.checkpoint.locate import locate_model
from modelworks.checkpoint.places import Notify, to_stderr
from modelworks.config import UserError

_FILE = "generation_config.json"
_RANGES: dict[str, tuple[float, float]] = {  # what each may be
    "temperature": (0.0, math.inf),
    "top_k": (0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
}
_GGUF = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def generation_defaults(model: str, notify: Notify | None = None) -> dict[str, float]:
    """The recommended values by name, those of `SamplingParams`; empty where there are none. Raises UserError for a
    file whose values are no such numbers, and what `load_model` raises where there is no model."""
    location = locate_model(model, notify or to_stderr)
    if location.kind == "hugging_face":
        return _checked(_from_json(location.path / _FILE), str(location.path / _FILE))
    if location.kind == "gguf":
        metadata = read_gguf_header(location.path).metadata
        found = {name: metadata.get(f"general.sampling.{key}") for name, key in _GGUF.items()}
        return _checked(found, str(location.path))
    return {}


def _from_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object")
    return {"temperature": 0.0} if values.get("do_sample") is False else values


def _checked(found: Mapping[str, Any], where: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, (low, high) in _RANGES.items():
        value = found.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise UserError(f"{where}: {name} is {value!r}, expected a number from {low:g} to {high:g}")
        if name == "top_k" and value == 0:  # all tokens, as is the default
            continue
        values[name] = int(value) if name == "top_k" else float(value)
    return values
