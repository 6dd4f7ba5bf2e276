"""Going on with fewer processes: which layout a run takes when some of its ranks are gone.

Only the data-parallel degrees give way while the others fit: tensor, pipeline, context and expert parallelism are there
because the model needs them. The global batch stays what it is, so each remaining rank has more rows of it and the
mathematics does not change.
"""

from __future__ import annotations

from modelworks.config import ParallelConfig, RunConfig, UserError
from modelworks.layout.feasible import describe, neighbours

_MODEL_PARALLEL = ("pp", "cp", "tp")


def shrink_layout(config: RunConfig, world_size: int) -> ParallelConfig:
    """The layout of at most `world_size` ranks to go on with: most ranks first, then the least change.

    Where not even one replica of the model-parallel degrees fits, those are changed as well. Raises `UserError` where
    no layout fits.
    """
    asked = config.parallel
    for size in range(world_size, 0, -1):
        kept = [parallel for parallel in neighbours(config, size) if _is_kept(asked, parallel)]
        if kept:
            # Of these, the one whose shards grow the least: what fits in memory may depend on it.
            return max(kept, key=lambda parallel: min(parallel.dp_shard, asked.dp_shard))
    for size in range(world_size, 0, -1):
        found = neighbours(config, size)
        if found:
            return found[0]
    raise UserError(
        f"parallel: no layout of {world_size} processes or fewer fits this run, which asks for {describe(asked)}"
    )


def _is_kept(asked: ParallelConfig, parallel: ParallelConfig) -> bool:
    return all(getattr(asked, axis) == getattr(parallel, axis) for axis in _MODEL_PARALLEL)
