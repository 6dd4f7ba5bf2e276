"""Which parameters decay, learn faster or take a trust ratio: rules by glob over full parameter names.

`optimizer.no_decay` switches weight decay off and `optimizer.no_trust` trust ratios; `optimizer.groups` then overrides,
later entries winning. A pattern that the user wrote and that matches nothing is an error, because the run would
silently be another one. The default patterns are exempt: a llama has no biases, and nobody asked for them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from modelworks.config import OptimizerConfig, UserError
from modelworks.config.optimizers import HABITS


@dataclass(frozen=True)
class ParameterOptions:
    """lr_multiplier: times the schedule's rate. weight_decay: multiplied by the rate at each update. trust: whether a
    trust ratio scales its rate, in optimisers that have one."""

    lr_multiplier: float
    weight_decay: float
    trust: bool = True


def parameter_options(names: Iterable[str], config: OptimizerConfig) -> dict[str, ParameterOptions]:
    """The options of every parameter, in the order of `names`. Raises `UserError` for a pattern without a match."""
    names = list(names)
    options = dict.fromkeys(names, ParameterOptions(1.0, config.weight_decay))
    for name in _exempt("no_decay", config, names):
        options[name] = replace(options[name], weight_decay=0.0)
    for name in _exempt("no_trust", config, names) if "no_trust" in HABITS[config.name].uses else ():
        options[name] = replace(options[name], trust=False)
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


def _exempt(key: str, config: OptimizerConfig, names: Sequence[str]) -> Iterator[str]:
    """The parameters that the patterns of `optimizer.<key>` name."""
    usual = OptimizerConfig.model_fields[key].default
    for pattern in getattr(config, key):
        matches = _matches(pattern, names)
        if not matches and pattern not in usual:
            raise _no_match(f"optimizer.{key}", pattern, names)
        yield from matches


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _no_match(key: str, pattern: str, names: Sequence[str]) -> UserError:
    # Layers differ only by their number, so the suggestion is made over names with the number left open.
    shapes = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    close = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.3) or shapes[:3]
    return UserError(
        f"{key}: `{pattern}` matches no parameter of this model; nearest names: {', '.join(f'`{n}`' for n in close)}"
    )
