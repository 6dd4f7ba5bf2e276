"""The cosine of a step's gradient with the one before it: near 1 where steps go on, below 0 where they undo each other.

    cos = sum g g' / sqrt(sum g^2 sum g'^2)         over a sample of the elements, before clipping

Of each tensor a 128th of its elements is taken, or `LEAST`, always the same ones, and kept until the next step, in
bfloat16 where parameters have 2 bytes: under 1 % of the parameters' bytes. Their places follow from the shape, and are
worked out again rather than kept. All three sums are of the sample, weighted by tensor, so that an element that is
large in both gradients is large above and below the line.

Of k sampled elements whose products are independent the cosine is off by about (1 - cos^2) / sqrt(k), one standard
deviation; gradients whose squares are unequal and go together count as n sum g^2 g'^2 / (sum g^2 sum g'^2) times fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.train.health.elements import Elements

SHARE = 128
LEAST = 256  # elements of one tensor


class ConsecutiveCosine:
    """Of one rank. specs: of the shards that it counts. dtypes: of the parameters. `keep` a step's gradients, then
    `compare` the next one's."""

    def __init__(self, specs: Mapping[str, ShardSpec], dtypes: Mapping[str, torch.dtype]) -> None:
        self._samples = {
            name: Elements(spec, max(LEAST, math.prod(spec.shape) // SHARE), held=False) for name, spec in specs.items()
        }
        self._narrow = {name for name in specs if dtypes[name].itemsize < 4}
        self._kept: tuple[int, dict[str, Tensor]] | None = None
        self.sums = torch.zeros(3, dtype=torch.float64)

    def keep(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """gradients: of the shards, unscaled, before clipping."""
        taken = self._taken(gradients)
        self._kept = (
            step,
            {name: each.bfloat16() if name in self._narrow else each for name, each in taken.items()},
        )

    def compare(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """`sums` then has this rank's summands of (g g', g^2, g'^2); zeros where the step before was not kept."""
        self.sums = torch.zeros(3, dtype=torch.float64)
        if self._kept is None or self._kept[0] != step - 1:
            return
        for name, now in self._taken(gradients).items():
            before, weight = self._kept[1][name].double(), self._samples[name].weight
            now = now.double()
            products = torch.stack([before @ now, now @ now, before @ before])
            self.sums += weight * products.cpu()

    @property
    def n_bytes(self) -> int:
        """Held between two steps."""
        kept = sum(tensor.nbytes for tensor in self._kept[1].values()) if self._kept else 0
        return kept + sum(sample.n_bytes for sample in self._samples.values())

    def _taken(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        taken = {}
        for name, sample in self._samples.items():
            if name in gradients:
                wide = torch.promote_types(gradients[name].dtype, torch.float32)
                taken[name] = sample.of(gradients[name]).to(wide)
        return taken


def cosine(sums: Tensor) -> float | None:
    """sums: over all ranks. None where a gradient is zero or not finite, or there was none before."""
    product, now, before = sums.tolist()
    scale = math.sqrt(now * before) if now * before > 0 else 0.0
    found = product / scale if scale and math.isfinite(scale) else math.nan
    return found if math.isfinite(found) else None
