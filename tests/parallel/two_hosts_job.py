"""What torchrun starts in test_two_hosts.py: a rank that writes what it learnt into DIRECTORY/<rank>.json.

With `die`, the last rank is killed at step 12; the others write what they were told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from modelworks.layout import Layout
from modelworks.parallel import RankLost, World, agree, build_mesh, joined, process_group
from modelworks.parallel.hangs import State
from modelworks.train.stopping import stop_on_signals


def learn(*, die: bool) -> dict[str, Any]:
    world = joined()
    assert world is not None
    device = torch.device("cpu")
    # torchrun sends SIGTERM to the ranks of a host where one has died
    with stop_on_signals(), process_group(world, device, timeout=60) as labels:
        mesh = build_mesh(Layout(dp_shard=world.size // 2, tp=2), device, labels=labels)
        labels.step(12)
        x = torch.tensor([float(world.rank + 1)])
        sums = {name: mesh.group(name).all_reduce_(x.clone()).item() for name in ("world", "tp", "dp_shard")}
        last = world.rank == world.size - 1
        if die:
            while not agree(last and _reported_step(world) == 12, mesh):
                pass
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
        return {
            "size": world.size,
            "sums": sums,
            "agreed": agree(world.rank == 1, mesh),
            "first": world.is_first_to_say("once"),
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
        }


def _reported_step(world: World) -> int | None:
    """The step in what the others would learn of this rank."""
    return State.from_json(world.store("watch").get(f"state{world.rank}")).step


def main(directory: Path, *, die: bool) -> int:
    try:
        told: Any = learn(die=die)
    except RankLost as error:
        told = str(error)
    (directory / f"{os.environ['RANK']}.json").write_text(json.dumps(told))
    return int(isinstance(told, str))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), die="die" in sys.argv))
