"""`GradientStore`: all that a trainer or a pipeline knows of data parallelism.

    store.begin_step(n_micro_batches)
    for each micro-batch:
        forward
        store.before_backward(names, last=...)      names: parameters that this backward reaches
        backward                                    buckets are reduced while it runs
        store.after_backward(names)
    gradients = store.finish()                      sums over all ranks, of this rank's shards
    clip; optimizer.step(gradients)                 over store.stored_parameters()
    store.after_update()                            parameters whole again
    store.end_step()

A schedule that defers weight gradients calls `before_backward(..., deferred=True)` for the backward of inputs, adds
the weight gradients to `leaves()[name].grad` by hand, then calls `after_backward`, and `reduce`: under
`accumulate_reduce: every` after each micro-batch, under `last` after the last one only.

Gradients are sums, never averages: the loss is already divided by the target count of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from modelworks.config import ParallelConfig
from modelworks.layout import ParameterPlan, ShardSpec
from modelworks.optim.clip import Reduce
from modelworks.parallel.mesh import Mesh

Fill = Callable[[ShardSpec, Tensor], None]  # writes the values of a slice into a tensor of the slice's shape


class GradientStore(Protocol):
    """Parameters, gradients and their shards on this rank. Names are full parameter names."""

    def stored_parameters(self) -> dict[str, Tensor]:
        """What the optimiser updates in place, by name: tensors of `plan.stored.local_shape`, some perhaps empty.
        They require a gradient where the parameter does. The same tensors on every call."""

    def leaves(self) -> dict[str, Tensor]:
        """What autograd differentiates, by name, with `.grad`; with zero 3, of what has been gathered at least once."""

    def load(self, fill: Fill) -> None:
        """Set all parameters: `fill(plan.stored, tensor)` is called for each shard; whole ones are then gathered."""

    def begin_step(self, n_micro_batches: int) -> None: ...

    def before_backward(self, names: Collection[str], last: bool, deferred: bool = False) -> None:
        """The next backward adds to these parameters' gradients. last: the last time in this step for them (for a
        parameter of two stages: for this stage). deferred: weight gradients come later, by hand."""

    def after_backward(self, names: Collection[str]) -> None:
        """One micro-batch's gradients of these parameters are there."""

    def reduce(self, names: Collection[str]) -> None:
        """Reduce what was added by hand."""

    def finish(self) -> dict[str, Tensor]:
        """Gradients of the stored shards, at least float32, summed over all ranks. Valid until `end_step`."""

    def after_update(self) -> None:
        """The stored shards have changed: make the parameters follow."""

    def end_step(self) -> None:
        """Free all gradients."""

    def unshard(self, names: Collection[str]) -> None:
        """Gather these parameters. Nothing but for zero 3."""

    def reshard(self, names: Collection[str]) -> None:
        """Free what `unshard` gathered."""

    def bytes(self) -> dict[str, int]:
        """Allocated now on this rank: `parameters` and `gradients`, buffers included."""


def build_gradient_store(
    parts: Sequence[nn.Module], plans: Mapping[str, ParameterPlan], mesh: Mesh, parallel: ParallelConfig
) -> GradientStore:
    """The store that `parallel.zero` asks for, over this rank's parts of the model (one for each virtual stage).

    plans: as `plan_parameters` made them for this rank. Parts hold values already, or are on the meta device and get
    memory here and values by `load`. With zero 3 the parts' parameters become DTensors.
    Raises ValueError where parts and plans disagree.
    """
    if parallel.zero == 3 and any(plan.zero_dimension is not None for plan in plans.values()):
        from modelworks.parallel.fully_sharded import ShardedStore

        return ShardedStore(parts, plans, mesh, parallel)
    from modelworks.parallel.data import ReplicatedStore

    materialize(parts, mesh.device)
    return ReplicatedStore(
        parts,
        plans,
        mesh,
        keep_buffers=parallel.zero < 2,
        every=parallel.accumulate_reduce == "every",
        bucket_bytes=int(parallel.bucket_size),
    )


def world_reduce(mesh: Mesh) -> Reduce:
    """What `clip_gradients` combines ranks' norms with."""

    def reduce(value: Tensor, how: Literal["sum", "max"]) -> Tensor:
        return mesh.group("world").all_reduce_(value.to(mesh.device, copy=True), how)

    return reduce


def named_parameters(parts: Sequence[nn.Module]) -> dict[str, tuple[nn.Parameter, int]]:
    """Full name -> the parameter and how many parts hold it. Raises ValueError for one name of two parameters."""
    owned: dict[str, tuple[nn.Parameter, int]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            before, owners = owned.get(name, (parameter, 0))
            if before is not parameter:
                raise ValueError(f"{name}: two parts on this rank each hold their own; they must share one parameter")
            owned[name] = (parameter, owners + 1)
    return owned


def materialize(parts: Sequence[nn.Module], device: torch.device, only: Collection[nn.Parameter] | None = None) -> None:
    """Give parameters on the meta device memory, without values. One that modules share stays shared.

    only: the parameters to treat, default all.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in parts:
        for module in part.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta or (only is not None and parameter not in only):
                    continue
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, name, made[parameter])


@torch.no_grad()
def sum_partial(gradients: Mapping[str, Tensor], plans: Mapping[str, ParameterPlan], mesh: Mesh) -> None:
    """Sum in place, over each group in `plan.sums`, gradients that are only a part there; one all-reduce a group."""
    for name in ("tp", "kv", "tied"):
        group = mesh.group(name)
        partial = [gradient for full, gradient in gradients.items() if name in plans[full].sums and gradient.numel()]
        if group.size == 1 or not partial:
            continue
        for dtype in sorted({gradient.dtype for gradient in partial}, key=str):
            same = [gradient for gradient in partial if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in same]) if len(same) > 1 else same[0]
            group.all_reduce_(flat)
            if len(same) > 1:
                for gradient, total in zip(same, torch.split(flat, [one.numel() for one in same]), strict=True):
                    gradient.copy_(total.view(gradient.shape))


def storage_bytes(tensors: Sequence[Tensor | None]) -> int:
    """Allocated for these tensors, each storage counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    storages.pop(0, None)
    return sum(storages.values())
