"""Forgetting keys of long contexts, by whole blocks: policies, and `Evictor`, which carries out what they decide.

Names are loaded on first use: policies need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.serve.eviction.evictor import Evictor as Evictor
    from modelworks.serve.eviction.policies import HeavyHitters as HeavyHitters
    from modelworks.serve.eviction.policies import Policy as Policy
    from modelworks.serve.eviction.policies import SinksAndWindow as SinksAndWindow
    from modelworks.serve.eviction.policies import SnapKV as SnapKV
    from modelworks.serve.eviction.policies import Table as Table
    from modelworks.serve.eviction.policies import parse_policy as parse_policy

_HOME = {
    "Evictor": "evictor",
    "HeavyHitters": "policies",
    "Policy": "policies",
    "SinksAndWindow": "policies",
    "SnapKV": "policies",
    "Table": "policies",
    "parse_policy": "policies",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
