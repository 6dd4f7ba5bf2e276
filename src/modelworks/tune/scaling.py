"""How a rate follows the batch, and how long its warmup should be, before a run is made.

The rules are the configuration's own (`modelworks.config.lr_scaling`), since `optimizer.lr_scaling` applies them; this
is where they are offered to people who tune.
"""

from __future__ import annotations

from modelworks.config import USUAL_RULES, ScaledRate, ScalingRule, UsualRule, scale_factor, scale_rate

__all__ = ["USUAL_RULES", "ScaledRate", "ScalingRule", "UsualRule", "scale_factor", "scale_rate"]
