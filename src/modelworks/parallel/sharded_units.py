"""One part of a model under FSDP2: which modules are wrapped and how, and its units, parameters that travel together.

A unit is FSDP2's parameter group: all the parameters of a block that are sharded over the same ranks (a block with
experts on ranks of their own has two), or all that lie outside the blocks. Units are reached through private
attributes of torch, as torch's own pipelining does; this file is the only place.

Invariant: what a unit reduces has the same layout on every rank and in every step, because parameters without a
gradient are reduced as zeros: the shards one after the other, each padded to the length of the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from modelworks.layout import ParameterPlan
from modelworks.parallel.buckets import LOW_PRECISION, wide_dtype
from modelworks.parallel.collectives import Group
from modelworks.parallel.mesh import Mesh

Reduced = Callable[["Unit", Tensor], None]  # takes over the flat sum of a unit's shards on this rank


@dataclass(frozen=True)
class Wrapping:
    """How parts are wrapped: plans by name, and names of the parameters that are to be wrapped. on_host: shards wait in
    host memory, and so do the tensors that the optimiser updates."""

    plans: Mapping[str, ParameterPlan]
    mesh: Mesh
    names: dict[int, str]  # by id of the parameter before it is wrapped
    frees: bool
    on_host: bool


class ShardedPart:
    """One part of the model, wrapped block by block. modules: each wrapped one with its units."""

    def __init__(self, part: nn.Module, wrap: Wrapping, reduced: Reduced) -> None:
        self.root = _fully_shard_part(part, wrap)
        _materialize_shards(part, torch.device("cpu") if wrap.on_host else wrap.mesh.device)
        state: Any = self.root._get_fsdp_state()
        state._lazy_init()  # now, so that shards keep the memory that `stored_parameters` gives away
        names = {id(parameter): name for name, parameter in part.named_parameters()}
        self.modules: list[tuple[FSDPModule, list[Unit]]] = []
        for module in part.modules():
            if isinstance(module, FSDPModule):
                units = [Unit(group, names, wrap, reduced) for group in _units(module)]
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_reduce_scatter_unused_params(True)
                self.modules.append((module, units))
        if not wrap.frees:
            self.root.set_reshard_after_forward(False)
        blocks = [module for module, _ in self.modules if module is not self.root]
        for before, after in itertools.pairwise(blocks):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])

    @property
    def units(self) -> list[Unit]:
        return [unit for _, units in self.modules for unit in units]

    def expect(self, *, reduces: bool, last: bool, frees: bool) -> None:
        """Settings of the next backward pass."""
        self.root.set_is_last_backward(last)
        self.root.set_requires_gradient_sync(reduces)
        self.root.set_reshard_after_backward(frees)

    def reduce_by_hand(self, *, frees: bool) -> None:
        """What FSDP2's hooks do after a backward pass, for gradients that came without one."""
        self.expect(reduces=True, last=True, frees=frees)
        state: Any = self.root._get_fsdp_state()
        for unit in reversed(self.units):
            unit.group.post_backward()
        state._root_post_backward_final_callback()


class Unit:
    """Parameters that FSDP2 gathers and reduces together. total: the flat sum of this rank's shards."""

    def __init__(self, group: Any, names: Mapping[int, str], wrap: Wrapping, reduced: Reduced) -> None:
        self.group = group
        self._by_name = {names[id(one.sharded_param)]: one for one in group.fsdp_params}
        self.names = list(self._by_name)
        plan = wrap.plans[self.names[0]]
        self.replicas = wrap.mesh.group(plan.replicate_group)
        shards = wrap.mesh.group(plan.shard_group)
        group._all_gather_comm, group._reduce_scatter_comm = _Gather(shards), _Scatter(shards)
        group._all_reduce_hook = lambda row: reduced(self, row)
        self.total: Tensor | None = None
        self.work: Any = None
        self.stored = {}
        for name, one in self._by_name.items():
            self.stored[name] = one.sharded_param._local_tensor.detach().requires_grad_(one.sharded_param.requires_grad)
            if tuple(self.stored[name].shape) != wrap.plans[name].stored.local_shape:
                expected = wrap.plans[name].stored.local_shape
                raise ValueError(f"{name}: shard of shape {tuple(self.stored[name].shape)}, its plan says {expected}")

    @property
    def trained(self) -> bool:
        return any(tensor.requires_grad for tensor in self.stored.values())

    def leaves(self) -> dict[str, Tensor]:
        return {name: one._unsharded_param for name, one in self._by_name.items() if hasattr(one, "_unsharded_param")}

    def collect(self) -> None:
        """After a backward pass: FSDP2's own result is dropped, and low-precision sums grow in float32."""
        for one in self._by_name.values():
            one.sharded_param.grad = None
            if hasattr(one, "_unsharded_param") and one.orig_dtype in LOW_PRECISION and not self.group.reduce_grads:
                if one.unsharded_accumulated_grad is None:
                    one.to_accumulated_grad_if_needed()
                else:
                    one.accumulate_unsharded_grad_if_needed()

    def gradients(self) -> dict[str, Tensor]:
        """Views of the shards inside `total`, where each begins after the padded ones before it."""
        assert self.total is not None
        views, start = {}, 0
        for name, one in self._by_name.items():
            if not self.stored[name].requires_grad:
                continue
            shard = self.stored[name]
            views[name] = self.total[start : start + shard.numel()].view(shard.shape)
            start += one.padded_sharded_param_size.numel()
        return views

    def clear(self) -> None:
        self.total = self.work = None
        for one in self._by_name.values():
            one.sharded_param.grad = one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None

    def parameter_memory(self) -> list[Tensor | None]:
        return [
            tensor for one in self._by_name.values() for tensor in (one._sharded_param_data, *one.all_gather_outputs)
        ]

    def gradient_memory(self) -> list[Tensor | None]:
        held: list[Tensor | None] = [self.total]
        for one in self._by_name.values():
            held.append(one.unsharded_accumulated_grad)
            if hasattr(one, "_unsharded_param"):
                held.append(one._unsharded_param.grad)
            if one.sharded_param.grad is not None:
                held.append(one.sharded_param.grad._local_tensor)
        return held


class _Gather(AllGather):
    """FSDP2's all-gather by our group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._group.start_all_gather(input_tensor, output_tensor)()
        return None


class _Scatter(ReduceScatter):
    """FSDP2's reduce-scatter by our group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if op != dist.ReduceOp.SUM:
            raise RuntimeError(f"gradients are sums, and FSDP2 asks for {op}")
        self._group.start_reduce_scatter(input_tensor, output_tensor)()
        return None


def _units(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    return list(state._fsdp_param_groups)


def _fully_shard_part(part: nn.Module, wrap: Wrapping) -> FSDPModule:
    """`fully_shard` on each block, then on what is left."""
    shards, experts = wrap.mesh.group("shard"), wrap.mesh.group("expert_shard")
    mesh = _shard_mesh(shards, wrap.mesh.device)
    # Experts have a mesh of their own unless it is the same ranks, which FSDP2 wants to see as the same object.
    apart = experts.size > 1 and experts.ranks != shards.ranks
    expert_mesh = FSDPMeshInfo(_shard_mesh(experts, wrap.mesh.device), shard_mesh_dim=0) if apart else None
    owned = dict(part.named_parameters())
    ignored = {parameter for name, parameter in owned.items() if name not in wrap.plans}

    def place(parameter: nn.Parameter) -> Any:
        plan = wrap.plans[wrap.names[id(parameter)]]
        cut = Shard(plan.zero_dimension or 0)
        return ShardPlacementResult(cut, expert_mesh) if plan.experts and expert_mesh is not None else cut

    low = {parameter.dtype for parameter in owned.values()} & set(LOW_PRECISION)
    policy = MixedPrecisionPolicy(reduce_dtype=wide_dtype(low.pop()) if low else None, cast_forward_inputs=False)

    offload = CPUOffloadPolicy(pin_memory=wrap.mesh.device.type == "cuda") if wrap.on_host else OffloadPolicy()

    def wrapped(module: nn.Module, frees: bool) -> FSDPModule:
        return fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=frees,
            shard_placement_fn=place,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )

    for block in part.get_submodule("blocks").children():
        wrapped(block, frees=wrap.frees)
    return wrapped(part, frees=False)


def _shard_mesh(group: Group, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group.handle, device.type, mesh=torch.tensor(group.ranks), mesh_dim_names=("shard",))


def _materialize_shards(part: nn.Module, device: torch.device) -> None:
    """Memory for shards of parameters that were on the meta device; values come by `load`."""
    for module in part.modules():
        if any(parameter.is_meta for parameter in module._parameters.values() if parameter is not None):
            module.to_empty(device=device, recurse=False)
