"""How many parameters one rank works with, as closed forms over columns: of a layer, and of all its layers and ends.

`modelworks.layout` plans the same parameter by parameter; what differs here is a few rows of padding.
"""

from __future__ import annotations

import numpy as np

from modelworks.plan.columns import Column, Shape, Split


def layer_elements(shape: Shape, split: Split) -> Column:
    """Parameters of the mean layer on one rank, while gathered. Keys and values are copied if ranks outnumber them."""
    copies = np.maximum(split.tp * shape.head_dim / shape.d_kv, 1.0)
    attention = shape.d_model * (2.0 * shape.d_attention + 2.0 * shape.d_kv * copies) / split.tp
    feed_forward = shape.dense_share * shape.feed_forward_weights / split.tp
    router = (1.0 - shape.dense_share) * shape.n_experts * shape.d_model
    rest = router + shape.biases + 2.0 * shape.norms * shape.d_model
    return attention + feed_forward + layer_expert_elements(shape, split) + rest


def layer_expert_elements(shape: Shape, split: Split) -> Column:
    """Of them, experts'."""
    return (1.0 - shape.dense_share) * shape.expert_weights / (split.tp * split.ep)


def rank_elements(shape: Shape, split: Split, layers: Column) -> tuple[Column, Column]:
    """Of a rank with so many layers and one copy of the embedding (all copies without a pipeline): all but experts',
    and those."""
    experts = layers * layer_expert_elements(shape, split)
    ends = np.where(split.pp > 1.0, 1.0, 2.0 - shape.tied) * shape.vocab_size * shape.d_model / split.tp
    return layers * layer_elements(shape, split) - experts + ends, experts
