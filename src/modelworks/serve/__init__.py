"""Serving a model: engine, scheduler, cache, API. The scheduler knows no tensors.

Names are loaded on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.serve.options import EngineOptions as EngineOptions
    from modelworks.serve.request import Collected as Collected
    from modelworks.serve.request import Completion as Completion
    from modelworks.serve.request import Delta as Delta
    from modelworks.serve.request import Request as Request
    from modelworks.serve.request import RequestOutput as RequestOutput
    from modelworks.serve.request import TokenLogprob as TokenLogprob
    from modelworks.serve.waiting import Overloaded as Overloaded

_HOME = {
    "Collected": "request",
    "Completion": "request",
    "Delta": "request",
    "EngineOptions": "options",
    "Overloaded": "waiting",
    "Request": "request",
    "RequestOutput": "request",
    "TokenLogprob": "request",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
