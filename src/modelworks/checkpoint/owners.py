"""Which rank writes which part of each tensor.

The idea: ranks that hold copies of the same elements (data-parallel replicas, norms under tensor parallelism, a tied
embedding at both ends of a pipeline) share the work of writing them. Every rank works out the whole distribution from
the layout alone, so nothing is negotiated.

The invariant: each element of each tensor is written exactly once, by a rank that holds it; and the parts of a tensor
are the cells of a grid, whatever the layout.

Tensors are given to the holder with the least to write so far, the largest first. A tensor larger than a fraction of an
even share is cut before, so that one embedding cannot keep a single rank busy; no finer, for every part costs an entry
in the manifest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from modelworks.checkpoint.grid import Box, cells_in, n_cells, within
from modelworks.layout import ShardSpec, split_evenly

# Parts are at most this fraction of an even share of the elements: then no rank writes much more than that share.
_FRACTION = 8
_SMALLEST = 1 << 16  # elements: what is smaller is not cut

Specs = Mapping[str, ShardSpec]


@dataclass(frozen=True)
class Shard:
    """Part of a logical tensor that this rank writes.

    section, spec.name: what it is called in the checkpoint; spec.shape: of the whole; spec.bounds: where `tensor` lies
    in it. A state that is no copy of its parameter's shape (factored, 8-bit) is a tensor like any other.
    """

    section: str
    spec: ShardSpec
    tensor: Tensor

    @property
    def key(self) -> str:
        """Its name inside a shard file."""
        return f"{self.section}/{self.spec.name}"

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Owners:
    """What one rank writes of the tensors of a split model; made once for a run.

    specs_of: rank -> what it stores, by parameter name (`SplitModel.stored_specs`), and by `<parameter>/<state>` where
    a state has another shape than its parameter.
    """

    def __init__(self, specs_of: Callable[[int], Specs], rank: int, world_size: int) -> None:
        held = [specs_of(each) for each in range(world_size)]
        self._held = held[rank]
        self._writes = share_out(held)[rank]

    def shards(self, section: str, tensors: Mapping[str, Tensor]) -> list[Shard]:
        """This rank's part of tensors that are split as the parameters are, or as they themselves are said to be.

        tensors: `<parameter>` or `<parameter>/<state>` -> this rank's slice. A state with a spec of its own has its
        shape, any other its parameter's.
        """
        shards = []
        for name, tensor in tensors.items():
            split_as = name if name in self._held else name.partition("/")[0]
            held = self._held[split_as]
            if tuple(tensor.shape) != held.local_shape:
                raise ValueError(
                    f"{section}/{name}: shape {tuple(tensor.shape)}, that of {split_as} is {held.local_shape}"
                )
            for spec in self._writes.get(split_as, ()):
                part = tensor.detach()[within(spec.bounds, held.bounds)]
                shards.append(Shard(section, replace(spec, name=name), part))
        return shards


def whole_shards(section: str, tensors: Mapping[str, Tensor]) -> list[Shard]:
    """Tensors that are whole on the one rank that writes them."""
    return [Shard(section, ShardSpec.whole(name, tuple(t.shape)), t.detach()) for name, t in tensors.items()]


def share_out(held: Sequence[Specs], smallest: int = _SMALLEST) -> list[dict[str, list[ShardSpec]]]:
    """By rank, which parts it writes of what it holds: nearly always one of a tensor, or none.

    held: by rank, what it stores, counted or not. smallest: elements of the smallest tensor that is cut.
    """
    tensors = _holders(held)
    shapes = {name: spec.shape for specs in held for name, spec in specs.items()}
    even_share = sum(math.prod(shapes[name]) for name in tensors) / len(held)
    most = max(smallest, int(even_share / _FRACTION), 1)
    jobs: list[tuple[int, str, list[Box], list[int]]] = []  # elements of the largest part, name, parts, who may
    for name, boxes in tensors.items():
        cells = _aligned(shapes[name], boxes)
        jobs += [(max(_volume(part) for part in parts), name, parts, ranks) for parts, ranks in _cut_cells(cells, most)]
    load = [0] * len(held)
    writes: list[dict[str, list[ShardSpec]]] = [defaultdict(list) for _ in held]
    for _, name, parts, ranks in sorted(jobs, key=lambda job: -job[0]):
        for part, rank in zip(parts, sorted(ranks, key=lambda rank: (load[rank], rank)), strict=False):
            load[rank] += _volume(part)
            writes[rank][name].append(ShardSpec(name, shapes[name], part))
    return [dict(own) for own in writes]


def _holders(held: Sequence[Specs]) -> dict[str, dict[Box, list[int]]]:
    """Tensor -> each box of it that some rank holds -> the ranks that do."""
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, specs in enumerate(held):
        for name, spec in specs.items():
            # A tensor without elements still has to be listed, by one of its holders.
            if spec.n_local or not math.prod(spec.shape):
                found[name][spec.bounds].append(rank)
    return found


def _aligned(shape: tuple[int, ...], boxes: Mapping[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    """The boxes, cut further where one spans another's edge: with uneven shards ZeRO may cut one tensor-parallel shard
    along another dimension than the next, and neighbours may both hold what lies at their border (scales of blocks)."""
    cuts = tuple(
        tuple(sorted({0, size, *(edge for box in boxes for edge in box[dimension])}))
        for dimension, size in enumerate(shape)
    )
    if len(boxes) == n_cells(cuts) and sum(map(_volume, boxes)) == math.prod(shape):
        return list(boxes.items())  # each of them is one cell
    cells: dict[Box, list[int]] = defaultdict(list)
    for box, ranks in boxes.items():
        inside = [cell.box for cell in cells_in(cuts, box)]
        for cell in inside or [box]:
            cells[cell] += ranks
    return list(cells.items())


def _cut_cells(cells: Sequence[tuple[Box, list[int]]], most: int) -> Iterator[tuple[list[Box], list[int]]]:
    """Each cell as parts of about `most` elements and no more than it has holders. All cells of a tensor are cut along
    the same dimension into as many parts, so that a grid stays one."""
    holders = min(len(ranks) for _, ranks in cells)
    if holders == 1:
        yield from (([box], ranks) for box, ranks in cells)
        return
    wanted = min(holders, -(-max(_volume(box) for box, _ in cells) // most))
    sizes = [min(stop - start for start, stop in edges) for edges in zip(*(box for box, _ in cells), strict=True)]
    if wanted <= 1 or not sizes or max(sizes) <= 1:
        yield from (([box], ranks) for box, ranks in cells)
        return
    dimension = next((d for d, size in enumerate(sizes) if size >= wanted), sizes.index(max(sizes)))
    n_parts = min(wanted, sizes[dimension])
    for box, ranks in cells:
        start, stop = box[dimension]
        edges = [split_evenly(stop - start, n_parts, index) for index in range(n_parts)]
        parts = [(*box[:dimension], (start + a, start + b), *box[dimension + 1 :]) for a, b in edges]
        yield parts, ranks


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
