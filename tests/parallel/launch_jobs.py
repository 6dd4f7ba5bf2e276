"""What the ranks do in test_launch.py and test_two_hosts.py; run as a script, it launches one of these by name."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelworks.parallel import Group


def learn(scale: float) -> dict[str, Any]:
    """What a rank knows of itself, a sum, and a decision that only the last rank wants."""
    import torch

    from modelworks.layout import Layout
    from modelworks.parallel import agree, build_mesh, joined, process_group

    world = joined()
    assert world is not None
    device = torch.device("cpu")
    warnings.warn("said by every rank", stacklevel=1)
    with process_group(world, device, timeout=60) as labels:
        mesh = build_mesh(Layout(dp_shard=world.size), device, labels=labels)
        total = mesh.group("dp_shard").all_reduce_(torch.tensor([scale * (world.rank + 1)]))
        return {
            "rank": world.rank,
            "size": world.size,
            "sum": total.item(),
            "agreed": agree(world.rank == world.size - 1, mesh),
            "refused": agree(False, mesh),
            "threads": torch.get_num_threads(),
            "first": world.is_first_to_say("once"),
        }


def refuse() -> None:
    from modelworks.config import UserError

    raise UserError("model.n_heads: got 3, expected a multiple of tp 2")


def raise_on_rank_1() -> None:
    def fail(group: Group) -> None:
        raise ValueError("on purpose")

    _after_one_sum(fail, timeout=60)


def die_on_rank_1() -> None:
    _after_one_sum(lambda group: os.kill(os.getpid(), signal.SIGKILL), timeout=60)


def never_come_on_rank_1() -> None:
    _after_one_sum(lambda group: threading.Event().wait(), timeout=2)


def save_on_signal(fifo: str) -> None:
    """Steps until some rank was sent a signal; then all end together, as preempted."""
    import torch

    from modelworks.layout import Layout
    from modelworks.parallel import agree, build_mesh, joined, process_group
    from modelworks.train.stopping import stop_on_signals

    world = joined()
    assert world is not None
    device = torch.device("cpu")
    with stop_on_signals() as request, process_group(world, device, timeout=60) as labels:
        mesh = build_mesh(Layout(dp_shard=world.size), device, labels=labels)
        agree(False, mesh)
        if world.rank == 0:
            Path(fifo).write_text("ready\n")
        while not agree(request.requested, mesh):
            pass
    sys.exit(75)


def hold(fifo: str) -> None:
    """Keep the FIFO open for as long as the process lives."""
    with open(fifo, "w") as stream:
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        threading.Event().wait()


def _after_one_sum(on_rank_1: Callable[[Group], object], timeout: float) -> None:
    """At step 12: a sum, `on_rank_1` on that rank alone, another sum."""
    import torch

    from modelworks.layout import Layout
    from modelworks.parallel import build_mesh, joined, process_group

    world = joined()
    assert world is not None
    with process_group(world, torch.device("cpu"), timeout) as labels:
        group = build_mesh(Layout(tp=world.size), torch.device("cpu"), labels=labels).group("tp")
        labels.step(12)
        group.all_reduce_(torch.ones(1))
        if world.rank == 1:
            labels.doing("data")
            on_rank_1(group)
        group.all_reduce_(torch.ones(1))


if __name__ == "__main__":
    from modelworks.parallel import launch

    name, directory, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    launch(f"launch_jobs:{name}", 2, arguments, directory=Path(directory))
