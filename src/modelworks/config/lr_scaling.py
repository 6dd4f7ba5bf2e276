"""How the learning rate follows the batch: the rate that was found at one batch, for another.

    linear   lr B / B0          SGD: k batches of B0 move the weights about as far as one of k B0 at k times the rate
                                (Goyal et al. 2017, 1706.02677)
    sqrt     lr sqrt(B / B0)    Adam and its relatives divide by the gradient's own noise, which falls with the root of
                                the batch (Malladi et al. 2022, 2205.10287, who move betas and eps too, which is not
                                done here; You et al. 2019, 1904.00962, for LAMB)

Both hold where noise rules the gradient, that is below the critical batch. Beyond it the best rate stops rising: of SGD
it is lr_max / (1 + B_noise / B) (McCandlish et al. 2018, 1812.06162).
Large rates need a gradual warmup, which Goyal et al. begin at the rate of the base batch rather than at 0.

Batches are *global* batches, in sequences. How many ranks share one enters nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from modelworks.config.optimizers import OptimizerName

ScalingRule = Literal["none", "sqrt", "linear"]
FAR = 32.0  # times the base batch: so far Goyal et al. went (256 to 8,192), and LAMB to 64


class UsualRule(NamedTuple):
    """The rule that an optimiser's batches are usually scaled by, and whose result that is."""

    rule: ScalingRule
    source: str


_ADAM = UsualRule("sqrt", "Malladi et al. 2022 (2205.10287), up to the critical batch")
_SIGN = UsualRule(
    "sqrt", "a sign's step is as long at any batch while its noise falls, as Adam's: no result of its own"
)
USUAL_RULES: dict[OptimizerName, UsualRule] = {
    "sgd": UsualRule("linear", "Goyal et al. 2017 (1706.02677), up to 8,192 images"),
    "lars": UsualRule("sqrt", "as LAMB, whose relative rates it has; no result of its own"),
    "lamb": UsualRule("sqrt", "You et al. 2019 (1904.00962), 512 to 32,768 sequences"),
    "adam": _ADAM,
    "adamw": _ADAM,
    "adam8bit": _ADAM,
    "adamw8bit": _ADAM,
    "lion": _SIGN,
    "lion8bit": _SIGN,
    "muon": UsualRule("sqrt", "by custom (nanochat); no result of its own"),
    "adafactor": UsualRule("sqrt", "as Adam, whose second moment it factors; no result of its own"),
}


@dataclass(frozen=True)
class ScaledRate:
    """lr: of the batch that was asked about. reason: what it came from, for people."""

    lr: float
    reason: str


def scale_factor(rule: ScalingRule, batch: float, base_batch: float) -> float:
    """What the rate of `base_batch` is multiplied by. Batches in one unit; ValueError unless both are above 0."""
    if not (0 < batch < math.inf and 0 < base_batch < math.inf):
        raise ValueError(f"batches to scale a rate by must be above 0, got {batch} and {base_batch}")
    ratio = batch / base_batch
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rule]


def scale_rate(optimizer: OptimizerName, lr: float, rule: ScalingRule, batch: int, base_batch: int) -> ScaledRate:
    """The rate for `batch` sequences of one found at `base_batch`, with what supports it and what does not."""
    factor, times = scale_factor(rule, batch, base_batch), batch / base_batch
    formula = f"{lr:g} at {base_batch} sequences x {'sqrt' if rule == 'sqrt' else ''}({batch} / {base_batch})"
    reason = f"{rule} rule: {formula}"
    usual = USUAL_RULES[optimizer]
    if rule == usual.rule:
        reason += f"; {usual.source}"
    elif rule != "none":
        reason += f"; for {optimizer} {usual.rule} is usual: {usual.source}"
    if times > FAR or times < 1 / FAR:
        reason += f"; {max(times, 1 / times):.3g}x is far: beyond the critical batch (`modelworks tune batch`) it fails"
    return ScaledRate(lr * factor, reason)
