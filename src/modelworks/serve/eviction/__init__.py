"""Forgetting keys of long contexts, by whole blocks: policies, and `Evictor`, which carries out what they decide."""

from __future__ import annotations

from modelworks.serve.eviction.evictor import Evictor as Evictor
from modelworks.serve.eviction.policies import HeavyHitters as HeavyHitters
from modelworks.serve.eviction.policies import Policy as Policy
from modelworks.serve.eviction.policies import SinksAndWindow as SinksAndWindow
from modelworks.serve.eviction.policies import SnapKV as SnapKV
from modelworks.serve.eviction.policies import Table as Table
