"""What the parts of one step's gradient say: how noisy it is, and how much data-parallel ranks disagree about it.

A part is the gradient of one micro-batch on one data-parallel rank, seen as its backward pass brings it
(`modelworks.parallel.GradientWatch`): no pass is made for it, and nothing of it is kept but

    its squared norm       where the rank has the whole of it, over all elements
    a sample of it         where it has one summand (columns of rows on cp ranks, a tied embedding's two ends, norms
                           under sequence parallelism, copied key/value heads, two stages that share a parameter):
                           samples are added up over those ranks before they are squared

and, of several data-parallel ranks, a sample of each rank's own sum. Samples are of other elements in each measured
step, so that averages over steps are of all. The logical tensor counts: each element once, whichever rank has it.

Experts that are spread over ranks see tokens of all ranks of their group, so their parts are the micro-batches of a
whole group, and they are estimated apart (`noise.estimate_noise`). Where a row's columns are on other ranks than those
of an expert group, an expert's part is on nobody: they are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworks.models.random import Key
from modelworks.parallel import SplitModel
from modelworks.train.health.elements import Elements
from modelworks.train.health.noise import Squares

SAMPLE = 4096  # elements of one tensor, or a thousandth of it where that is more
_SHARE = 1024
_DENSE, _EXPERTS = 0, 1
_SMALL, _LARGE, _OVERLAP = range(3)
# Groups over which a part may be split; two stages of one rank are none.
_PARTIAL = ("tp", "kv", "tied", "cp")


@dataclass(frozen=True)
class Disagreement:
    """ranks: by data-parallel rank, || g_r - g || / || g ||, g_r being the mean gradient of its own tokens."""

    ranks: list[float]

    @property
    def mean(self) -> float:
        """The root of the mean square."""
        return math.hypot(*self.ranks) / math.sqrt(len(self.ranks))


@dataclass(frozen=True)
class _Parameter:
    """kind: of its parts. split: groups over which they are summands. counted: whether this rank counts them."""

    kind: int
    split: tuple[str, ...]
    counted: bool


class MicroGradients:
    """Of one rank. In a measured step call `begin`, `see` for each gradient, `end`; then, on every rank, `sums`, whose
    total over all ranks `read` understands."""

    def __init__(self, model: SplitModel) -> None:
        self._model, self._mesh = model, model.mesh
        self._parameters = dict(_parameters(model))
        compared = self._mesh.size("dp") > 1
        # In the model's order, which is the same on all ranks that add up samples.
        self._sampled = dict.fromkeys(
            name for name, one in self._parameters.items() if one.split or (compared and one.kind == _DENSE)
        )
        self.begin(0, [], 1.0)

    def begin(self, step: int, shares: Sequence[float], scale: float) -> None:
        """step: its number, which chooses the sample. shares: of the global batch's target weight, by micro-batch of
        this rank. scale: of the losses that are differentiated."""
        self._step, self._shares, self._scale = step, list(shares), scale
        self._norms: list[list[Tensor]] = [[], []]  # of whole parts, by kind
        self._large = [0.0, 0.0]
        self._samples: dict[str, Tensor] = {}
        self._chosen: dict[str, Elements] = {}

    def see(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        parameter = self._parameters.get(name)
        if parameter is None:
            return
        if not parameter.split and parameter.counted:
            dtype = torch.promote_types(gradient.dtype, torch.float32)
            self._norms[parameter.kind].append(torch.linalg.vector_norm(gradient, dtype=dtype))
        if name in self._sampled:
            self._kept(name)[micro_batch if parameter.split else 0] += self._elements(name).of(gradient)

    def end(self, squares: Mapping[str, float]) -> None:
        """squares: of the finished gradients that this rank counts, unscaled, by name."""
        for name, square in squares.items():
            parameter = self._parameters.get(name)
            if parameter is not None and not parameter.split:
                self._large[parameter.kind] += square

    def sums(self) -> Tensor:
        """This rank's summands, float64: for each kind `small`, `large` and `overlap`; then squared distances by
        data-parallel rank, and the square of what they are distances to. Every rank calls it."""
        found = torch.zeros(2, 3, dtype=torch.float64)
        for kind, norms in enumerate(self._norms):
            if norms:
                found[kind, _SMALL] = torch.stack(norms).double().square().sum().cpu() / self._scale**2
            found[kind, _LARGE] = self._large[kind]
        found[:, _OVERLAP] = self._overlaps()
        # In one order on all ranks: a gradient may not have come on some of them.
        samples = {name: self._kept(name).div_(self._scale) for name in self._sampled}
        for group in _PARTIAL:
            self._add_up(group, [kept for name, kept in samples.items() if group in self._parameters[name].split])
        distances = self._distances(samples, found)
        self.begin(0, [], 1.0)  # what was kept is free
        return torch.cat([found.flatten(), distances])

    def _distances(self, samples: Mapping[str, Tensor], found: Tensor) -> Tensor:
        """From the samples of whole parts, or of this rank's sum of them. Adds to `found` what the first say."""
        own = {name: kept.sum(0) for name, kept in samples.items()}
        whole = {name: each.clone() for name, each in own.items()}
        self._add_up("dp", list(whole.values()))
        distances = torch.zeros(self._mesh.size("dp") + 1, dtype=torch.float64)
        place, share = self._mesh.place("dp"), sum(self._shares)
        for name, total in whole.items():
            parameter, weight = self._parameters[name], self._elements(name).weight
            if not parameter.counted:
                continue
            square = weight * float(total.square().sum()) if place == 0 else 0.0
            if parameter.split:
                found[parameter.kind, _SMALL] += weight * float(samples[name].square().sum())
                found[parameter.kind, _LARGE] += square
            mean = own[name] / share if share else own[name]
            distances[place] += weight * float((mean - total).square().sum())
            distances[-1] += square
        return distances

    def read(self, sums: Tensor) -> tuple[list[Squares], Disagreement | None]:
        """sums: over all ranks. No disagreement of one rank with itself, nor where the gradient is 0."""
        values = sums.cpu().tolist()
        groups = [Squares(values[3 * k + _LARGE], values[3 * k + _SMALL], values[3 * k + _OVERLAP]) for k in range(2)]
        *distances, square = values[6:]
        compared = len(distances) > 1 and square > 0
        ranks = Disagreement([(each / square) ** 0.5 for each in distances]) if compared else None
        return groups, ranks

    def _elements(self, name: str) -> Elements:
        if name not in self._chosen:
            spec = self._model.plans[name].computed
            limit = max(SAMPLE, math.prod(spec.shape) // _SHARE)
            offset = Key.of("sample of gradients", self._step).low
            self._chosen[name] = Elements(spec, limit, offset=offset, device=self._mesh.device)
        return self._chosen[name]

    def _kept(self, name: str) -> Tensor:
        """(parts, elements): the sample by micro-batch, or their sum where nothing else is wanted."""
        if name not in self._samples:
            parts = len(self._shares) if self._parameters[name].split else 1
            size = self._elements(name).n_local
            self._samples[name] = torch.zeros(parts, size, dtype=torch.float64, device=self._mesh.device)
        return self._samples[name]

    def _add_up(self, group: str, tensors: Sequence[Tensor]) -> None:
        """In place, over the ranks of a group; one all-reduce."""
        if self._mesh.size(group) == 1 or not tensors:
            return
        flat = self._mesh.group(group).all_reduce_(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))

    def _overlaps(self) -> Tensor:
        """Summands, by kind, of the sum of squared shares: from one of the ranks that know a part."""
        mesh, layout = self._mesh, self._mesh.layout
        shares = torch.tensor(self._shares, dtype=torch.float64)
        found = torch.ones(2, dtype=torch.float64)  # experts that there are not: no parts
        first = mesh.place("tp") == 0 and mesh.place("pp") == 0
        found[_DENSE] = shares.square().sum() if first and mesh.place("cp") == 0 else 0.0
        if layout.ep > 1:
            together = mesh.group("ep").all_reduce_(shares.to(mesh.device)).cpu() / layout.cp
            found[_EXPERTS] = together.square().sum() if first and mesh.place("ep") == 0 else 0.0
        return found


def _parameters(model: SplitModel) -> Iterator[tuple[str, _Parameter]]:
    """What is measured of this rank's trained parameters, by name."""
    mesh, layout = model.mesh, model.mesh.layout
    stages = Counter(name for part in model.parts.values() for name, _ in part.named_parameters())
    for name, tensor in model.stored.items():
        plan = model.plans[name]
        if not tensor.requires_grad:
            continue
        spread = plan.experts and layout.ep > 1
        if spread and layout.ep % layout.cp:
            continue
        split = [group for group in plan.sums if mesh.size(group) > 1]
        if layout.cp > 1 and not spread:
            split.append("cp")
        if stages[name] > 1:
            split.append("stages")
        counted = plan.first_copy and ("cp" not in split or mesh.place("cp") == 0)
        yield name, _Parameter(_EXPERTS if spread else _DENSE, tuple(split), counted)
