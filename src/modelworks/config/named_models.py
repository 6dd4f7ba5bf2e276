"""Presets: published model shapes by name, read from `presets.yaml` beside this file."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from modelworks.config.errors import UserError, nearest
from modelworks.config.model import ModelConfig
from modelworks.config.yaml_text import parse_yaml


def preset(name: str) -> ModelConfig:
    """The model called `name`, e.g. `llama-3-8b`. Raises UserError naming the nearest preset."""
    return ModelConfig.model_validate(preset_values(name))


def presets() -> dict[str, ModelConfig]:
    """Every preset by name, in the table's order."""
    return {name: preset(name) for name in _table()}


def preset_names() -> list[str]:
    return list(_table())


def preset_source(name: str) -> str:
    """Where the numbers of a preset were read."""
    return str(_row(name)["source"])


def preset_values(name: str) -> dict[str, Any]:
    """The keys of a preset as written in the table, before the family's defaults."""
    return {key: value for key, value in _row(name).items() if key != "source"}


def expand_model(value: object) -> object:
    """`name` or `{preset: name, n_layers: 4}` -> the preset's keys with the given ones on top; else unchanged.

    A mapping inside (`rope_scaling`) is merged key by key. Raises ValueError when no preset has the name.
    """
    if isinstance(value, str):
        value = {"preset": value}
    if not isinstance(value, dict) or "preset" not in value:
        return value
    expanded = preset_values(str(value["preset"]))
    for key, item in value.items():
        if key != "preset":
            below = expanded.get(key)
            expanded[key] = {**below, **item} if isinstance(below, dict) and isinstance(item, dict) else item
    return expanded


def _row(name: str) -> dict[str, Any]:
    if name not in _table():
        close = nearest(name, _table())
        hint = f"did you mean `{close}`?" if close else "known: " + ", ".join(_table())
        raise UserError(f"no model preset is called {name!r}; {hint}")
    return _table()[name]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("modelworks.config").joinpath("presets.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = parse_yaml(text, "presets.yaml").value
    return table
