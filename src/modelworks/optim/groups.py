"""Which parameters decay, and which learn faster: rules by glob over full parameter names.

`optimizer.no_decay` switches weight decay off; `optimizer.groups` then overrides, later entries winning. A
pattern that the user wrote and that matches nothing is an error, because the run would silently be another one.
The default patterns are exempt: a llama has no biases, and nobody asked for them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from modelworks.config import OptimizerConfig, UserError


@dataclass(frozen=True)
class ParameterOptions:
    """lr_multiplier: times the schedule's rate. weight_decay: decoupled, multiplied by the rate at each update."""

    lr_multiplier: float
    weight_decay: float


def parameter_options(names: Iterable[str], config: OptimizerConfig) -> dict[str, ParameterOptions]:
    """The options of every parameter, in the order of `names`. Raises `UserError` for a pattern without a match."""
    names = list(names)
    default_patterns = OptimizerConfig.model_fields["no_decay"].default
    options = dict.fromkeys(names, ParameterOptions(1.0, config.weight_decay))
    for pattern in config.no_decay:
        matches = _matches(pattern, names)
        if not matches and pattern not in default_patterns:
            raise _no_match("optimizer.no_decay", pattern, names)
        for name in matches:
            options[name] = replace(options[name], weight_decay=0.0)
    for index, group in enumerate(config.groups):
        matches = _matches(group.pattern, names)
        if not matches:
            raise _no_match(f"optimizer.groups.{index}.pattern", group.pattern, names)
        for name in matches:
            if group.lr_multiplier is not None:
                options[name] = replace(options[name], lr_multiplier=group.lr_multiplier)
            if group.weight_decay is not None:
                options[name] = replace(options[name], weight_decay=group.weight_decay)
    return options


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(key: str, pattern: str, names: Sequence[str]) -> UserError:
    # Layers differ only by their number, so the suggestion is made over names with the number left open.
    shapes = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    close = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.3) or shapes[:3]
    return UserError(
        f"{key}: `{pattern}` matches no parameter of this model; nearest names: {', '.join(f'`{n}`' for n in close)}"
    )
