"""How a run is split, as plain values: which rank is where, and which part of each tensor it holds. No torch."""

from modelworks.layout.layout import AXES, Coordinates, Layout
from modelworks.layout.shards import ShardSpec, split_evenly, whole_tensors

__all__ = ["AXES", "Coordinates", "Layout", "ShardSpec", "split_evenly", "whole_tensors"]
