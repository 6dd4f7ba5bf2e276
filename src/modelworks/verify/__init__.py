"""The proof that a layout computes what one process does: the user's run made small, run split and whole, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

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

__getattr__ = lazily(__name__, _HOME)
