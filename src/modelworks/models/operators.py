"""Functions as operators of torch: one call to whatever looks on (torch.compile, recomputation, fake tensors).

`torch.library.custom_op` says the same in one line, but its operators import torch's compiler at the first call, which
takes seconds in every process, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Implementation = Callable[..., Any]


def operator(name: str) -> Callable[[Implementation], Implementation]:
    """The decorated function as `torch.ops.<name>`, its schema that of its annotations.

    It may neither change its arguments nor return them. Gradients and the shapes of fake tensors are told with
    `torch.library.register_autograd` and `register_fake` under the same name.
    """

    def register(function: Implementation) -> Implementation:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        namespace, _, short = name.partition("::")
        packet: Implementation = getattr(getattr(torch.ops, namespace), short)
        return packet

    return register
