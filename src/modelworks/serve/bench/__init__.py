"""Measuring an OpenAI-compatible endpoint from outside: what is asked, when, and what the answers' times say. No torch.

Names are loaded on first use, so that importing this package does not import an HTTP client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.serve.bench.client import Client as Client
    from modelworks.serve.bench.figures import figures as figures
    from modelworks.serve.bench.load import ClosedLoop as ClosedLoop
    from modelworks.serve.bench.load import OpenLoop as OpenLoop
    from modelworks.serve.bench.load import run_load as run_load
    from modelworks.serve.bench.outcome import Outcome as Outcome
    from modelworks.serve.bench.prompts import Excerpts as Excerpts
    from modelworks.serve.bench.prompts import Listed as Listed
    from modelworks.serve.bench.prompts import Prompts as Prompts
    from modelworks.serve.bench.prompts import read_text as read_text

_HOME = {
    "Client": "client",
    "ClosedLoop": "load",
    "Excerpts": "prompts",
    "Listed": "prompts",
    "OpenLoop": "load",
    "Outcome": "outcome",
    "Prompts": "prompts",
    "figures": "figures",
    "read_text": "prompts",
    "run_load": "load",
}
__getattr__ = lazily(__name__, _HOME)
