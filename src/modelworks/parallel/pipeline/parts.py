"""The parts of a model that one rank holds, one for each of its (virtual) stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from modelworks.config import ModelConfig
from modelworks.models import Part, Transformer


def build_parts(config: ModelConfig, stages: Sequence[Sequence[int]], mine: Sequence[int]) -> dict[int, Transformer]:
    """Stage -> its part, for the stages `mine`, under the default dtype and device (`meta` included), values unset.

    stages: the layers of every stage, as `stage_layers` gives them.
    """
    parts = {}
    for stage in mine:
        part = Part(tuple(stages[stage]), first=stage == 0, last=stage == len(stages) - 1)
        parts[stage] = Transformer(config, part)
    share_embedding(parts)
    return parts


def share_embedding(parts: Mapping[int, Transformer]) -> None:
    """Where one rank has both ends of a model with tied embeddings, as V-shaped schedules place them, make them hold
    one parameter. To be called again after anything that gives each part new parameters (`shard_tensor`)."""
    owners = [part.embedding for part in parts.values() if part.embedding is not None]
    for other in owners[1:]:
        other.weight = owners[0].weight
