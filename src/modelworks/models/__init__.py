"""Models: one transformer over shared layers, its families' name maps, attention contexts and generation.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.models.balancing import RoutingTotals as RoutingTotals
    from modelworks.models.balancing import load_routing_state as load_routing_state
    from modelworks.models.balancing import routed_layers as routed_layers
    from modelworks.models.balancing import routing_state as routing_state
    from modelworks.models.balancing import update_router_bias as update_router_bias
    from modelworks.models.context import AttentionContext as AttentionContext
    from modelworks.models.context import CachedContext as CachedContext
    from modelworks.models.context import CausalContext as CausalContext
    from modelworks.models.context import DocumentContext as DocumentContext
    from modelworks.models.context import additive as additive
    from modelworks.models.context import attend_one as attend_one
    from modelworks.models.context import grouped_attention as grouped_attention
    from modelworks.models.dropout import DropoutKey as DropoutKey
    from modelworks.models.dtypes import default_dtype as default_dtype
    from modelworks.models.families import NameEntry as NameEntry
    from modelworks.models.families import canonical_name as canonical_name
    from modelworks.models.families import entries_by_name as entries_by_name
    from modelworks.models.families import from_hugging_face as from_hugging_face
    from modelworks.models.families import name_map as name_map
    from modelworks.models.families import to_hugging_face as to_hugging_face
    from modelworks.models.generation import generate as generate
    from modelworks.models.initialization import initial_values as initial_values
    from modelworks.models.initialization import initialize as initialize
    from modelworks.models.initialization import initialize_slice as initialize_slice
    from modelworks.models.layers.blockwise_attention import LONGEST_BLOCKWISE as LONGEST_BLOCKWISE
    from modelworks.models.layers.feed_forward import ACTIVATIONS as ACTIVATIONS
    from modelworks.models.layers.rotary import rotate as rotate
    from modelworks.models.operators import operator as operator
    from modelworks.models.preparation import matrix_bytes as matrix_bytes
    from modelworks.models.preparation import prepared as prepared
    from modelworks.models.random import Key as Key
    from modelworks.models.random import uniform_rows as uniform_rows
    from modelworks.models.recompute import activation_bytes as activation_bytes
    from modelworks.models.routing import Routing as Routing
    from modelworks.models.sampling import Filters as Filters
    from modelworks.models.sampling import Sampling as Sampling
    from modelworks.models.sampling import draw_filtered as draw_filtered
    from modelworks.models.sampling import draw_key as draw_key
    from modelworks.models.sampling import highest_scores as highest_scores
    from modelworks.models.sampling import penalize as penalize
    from modelworks.models.streamed import streamed_logits as streamed_logits
    from modelworks.models.transformer import Part as Part
    from modelworks.models.transformer import Transformer as Transformer
    from modelworks.models.weights import PACKED as PACKED
    from modelworks.models.weights import PLAIN as PLAIN
    from modelworks.models.weights import WeightFormat as WeightFormat
    from modelworks.models.weights import packs as packs

_HOME = {
    "ACTIVATIONS": "layers.feed_forward",
    "AttentionContext": "context",
    "CachedContext": "context",
    "CausalContext": "context",
    "DocumentContext": "context",
    "DropoutKey": "dropout",
    "Filters": "sampling",
    "Key": "random",
    "LONGEST_BLOCKWISE": "layers.blockwise_attention",
    "NameEntry": "families",
    "PACKED": "weights",
    "PLAIN": "weights",
    "Part": "transformer",
    "Routing": "routing",
    "RoutingTotals": "balancing",
    "Sampling": "sampling",
    "Transformer": "transformer",
    "WeightFormat": "weights",
    "activation_bytes": "recompute",
    "additive": "context",
    "attend_one": "context",
    "canonical_name": "families",
    "default_dtype": "dtypes",
    "draw_filtered": "sampling",
    "draw_key": "sampling",
    "entries_by_name": "families",
    "from_hugging_face": "families",
    "generate": "generation",
    "grouped_attention": "context",
    "highest_scores": "sampling",
    "initial_values": "initialization",
    "initialize": "initialization",
    "initialize_slice": "initialization",
    "load_routing_state": "balancing",
    "matrix_bytes": "preparation",
    "name_map": "families",
    "operator": "operators",
    "packs": "weights",
    "penalize": "sampling",
    "prepared": "preparation",
    "rotate": "layers.rotary",
    "routed_layers": "balancing",
    "routing_state": "balancing",
    "streamed_logits": "streamed",
    "to_hugging_face": "families",
    "uniform_rows": "random",
    "update_router_bias": "balancing",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
