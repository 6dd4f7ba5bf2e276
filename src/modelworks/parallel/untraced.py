"""What torch.compile must not trace, without importing its tracer, which takes longer than the rest of torch.

`torch.compiler.disable` imports `torch._dynamo` when a function is decorated: seconds for every rank of every run,
compiled or not. Here that happens on the first call in a process that has imported it for other reasons; in any other
process nothing is traced, and the function is called as it is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_traced(function: _Function) -> _Function:
    """A graph breaks at this function, and the rest is compiled."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **more)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*arguments, **more)

    _skip_frame(call)
    return call  # type: ignore[return-value]


def _skip_frame(function: Any) -> None:
    """What `torch._dynamo.skip` does: callers break their graph at the function, and its own frame starts none."""
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    function._torchdynamo_disable = True
