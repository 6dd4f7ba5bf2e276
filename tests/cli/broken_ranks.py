"""What `modelworks verify` runs on its ranks in tests of failures: the real thing, with one rank that is broken."""

from __future__ import annotations

import os
import threading
from typing import Any

from modelworks.train.micro_batches import MicroBatches
from modelworks.verify.verdict import verify_rank


def raising(**arguments: Any) -> dict[str, Any] | None:
    _break_rank_1(_raise)
    return verify_rank(**arguments)


def hanging(**arguments: Any) -> dict[str, Any] | None:
    _break_rank_1(threading.Event().wait)
    return verify_rank(**arguments)


def _break_rank_1(how: Any) -> None:
    if os.environ["RANK"] == "1":
        MicroBatches.forward = lambda *arguments: how()  # type: ignore[method-assign]


def _raise() -> None:
    raise RuntimeError("this rank is broken")
