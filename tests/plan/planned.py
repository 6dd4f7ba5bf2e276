"""What several tests of the planner start from: a device, and a split with sizes that matter to none of them."""

from __future__ import annotations

from modelworks.hardware import device
from modelworks.plan import Machine, Split

A100 = device("A100")
MACHINE = Machine.of(A100, "bf16")


def split(**changes: float) -> Split:
    return Split(**{"micro_batch": 1.0, "global_batch": 64.0, "seq_len": 2048.0, **changes})
