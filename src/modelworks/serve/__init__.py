"""Serving a model: engine, scheduler, cache, API. The scheduler knows no tensors.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.serve.async_engine import AsyncEngine as AsyncEngine
    from modelworks.serve.engine import Engine as Engine
    from modelworks.serve.options import EngineOptions as EngineOptions
    from modelworks.serve.params import SamplingParams as SamplingParams
    from modelworks.serve.params import Structure as Structure
    from modelworks.serve.request import Collected as Collected
    from modelworks.serve.request import Completion as Completion
    from modelworks.serve.request import Delta as Delta
    from modelworks.serve.request import Request as Request
    from modelworks.serve.request import RequestOutput as RequestOutput
    from modelworks.serve.request import TokenLogprob as TokenLogprob
    from modelworks.serve.stats import EngineStats as EngineStats
    from modelworks.serve.tensor_parallel.processes import ModelOnRanks as ModelOnRanks
    from modelworks.serve.tensor_parallel.processes import model_on_ranks as model_on_ranks
    from modelworks.serve.waiting import Overloaded as Overloaded

_HOME = {
    "AsyncEngine": "async_engine",
    "Collected": "request",
    "Completion": "request",
    "Delta": "request",
    "Engine": "engine",
    "EngineOptions": "options",
    "EngineStats": "stats",
    "ModelOnRanks": "tensor_parallel.processes",
    "Overloaded": "waiting",
    "Request": "request",
    "RequestOutput": "request",
    "SamplingParams": "params",
    "Structure": "params",
    "TokenLogprob": "request",
    "model_on_ranks": "tensor_parallel.processes",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
