"""The proof that a layout computes what one process does: the user's run made small, run split and whole, compared."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelworks.verify.compare import Comparison as Comparison
    from modelworks.verify.shrink import shrink as shrink
    from modelworks.verify.verify import Verdict as Verdict
    from modelworks.verify.verify import verify as verify
    from modelworks.verify.verify import verify_on as verify_on

_HOME = {"Comparison": "compare", "Verdict": "verify", "shrink": "shrink", "verify": "verify", "verify_on": "verify"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept: importing the file `verify` puts the module where the function of that name belongs.
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
