"""Moments in 8 bits around any elementwise rule (Dettmers et al. 2021, 2110.02861).

Of each tensor a piece at a time is decoded, updated by the rule itself, and encoded again, so the formula is the
rule's, and floating-point moments exist of one piece only. Small tensors (under 4,096 elements) and embeddings, whose
rows are updated rarely and unequally, keep moments of full width. These are asked of the logical tensor, so that all
layouts keep the same.

On a CPU a compiled kernel does all of this to one block after the other, with the same codes
(`kernels/eight_bit.cpp`).

Where a cut between ranks goes through a block (`SharedTiles`), the update is computed twice: first for the magnitudes,
on which the ranks then agree, and again to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from modelworks.layout import ShardSpec
from modelworks.optim.adam import Adam
from modelworks.optim.codec import Blocks, SharedTiles, code_tables
from modelworks.optim.codec import Piece as Part
from modelworks.optim.compiled import STRETCH, Job, Kernels, kernels_for, run
from modelworks.optim.lion import Lion
from modelworks.optim.pieces import Piece, Step
from modelworks.optim.sums import Sums

SMALL = 4096  # elements; what is smaller keeps moments of full width

CODES, SCALES = "codes", "scales"


@dataclass(frozen=True)
class EightBit:
    """inner: whose moments these are. unsigned: those of its states that are never negative.

    State `exp_avg` becomes `exp_avg_codes` (uint8) and `exp_avg_scales` (float32, a number a block).
    """

    inner: Adam | Lion
    unsigned: frozenset[str] = frozenset({"exp_avg_sq"})
    _shared: dict[str, SharedTiles] = field(default_factory=dict, compare=False, repr=False)

    def states(self, spec: ShardSpec) -> dict[str, ShardSpec]:
        inner = self.inner.states(spec)
        if not is_quantized(spec.name, spec.shape):
            return inner
        tiles = Blocks(spec).tiles
        kinds = [(f"{kind}_{part}", held) for kind in inner for part, held in ((CODES, spec), (SCALES, tiles))]
        return dict(kinds)

    def update(self, pieces: Sequence[Piece], step: Step, sums: Sums) -> None:
        wide = [piece for piece in pieces if not is_quantized(piece.name, piece.spec.shape)]
        self.inner.update(wide, step, sums)
        narrow = [piece for piece in pieces if is_quantized(piece.name, piece.spec.shape)]
        agreed = self._agree_on_scales(narrow, step, sums)
        jobs: list[Job] = []
        for piece in narrow:
            if kernels := kernels_for(piece.value):
                jobs += self._jobs(kernels, piece, step, agreed.get(piece.name))
            else:
                self._update(piece, step, sums, agreed.get(piece.name))
        run(jobs)

    def _update(self, piece: Piece, step: Step, sums: Sums, agreed: Mapping[str, Tensor] | None) -> None:
        blocks = Blocks(piece.spec)
        for part in blocks.pieces():
            value, gradient = (blocks.view(tensor)[part.index] for tensor in (piece.value, piece.gradient))
            moments = self._moments(piece, blocks, part)
            self.inner.update([Piece(piece.spec, value, gradient, moments, piece.options)], step, sums)
            for kind, moment in moments.items():
                codes, scales = piece.state[f"{kind}_{CODES}"], piece.state[f"{kind}_{SCALES}"]
                largest = blocks.largest(part, moment) if agreed is None else blocks.scales(agreed[kind], part)
                blocks.keep(part, largest, scales)
                blocks.encode(part, moment, codes, scales, signed=kind not in self.unsigned)

    def _jobs(
        self,
        kernels: Kernels,
        piece: Piece,
        step: Step,
        scales: Mapping[str, Tensor] | None,
        *,
        measures: bool = False,
    ) -> Iterator[Job]:
        """The update by a compiled kernel, in parts of whole rows of tiles. scales: agreed ones. measures: it writes
        those, and of everything else only the weights."""
        name, numbers = self.inner.in_tiles(step, piece.options)
        geometry = Blocks(piece.spec).geometry
        kinds = list(self.inner.states(piece.spec))
        state = [piece.state[f"{kind}_{part}"] for kind in kinds for part in (CODES, SCALES)]
        largest = [scales[kind] for kind in kinds] if scales is not None else state[1::2]
        tables = [code_tables(kind not in self.unsigned, piece.value.device) for kind in kinds]
        entries = [table for own in tables for table in (own.values, own.limits)]
        tensors = [piece.value, piece.gradient, *state, *largest, *entries]
        units = geometry[0] * geometry[7] if piece.value.numel() else 0
        together = max(1, units * STRETCH // max(1, piece.value.numel()))
        agreed, writes = scales is not None and not measures, not measures
        for first in range(0, units, together):
            last = min(first + together, units)
            yield kernels.job(name, tensors, [first, last, agreed, writes, *geometry], numbers)

    def _moments(self, piece: Piece, blocks: Blocks, part: Part) -> dict[str, Tensor]:
        return {
            kind: blocks.decode(
                part,
                piece.state[f"{kind}_{CODES}"],
                piece.state[f"{kind}_{SCALES}"],
                signed=kind not in self.unsigned,
                dtype=piece.value.dtype,
            )
            for kind in self.inner.states(piece.spec)
        }

    def _agree_on_scales(self, narrow: Sequence[Piece], step: Step, sums: Sums) -> dict[str, dict[str, Tensor]]:
        """By tensor and state, the scales after this update of tensors that have blocks on several ranks."""
        shared = self._shared_tiles(sums)
        if shared is None or not shared.any:
            return {}
        agreed: dict[str, dict[str, Tensor]] = {}
        for piece in narrow:
            if piece.name in shared:
                blocks = Blocks(piece.spec)
                kinds = self.inner.states(piece.spec)
                agreed[piece.name] = {k: torch.zeros_like(piece.state[f"{k}_{SCALES}"]) for k in kinds}
                if kernels := kernels_for(piece.value):
                    trial = replace(piece, value=piece.value.clone())
                    run(list(self._jobs(kernels, trial, step, agreed[piece.name], measures=True)))
                    continue
                for part in blocks.pieces():
                    moments = self._moments(piece, blocks, part)
                    tried = blocks.view(piece.value)[part.index].clone()
                    gradient = blocks.view(piece.gradient)[part.index]
                    self.inner.update([Piece(piece.spec, tried, gradient, moments, piece.options)], step, sums)
                    for kind, moment in moments.items():
                        blocks.keep(part, blocks.largest(part, moment), agreed[piece.name][kind])
        kinds = self.inner.states(ShardSpec.whole("", (1,)))
        shared.agree([{name: scales[kind] for name, scales in agreed.items()} for kind in kinds])
        return agreed

    def _shared_tiles(self, sums: Sums) -> SharedTiles | None:
        split = sums.split
        if split is None or split.reduce is None:
            return None
        if "all" not in self._shared:
            shapes = {name: shape for name, shape in split.shapes.items() if is_quantized(name, shape)}
            specs = {name: spec for name, spec in split.specs.items() if name in shapes}
            self._shared["all"] = SharedTiles(shapes, specs, split.reduce)
        return self._shared["all"]


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether the moments of this parameter are kept in 8 bits."""
    return math.prod(shape) >= SMALL and not name.endswith("embedding.weight")


def state_dtype(kind: str, wide: torch.dtype) -> torch.dtype:
    """Of a state by its kind; wide: of the weights that are updated."""
    if kind.endswith(f"_{CODES}"):
        return torch.uint8
    return torch.float32 if kind.endswith(f"_{SCALES}") else wide
