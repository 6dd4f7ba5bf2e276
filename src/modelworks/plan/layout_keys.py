"""A candidate's layout in the keys of a run description, to be printed, pasted and read back.

    tp=8,pp=4,dp_shard=4,zero=1,micro_batch=1,recompute=selective         as `--layout` takes it
    parallel.tp=8 parallel.pp=4 ... train.micro_batch=1                    as `modelworks train` takes it

Only what differs from the defaults is written, and `micro_batch`, which has no default but `auto`.
"""

from __future__ import annotations

import json
from typing import Any

from modelworks.config import ParallelConfig
from modelworks.plan.candidate import Candidate
from modelworks.plan.job import OF_PARALLEL, OF_TRAIN

LAYOUT_KEYS = (*OF_PARALLEL, *OF_TRAIN)


def layout_of(candidate: Candidate) -> dict[str, Any]:
    """Every key of a layout with its value."""
    return {key: getattr(candidate if key in OF_TRAIN else candidate.parallel, key) for key in LAYOUT_KEYS}


def layout_text(candidate: Candidate) -> str:
    """`tp=8,pp=4,…`: what `--layout` reads back to the same layout."""
    return ",".join(f"{key}={_written(value)}" for key, value in _changed(candidate).items())


def layout_overrides(candidate: Candidate) -> list[str]:
    """`parallel.tp=8`, …: what the commands that take a run description read."""
    return [
        f"{'train' if key in OF_TRAIN else 'parallel'}.{key}={_written(value)}"
        for key, value in _changed(candidate).items()
    ]


def _changed(candidate: Candidate) -> dict[str, Any]:
    defaults = {**{key: getattr(ParallelConfig(), key) for key in OF_PARALLEL}, "recompute": "none"}
    return {key: value for key, value in layout_of(candidate).items() if key not in defaults or defaults[key] != value}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
