"""Optimisers, schedules and clipping: what turns gradients into an update.

Everything here works on plain tensors keyed by their full parameter name, and knows nothing of how a run is
split: a sum over shards comes in as an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily
from modelworks.optim.groups import ParameterOptions, parameter_options
from modelworks.optim.schedules import Schedule, build_schedule

if TYPE_CHECKING:
    from modelworks.optim.clip import Reduce as Reduce
    from modelworks.optim.clip import clip_gradients as clip_gradients
    from modelworks.optim.optimizer import Optimizer as Optimizer
    from modelworks.optim.optimizer import build_optimizer as build_optimizer
    from modelworks.optim.sums import Split as Split

__all__ = [
    "Optimizer",
    "ParameterOptions",
    "Reduce",
    "Schedule",
    "Split",
    "build_optimizer",
    "build_schedule",
    "clip_gradients",
    "parameter_options",
]

_NEED_TORCH = {
    "Optimizer": "optimizer",
    "build_optimizer": "optimizer",
    "clip_gradients": "clip",
    "Reduce": "clip",
    "Split": "sums",
}

__getattr__ = lazily(__name__, _NEED_TORCH)
