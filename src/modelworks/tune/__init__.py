"""Finding a run's rate and batch: how they scale, what the gradients' noise says, and short runs that try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.tune.critical_batch import CriticalBatch as CriticalBatch
    from modelworks.tune.critical_batch import examples_factor as examples_factor
    from modelworks.tune.critical_batch import read_critical_batch as read_critical_batch
    from modelworks.tune.critical_batch import steps_factor as steps_factor
    from modelworks.tune.scaling import scale_factor as scale_factor
    from modelworks.tune.scaling import scale_rate as scale_rate

_HOME = {
    "CriticalBatch": "critical_batch",
    "examples_factor": "critical_batch",
    "read_critical_batch": "critical_batch",
    "scale_factor": "scaling",
    "scale_rate": "scaling",
    "steps_factor": "critical_batch",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
