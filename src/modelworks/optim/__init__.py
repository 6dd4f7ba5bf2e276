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
    from modelworks.optim.clip import norm_powers as norm_powers
    from modelworks.optim.conformance import NotConforming as NotConforming
    from modelworks.optim.conformance import check_optimizer as check_optimizer
    from modelworks.optim.mup import MupGroup as MupGroup
    from modelworks.optim.mup import mup_groups as mup_groups
    from modelworks.optim.optimizer import Optimizer as Optimizer
    from modelworks.optim.optimizer import build_optimizer as build_optimizer
    from modelworks.optim.sums import Split as Split
    from modelworks.optim.torch_optimizers import (
        Adafactor as Adafactor,
    )
    from modelworks.optim.torch_optimizers import (
        Adam as Adam,
    )
    from modelworks.optim.torch_optimizers import Adam8bit as Adam8bit
    from modelworks.optim.torch_optimizers import (
        AdamW as AdamW,
    )
    from modelworks.optim.torch_optimizers import AdamW8bit as AdamW8bit
    from modelworks.optim.torch_optimizers import (
        Lamb as Lamb,
    )
    from modelworks.optim.torch_optimizers import (
        Lars as Lars,
    )
    from modelworks.optim.torch_optimizers import (
        Lion as Lion,
    )
    from modelworks.optim.torch_optimizers import Lion8bit as Lion8bit
    from modelworks.optim.torch_optimizers import Muon as Muon
    from modelworks.optim.torch_optimizers import (
        Sgd as Sgd,
    )

__all__ = [
    "Adafactor",
    "Adam",
    "Adam8bit",
    "AdamW",
    "AdamW8bit",
    "Lamb",
    "Lars",
    "Lion",
    "Lion8bit",
    "Muon",
    "MupGroup",
    "NotConforming",
    "Optimizer",
    "ParameterOptions",
    "Reduce",
    "Schedule",
    "Sgd",
    "Split",
    "build_optimizer",
    "build_schedule",
    "check_optimizer",
    "clip_gradients",
    "mup_groups",
    "norm_powers",
    "parameter_options",
]

_NEED_TORCH = {
    "Optimizer": "optimizer",
    "build_optimizer": "optimizer",
    "clip_gradients": "clip",
    "MupGroup": "mup",
    "mup_groups": "mup",
    "Reduce": "clip",
    "norm_powers": "clip",
    "Split": "sums",
    **dict.fromkeys(["Adafactor", "Adam", "AdamW", "Lamb", "Lars", "Lion", "Sgd"], "torch_optimizers"),
    **dict.fromkeys(["Adam8bit", "AdamW8bit", "Lion8bit", "Muon"], "torch_optimizers"),
    **dict.fromkeys(["NotConforming", "check_optimizer"], "conformance"),
}

__getattr__ = lazily(__name__, _NEED_TORCH)
