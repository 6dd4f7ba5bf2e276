"""Checkpoints: written complete or not at all, read strictly; and the way to and from other formats."""

from __future__ import annotations

import importlib
from typing import Any

_OFFERS = {
    "Checkpoint": "read",
    "CheckpointError": "errors",
    "LazyTensor": "write",
    "LoadedModel": "loading",
    "ModelSource": "formats.source",
    "best_checkpoint": "retention",
    "clean_leftovers": "retention",
    "convert": "conversion",
    "explain": "read",
    "latest_checkpoint": "retention",
    "load_model": "loading",
    "open_checkpoint": "read",
    "open_model": "loading",
    "retain": "retention",
    "write_checkpoint": "write",
    "write_model": "write",
}

__all__ = sorted(_OFFERS)  # resolved lazily, so that naming the room does not import torch


def __getattr__(name: str) -> Any:
    if name not in _OFFERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_OFFERS[name]}"), name)
