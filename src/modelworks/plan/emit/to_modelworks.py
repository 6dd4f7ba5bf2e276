"""Our own run description. Everything that a layout holds can be said in it, as it is the same description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelworks.config import dump_yaml, load_run_config
from modelworks.plan.emit.launch import comments
from modelworks.plan.emit.settings import Wanted, settings_of
from modelworks.plan.run import known_as

CHECKED_WITH = "this version of modelworks"
CONFIG = "config.yaml"


def refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["train.precision"] == "fp8":
        reasons.append("train.precision: the trainer has no fp8; use bf16")
    if wanted["optimizer.name"] not in (wanted.config.optimizer.name, known_as(wanted.config.optimizer)):
        reasons.append(f"optimizer.name: the trainer has none called {wanted['optimizer.name']}")
    return reasons


def files(wanted: Wanted, header: list[str]) -> dict[str, str]:
    return {CONFIG: comments(header) + dump_yaml(wanted.config)}


def program(wanted: Wanted) -> tuple[str, str]:
    return f"-m modelworks train {CONFIG}", ""


def read(directory: Path) -> dict[str, Any]:
    return settings_of(load_run_config(directory / CONFIG))
