"""How a run is split, as plain values: which rank is where, and which part of each tensor it holds. No torch."""

from modelworks.layout.data_memory import (
    DataParallelMemory,
    data_parallel_memory,
    data_parallel_traffic,
    is_copied,
    memory_of_run,
    reduction_groups,
)
from modelworks.layout.elastic import shrink_layout
from modelworks.layout.feasible import check_layout, describe, layout_problems, nearest_layouts, neighbours
from modelworks.layout.layout import AXES, Coordinates, Layout
from modelworks.layout.placement import PLACEMENTS, V_SHAPED, ParameterPlan, placement, plan_parameters, stages_of
from modelworks.layout.shards import Bounds, ShardSpec, split_evenly, split_in_chunks, whole_tensors
from modelworks.layout.tiles import n_tiles, tile_grid, tile_shape, tiles_of

__all__ = [
    "AXES",
    "PLACEMENTS",
    "V_SHAPED",
    "Bounds",
    "Coordinates",
    "DataParallelMemory",
    "Layout",
    "ParameterPlan",
    "ShardSpec",
    "check_layout",
    "data_parallel_memory",
    "data_parallel_traffic",
    "describe",
    "is_copied",
    "layout_problems",
    "memory_of_run",
    "n_tiles",
    "nearest_layouts",
    "neighbours",
    "placement",
    "plan_parameters",
    "reduction_groups",
    "shrink_layout",
    "split_evenly",
    "split_in_chunks",
    "stages_of",
    "tile_grid",
    "tile_shape",
    "tiles_of",
    "whole_tensors",
]
