"""ZeRO-3 by torch's FSDP2: each rank stores a shard of every parameter and gathers a block's just before its use.

FSDP2 brings the gathering and freeing around each block, prefetching and the reduce-scatter in the backward pass
(Zhao et al. 2023, 2304.11277). What is ours around it:

 - gradients are plain sums (FSDP2 would average), taken in float32 at least from FSDP2's reduction before it rounds
   them to the parameter's dtype, and added up here over micro-batches;
 - replicas: the sum of shards is all-reduced by our own group, once a step (FSDP2 knows each unit as sharded only);
 - each collective goes through our `Group`, so that it is counted and named like every other;
 - every trained parameter takes part in every reduction, as zeros where a batch did not use it.

Blocks are freed after their forward pass and gathered again for their backward; what lies outside the blocks stays
gathered between the two, because the head is used by the loss, after the model's forward. Under a pipeline with
`pp_gather: step` nothing is freed but by `reshard`. Parameters that ZeRO does not cut (experts spread over all ranks)
and those that two stages of this rank share are looked after by a `ReplicatedStore`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from modelworks.config import ParallelConfig
from modelworks.layout import ParameterPlan
from modelworks.parallel.data import ReplicatedStore
from modelworks.parallel.gradients import Fill, materialize, named_parameters, storage_bytes, sum_partial
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.sharded_units import ShardedPart, Unit, Wrapping


class ShardedStore:
    """Zero 3 over this rank's parts of the model; a `GradientStore`. See `build_gradient_store`."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        plans: Mapping[str, ParameterPlan],
        mesh: Mesh,
        parallel: ParallelConfig,
    ) -> None:
        owned = named_parameters(parts)
        self._order = list(owned)
        self._plans, self._mesh = plans, mesh
        self._every = parallel.accumulate_reduce == "every"
        self._frees = not (parallel.pp > 1 and parallel.pp_gather == "step")
        rest = {name for name, (_, owners) in owned.items() if owners > 1 or plans[name].zero_dimension is None}
        materialize(parts, mesh.device, only={owned[name][0] for name in rest})
        self._rest = ReplicatedStore(
            parts,
            {name: plans[name] for name in rest},
            mesh,
            keep_buffers=False,
            every=self._every,
            bucket_bytes=int(parallel.bucket_size),
            only=rest,
        )
        cut = {name: plan for name, plan in plans.items() if name in owned and name not in rest}
        names = {id(parameter): name for name, (parameter, _) in owned.items()}
        wrap = Wrapping(cut, mesh, names, frees=self._frees, on_host=parallel.offload_params)
        self._parts = [ShardedPart(part, wrap, self._reduced) for part in parts]
        self._units = {name: unit for part in self._parts for unit in part.units for name in unit.names}

    def stored_parameters(self) -> dict[str, Tensor]:
        stored = self._rest.stored_parameters()
        for part in self._parts:
            for unit in part.units:
                stored |= unit.stored
        return {name: stored[name] for name in self._order}

    def leaves(self) -> dict[str, Tensor]:
        leaves = self._rest.leaves()
        for part in self._parts:
            for unit in part.units:
                leaves |= unit.leaves()
        return {name: leaves[name] for name in self._order if name in leaves}

    @torch.no_grad()
    def load(self, fill: Fill) -> None:
        self._reshard_all()
        self._rest.load(fill)
        for name, unit in self._units.items():
            fill(self._plans[name].stored, unit.stored[name].detach())

    def begin_step(self, n_micro_batches: int) -> None:
        self._rest.begin_step(n_micro_batches)

    def before_backward(self, names: Collection[str], last: bool, deferred: bool = False) -> None:
        self._rest.before_backward(names, last, deferred)
        for part in self._touched(names):
            part.expect(reduces=(self._every or last) and not deferred, last=last and not deferred, frees=self._frees)
            # The loss uses the head before FSDP2 hears of the backward; another micro-batch's may have freed it.
            part.root.unshard()

    def after_backward(self, names: Collection[str]) -> None:
        self._rest.after_backward(names)
        for part in self._touched(names):
            for unit in part.units:
                unit.collect()

    def reduce(self, names: Collection[str]) -> None:
        self._rest.reduce(names)
        for part in self._touched(names):
            part.reduce_by_hand(frees=self._frees)
            for unit in part.units:
                unit.collect()

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        units = [unit for part in self._parts for unit in part.units if unit.trained]
        for unit in units:
            if unit.total is None:
                raise RuntimeError(f"no backward was the last one for {unit.names[0]}: it was not reduced")
            if self._every:  # `last` has sent it as it came
                unit.work = unit.replicas.start_all_reduce_(unit.total)
        for unit in units:
            if unit.work is not None:
                unit.work.wait()
            gradients |= unit.gradients()
        sum_partial({name: gradients[name] for name in self._order if name in gradients}, self._plans, self._mesh)
        gradients |= self._rest.finish()
        return {name: gradients[name] for name in self._order if name in gradients}

    def after_update(self) -> None:
        self._reshard_all()  # what an evaluation has left gathered would be out of date
        self._rest.after_update()

    def end_step(self) -> None:
        self._rest.end_step()
        for part in self._parts:
            for unit in part.units:
                unit.clear()

    def unshard(self, names: Collection[str]) -> None:
        for module in self._modules(names):
            module.unshard()

    def reshard(self, names: Collection[str]) -> None:
        for module in self._modules(names):
            module.reshard()

    def bytes(self) -> dict[str, int]:
        parameters: list[Tensor | None] = []
        gradients: list[Tensor | None] = []
        for part in self._parts:
            for unit in part.units:
                parameters += unit.parameter_memory()
                gradients += unit.gradient_memory()
        rest = self._rest.bytes()
        return {
            "parameters": storage_bytes(parameters) + rest["parameters"],
            "gradients": storage_bytes(gradients) + rest["gradients"],
        }

    def _touched(self, names: Collection[str]) -> list[ShardedPart]:
        wanted = {id(self._units[name]) for name in names if name in self._units}
        return [part for part in self._parts if any(id(unit) in wanted for unit in part.units)]

    def _modules(self, names: Collection[str]) -> Iterator[FSDPModule]:
        wanted = {id(self._units[name]) for name in names if name in self._units}
        for part in self._parts:
            for module, units in part.modules:
                if any(id(unit) in wanted for unit in units):
                    yield module

    def _reshard_all(self) -> None:
        for part in self._parts:
            for module, _ in part.modules:
                module.reshard()

    def _reduced(self, unit: Unit, row: Tensor) -> None:
        """Called by FSDP2 with the flat sum of a unit's shards, which is ours from now on."""
        if unit.total is None:
            unit.total = row
        else:
            unit.total += row
        if not self._every:
            unit.work = unit.replicas.start_all_reduce_(unit.total)
