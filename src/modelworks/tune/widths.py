"""The same model at another width: what grows with `d_model`, and what does not."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from modelworks.config import ModelConfig, UserError, parse_model_config


def at_width(model: ModelConfig, width: int) -> ModelConfig:
    """`model` with `d_model` = width. Feed-forwards and experts grow in proportion; so do heads, in number where the
    base of µP has heads of the same size (or there is none), in size where it has others. Key heads keep their share of
    the query heads, or their number where the base has as many.

    Raises UserError where something would not be whole.
    """
    times = Fraction(width, model.d_model)
    larger_heads = model.mup_base_head_dim is not None and model.mup_base_head_dim != model.head_dim
    same_kv_heads = model.mup_base_kv_heads == model.n_kv_heads
    grows = ["d_ff", "d_expert", "head_dim" if larger_heads else "n_heads"]
    if not larger_heads and not same_kv_heads:
        grows.append("n_kv_heads")
    changes: dict[str, Any] = {"d_model": width}
    for key in grows:
        size = getattr(model, key) * times
        if size.denominator != 1:
            raise UserError(
                f"width {width}: model.{key} ({getattr(model, key)}) would be {float(size):.4g}, as it grows with "
                f"d_model ({model.d_model}); take a width with a whole {key}"
            )
        changes[key] = int(size)
    return parse_model_config({**model.model_dump(), **changes}, f"width {width}")
