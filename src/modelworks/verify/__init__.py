"""The proof that a layout computes what one process does: the user's run made small, run split and whole, compared."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelworks.verify.compare import Comparison as Comparison
    from modelworks.verify.shrinking import shrink as shrink
    from modelworks.verify.verdict import Verdict as Verdict
    from modelworks.verify.verdict import verify as verify
    from modelworks.verify.verdict import verify_on as verify_on

_HOME = {
    "Comparison": "compare",
    "Verdict": "verdict",
    "shrink": "shrinking",
    "verify": "verdict",
    "verify_on": "verdict",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
