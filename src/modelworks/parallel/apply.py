"""`SplitModel`: one model on the ranks of a layout. Every axis is put on it here, in this order:

    pipeline    parts with some of the layers, on the meta device          (parallel/pipeline)
    tensor      their weights cut by heads, channels and vocabulary        (parallel/tensor.py)
    expert      their experts cut, tokens exchanged                        (parallel/expert.py)
    recompute, compile                                                     of each block
    data        gradients reduced, state and parameters sharded            (parallel/gradients.py)
    values      filled in, each shard by itself

One process is the layout whose groups all have one member: the same code, with nothing to do. Invariant: whatever the
layout, a parameter has its full name, and its values are a function of that name alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from modelworks.config import RunConfig, parameter_shapes
from modelworks.layout import ParameterPlan, ShardSpec, plan_parameters, stages_of
from modelworks.layout.pipeline import Program, build_program, stage_layers
from modelworks.models import Transformer, default_dtype, initialize_slice
from modelworks.optim import Split
from modelworks.parallel.expert import shard_experts
from modelworks.parallel.gradients import Fill, GradientStore, build_gradient_store, world_reduce
from modelworks.parallel.logical import Assembler
from modelworks.parallel.matrices import MatrixExchange
from modelworks.parallel.mesh import Mesh
from modelworks.parallel.pipeline import PipelineExecutor, build_parts, share_embedding
from modelworks.parallel.tensor import shard_tensor


@dataclass
class SplitModel:
    """What this rank holds of the model. parts: by number of the (virtual) stage; plans: by full parameter name.

    measures: whether the next step notes which bytes it holds, which takes a moment.
    """

    config: RunConfig
    mesh: Mesh
    stages: list[list[int]]
    plans: dict[str, ParameterPlan]
    parts: dict[int, Transformer]
    gradients: GradientStore
    measures: bool = False
    _executors: dict[int, PipelineExecutor] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, Tensor]:
        """The shards that the optimiser updates, by full name."""
        return self.gradients.stored_parameters()

    @cached_property
    def counted(self) -> set[str]:
        """Names of the shards that this rank counts in sums over all ranks."""
        return {name for name, plan in self.plans.items() if plan.stored.counted}

    @cached_property
    def split(self) -> Split:
        """How the stored shards lie in the whole model, for an optimiser."""
        return Split(
            specs={name: plan.stored for name, plan in self.plans.items()},
            shapes=parameter_shapes(self.config.model),
            reduce=world_reduce(self.mesh) if self.mesh.layout.world_size > 1 else None,
            matrices=MatrixExchange(self.mesh, self.stored_specs) if self.mesh.layout.world_size > 1 else None,
        )

    @property
    def parameter_names(self) -> list[str]:
        """Of the whole model, in its order; the same on every rank."""
        return list(parameter_shapes(self.config.model))

    def count_parameters(self) -> int:
        """Elements of the whole model as its ranks really hold them, each counted once. Every rank must call it."""
        own = sum(tensor.numel() for name, tensor in self.stored.items() if name in self.counted)
        return int(self.mesh.group("world").all_reduce_(torch.tensor(own, device=self.mesh.device)))

    @cached_property
    def assembler(self) -> Assembler:
        """Puts whole tensors together on rank 0."""
        return Assembler(self.mesh, self.stored_specs)

    def stored_specs(self, rank: int) -> dict[str, ShardSpec]:
        """What any rank stores."""
        parallel, model = self.config.parallel, self.config.model
        plans = plan_parameters(model, self.mesh.layout, parallel, rank, self.stages)
        return {name: plan.stored for name, plan in plans.items()}

    def executor(self, n_micro_batches: int, *, training: bool = True) -> PipelineExecutor:
        """What runs so many micro-batches through this rank's part of the schedule; for forwards alone, any will do."""
        if not training:
            n_micro_batches = next(iter(self._executors), self.mesh.layout.pp)
        if n_micro_batches not in self._executors:
            program = self._program(n_micro_batches)
            self._executors[n_micro_batches] = PipelineExecutor(self.mesh, program, self.parts, self.gradients)
        return self._executors[n_micro_batches]

    def train(self, mode: bool = True) -> None:
        """Dropout on (training) or off."""
        for part in self.parts.values():
            part.train(mode)

    def whole_model(self) -> Transformer | None:
        """All of the model on rank 0, None elsewhere; every rank must call it. In one process: the model itself."""
        if self.mesh.layout.world_size == 1:
            return self.parts[0]
        tensors = self.assembler.all(self.stored, self.parameter_names)
        if self.mesh.rank != 0:
            for _ in tensors:
                pass
            return None
        with torch.device("meta"):
            model = Transformer(self.config.model)
        for name, tensor in tensors:
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, nn.Parameter(tensor, requires_grad=False))
        return model

    def _program(self, n_micro_batches: int) -> Program:
        parallel, pp = self.config.parallel, self.mesh.layout.pp
        return build_program(
            parallel.pp_schedule,
            pp,
            n_micro_batches,
            parallel.pp_virtual,
            zero3=parallel.zero == 3 and pp > 1,  # without a pipeline each block gathers and frees itself
            gather=parallel.pp_gather,
            accumulate_reduce=parallel.accumulate_reduce,
        )


def split_model(
    config: RunConfig,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    fill: Fill | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
) -> SplitModel:
    """The model of `config` on this rank, with values. All ranks call it.

    dtype: of the stored parameters. fill: (spec, tensor) sets the values of one slice of a parameter; None: to the
    run's initial values. prepare: done to each block before data parallelism wraps it (torch.compile).
    """
    parallel, model = config.parallel, config.model
    stages = stage_layers(config)
    plans = plan_parameters(model, mesh.layout, parallel, mesh.rank, stages)
    with default_dtype(dtype), torch.device("meta"):
        parts = build_parts(model, stages, stages_of(mesh.layout, parallel, mesh.rank))
    for part in parts.values():
        shard_tensor(part, plans, mesh, sequence_parallel=parallel.sequence_parallel)
        shard_experts(part, plans, mesh)
        part.set_recompute(config.train.recompute, offload_activations=parallel.offload_activations)
        if prepare is not None:
            for block in part.blocks.values():
                prepare(block)
    share_embedding(parts)
    gradients = build_gradient_store(list(parts.values()), plans, mesh, parallel)
    gradients.load(fill or (lambda spec, out: initialize_slice(out, model, spec, config.seed)))
    return SplitModel(config, mesh, stages, plans, parts, gradients)
