"""Running one model on many processes: the mesh, the collectives, and one file for each axis.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.parallel.apply import SplitModel as SplitModel
    from modelworks.parallel.apply import split_model as split_model
    from modelworks.parallel.attention_parts import merge_ as merge_
    from modelworks.parallel.attention_parts import partial_attention as partial_attention
    from modelworks.parallel.attention_parts import partial_attention_gradients as partial_attention_gradients
    from modelworks.parallel.child import Child as Child
    from modelworks.parallel.child import start_child as start_child
    from modelworks.parallel.collectives import Group as Group
    from modelworks.parallel.context import RingContext as RingContext
    from modelworks.parallel.context import UlyssesContext as UlyssesContext
    from modelworks.parallel.context import context_parallel as context_parallel
    from modelworks.parallel.context import row_order as row_order
    from modelworks.parallel.context import sequence_columns as sequence_columns
    from modelworks.parallel.expert import build_routing as build_routing
    from modelworks.parallel.expert import reduce_totals_ as reduce_totals_
    from modelworks.parallel.expert import shard_experts as shard_experts
    from modelworks.parallel.failures import explain_out_of_memory as explain_out_of_memory
    from modelworks.parallel.failures import is_out_of_memory as is_out_of_memory
    from modelworks.parallel.failures import kernel_kills as kernel_kills
    from modelworks.parallel.gradient_watch import GradientWatch as GradientWatch
    from modelworks.parallel.gradients import Fill as Fill
    from modelworks.parallel.gradients import GradientStore as GradientStore
    from modelworks.parallel.gradients import build_gradient_store as build_gradient_store
    from modelworks.parallel.gradients import world_reduce as world_reduce
    from modelworks.parallel.hosting import Host as Host
    from modelworks.parallel.labels import Labels as Labels
    from modelworks.parallel.launching import RankFailed as RankFailed
    from modelworks.parallel.launching import launch as launch
    from modelworks.parallel.mesh import Mesh as Mesh
    from modelworks.parallel.mesh import build_mesh as build_mesh
    from modelworks.parallel.mesh import single_process as single_process
    from modelworks.parallel.offload import state_allocator as state_allocator
    from modelworks.parallel.pipeline.edges import EdgeShapes as EdgeShapes
    from modelworks.parallel.shown_context import ShownContext as ShownContext
    from modelworks.parallel.tensor import dropout_keys as dropout_keys
    from modelworks.parallel.tensor import shard_tensor as shard_tensor
    from modelworks.parallel.traffic import Traffic as Traffic
    from modelworks.parallel.watch import RankLost as RankLost
    from modelworks.parallel.watch import process_group as process_group
    from modelworks.parallel.world import World as World
    from modelworks.parallel.world import agree as agree
    from modelworks.parallel.world import initialize_process_group as initialize_process_group
    from modelworks.parallel.world import joined as joined
    from modelworks.parallel.world import leave_process_group as leave_process_group

_HOME = {
    "state_allocator": "offload",
    "Child": "child",
    "EdgeShapes": "pipeline.edges",
    "Fill": "gradients",
    "GradientStore": "gradients",
    "GradientWatch": "gradient_watch",
    "Group": "collectives",
    "Host": "hosting",
    "Labels": "labels",
    "Mesh": "mesh",
    "RankFailed": "launching",
    "RankLost": "watch",
    "RingContext": "context",
    "ShownContext": "shown_context",
    "SplitModel": "apply",
    "Traffic": "traffic",
    "UlyssesContext": "context",
    "World": "world",
    "agree": "world",
    "build_gradient_store": "gradients",
    "build_mesh": "mesh",
    "build_routing": "expert",
    "context_parallel": "context",
    "dropout_keys": "tensor",
    "explain_out_of_memory": "failures",
    "initialize_process_group": "world",
    "is_out_of_memory": "failures",
    "joined": "world",
    "launch": "launching",
    "kernel_kills": "failures",
    "leave_process_group": "world",
    "merge_": "attention_parts",
    "partial_attention": "attention_parts",
    "partial_attention_gradients": "attention_parts",
    "process_group": "watch",
    "reduce_totals_": "expert",
    "row_order": "context",
    "sequence_columns": "context",
    "shard_experts": "expert",
    "shard_tensor": "tensor",
    "single_process": "mesh",
    "split_model": "apply",
    "start_child": "child",
    "world_reduce": "gradients",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
