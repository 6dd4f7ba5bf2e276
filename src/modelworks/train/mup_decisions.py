"""In words, what µP changes against the base: one line for each group of parameters that it treats alike."""

from __future__ import annotations

from collections.abc import Iterator

from modelworks.config import RunConfig
from modelworks.config.mup import query_multiplier, width_growth
from modelworks.optim import MupGroup, mup_groups


def mup_decisions(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(what, value, reason); nothing for a model without a base."""
    model, base = config.model, config.model.mup_base_width
    if base is None:
        return
    width = width_growth(model)
    for group in mup_groups(config.optimizer, model):
        value = f"rate x{group.rate:.4g}, initial values x{group.init:.4g}"
        yield f"µP: {', '.join(group.kinds)}", value, _reason(group, base)
    if width != 1.0:
        outputs = "logits and router scores" if model.n_experts else "logits"
        reason = f"sums over d_model, {model.d_model} against model.mup_base_width {base}"
        yield f"µP: {outputs}", f"x1/{width:.4g}", reason
    if (query := query_multiplier(model)) != 1.0:
        reason = f"heads of {model.head_dim} channels against model.mup_base_head_dim {model.mup_base_head_dim}"
        yield "µP: attention scores", f"x{query:.4g}", reason


def _reason(group: MupGroup, base: int) -> str:
    grown = group.growth
    parts = [("fan-in", grown.fan_in), ("fan-out", grown.fan_out), ("output divided", grown.divisor)]
    grew = ", ".join(f"{name} x{factor:.4g}" for name, factor in parts if factor != 1.0)
    decay = "" if group.rate == 1.0 else f"; weight decay x{1 / group.rate:.4g}, so that rate x decay stays"
    return f"{group.parameters:,} parameters, {grew or 'nothing grown'} from width {base}{decay}"
