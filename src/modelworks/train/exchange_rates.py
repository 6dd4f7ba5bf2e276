"""Seconds of exchanges as `modelworks.parallel` sends them, between computations.

In a run ranks compute for some milliseconds, come to an exchange at slightly different moments, and what they send
has just been written. In a loop of its own an exchange is faster by a third to a half. So each turn is a product and
the making of what is sent, without the exchange and with it, and the difference is the exchange's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from modelworks.train.timing import Clock

EXCHANGED = (4096, 65536, 2**20, 2**22, 2**24)  # bytes of a whole tensor
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
BETWEEN = (1024, 512, 768)  # (rows, columns, inner) of the product that lies between two exchanges


def exchange_seconds(clock: Clock) -> dict[str, list[list[float]]]:
    """By kind: [bytes of the whole tensor, seconds]. A send is one to the next rank while one comes from the last."""
    if clock.mesh.layout.world_size == 1:
        return {}
    m, n, k = BETWEEN
    x, weight = clock.random((m, k), torch.float32), clock.random((n, k), torch.float32)
    exchanges = _exchanges(clock)
    found: dict[str, list[list[float]]] = {}
    for kind in KINDS:
        for size in EXCHANGED:
            source = torch.ones(size // 4, device=clock.device)

            def compute(source: Tensor = source) -> Tensor:
                F.linear(x, weight)
                return source * 1.5

            def with_exchange(source: Tensor = source, exchange: Callable[[Tensor], object] = exchanges[kind]) -> None:
                F.linear(x, weight)
                exchange(source * 1.5)

            alone, together = clock.seconds(compute, with_exchange, budget=0.6)
            found.setdefault(kind, []).append([size, max(together - alone, 1e-6)])
            clock.tell(f"exchanges: {kind}")
    return found


def _exchanges(clock: Clock) -> dict[str, Callable[[Tensor], object]]:
    """What is done with a whole tensor of a float32 number each rank, by kind."""
    group = clock.mesh.group("world")
    n, place = group.size, group.index

    def all_to_all(x: Tensor) -> None:
        even = [x.shape[0] // n] * n
        group.all_to_all(x[:, None], even, even)

    def send(x: Tensor) -> None:
        received = torch.empty_like(x)
        for work in group.exchange([(x, (place + 1) % n)], [(received, (place - 1) % n)]):
            work.wait()

    return {
        "all_reduce": group.all_reduce_,
        "all_gather": lambda x: group.all_gather(x[: x.shape[0] // n]),
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": all_to_all,
        "send": send,
    }
