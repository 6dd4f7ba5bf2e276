"""Compiled code of ours: C++ sources beside the rooms that use them, built on this machine at their first use.

Whoever offers compiled code has the same in torch as well, and says once which of the two runs.
"""

from __future__ import annotations

from modelworks.native.library import Unavailable as Unavailable
from modelworks.native.library import load as load
