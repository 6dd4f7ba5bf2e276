"""Functions as operators of torch: one call to whatever looks on (torch.compile, recomputation, fake tensors).

`torch.library.custom_op` says the same in one line, but its operators import torch's compiler at the first call, which
takes seconds in every process, compiled or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverloadPacket

Implementation = Callable[..., Any]


def operator(name: str) -> Callable[[Implementation], OpOverloadPacket]:
    """The decorated function as `torch.ops.<name>`, its schema that of its annotations.

    It may neither change its arguments nor return them. Gradients are told with `torch.library.register_autograd`
    under the same name, and what it makes of fake tensors with `on_fake_tensors`.
    """

    def register(function: Implementation) -> OpOverloadPacket:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "CompositeExplicitAutograd")(function)
        namespace, _, short = name.partition("::")
        packet: OpOverloadPacket = getattr(getattr(torch.ops, namespace), short)
        return packet

    return register


def on_fake_tensors(name: str) -> Callable[[Implementation], Implementation]:
    """The decorated function makes results of the right shape and dtype, and computes nothing."""
    registered: Callable[[Implementation], Implementation] = torch.library.register_fake(name)
    return registered
