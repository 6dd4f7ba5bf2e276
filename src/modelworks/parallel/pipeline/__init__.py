"""Running a pipeline schedule: the executor, what goes over the edges between stages, and the parts of a model.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.parallel.pipeline.edges import EdgeShapes as EdgeShapes
    from modelworks.parallel.pipeline.executor import PipelineExecutor as PipelineExecutor
    from modelworks.parallel.pipeline.executor import StageForward as StageForward
    from modelworks.parallel.pipeline.parts import build_parts as build_parts
    from modelworks.parallel.pipeline.parts import share_embedding as share_embedding

_HOME = {
    "EdgeShapes": "edges",
    "PipelineExecutor": "executor",
    "StageForward": "executor",
    "build_parts": "parts",
    "share_embedding": "parts",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
