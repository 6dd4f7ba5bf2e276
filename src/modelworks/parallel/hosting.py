"""Starting the other ranks from a process that is rank 0 itself: for work that comes from outside, such as requests.

    host = Host("package.module:function", 3, {"path": "…"})     ranks 1 and 2 call the function
    mesh = host.meet(Layout(tp=3), torch.device("cpu"), 60.0)    and this process is rank 0

Unlike `launch`, which waits for a run to end, nobody is waited for here: ranks serve until they are told to leave (how
is between them and rank 0), or until this process ends, however it ends. Whoever misses one asks `lost()`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from modelworks.config import UserError
from modelworks.layout import Layout
from modelworks.parallel.failures import kernel_kills
from modelworks.parallel.labels import LABELS_FILE, create_slots
from modelworks.parallel.launching import Rank, check_devices, open_store, rank_environment, rank_place, start_rank
from modelworks.parallel.mesh import Mesh, build_mesh
from modelworks.parallel.world import World, initialize_process_group, leave_process_group

_INTERFACE = "GLOO_SOCKET_IFNAME"
_FAREWELL = 10.0  # seconds for a rank that was told to leave
_LAST_WORD = 2.0  # seconds in which a rank that broke a connection says why


class Host:
    """world: this process, rank 0 of `world_size`.

    target, arguments: as for `launch`; the other ranks' results are not wanted. threads: to divide among all ranks.
    """

    def __init__(
        self,
        target: str,
        world_size: int,
        arguments: Mapping[str, Any],
        *,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        check_devices(device, world_size)
        self._directory = tempfile.TemporaryDirectory(prefix="modelworks-ranks-")
        directory = Path(self._directory.name)
        create_slots(directory / LABELS_FILE, world_size)
        self._kills = kernel_kills()
        environment = rank_environment(world_size, threads)
        self._ranks = [start_rank(number, directory, environment) for number in range(1, world_size)]
        self._store = open_store()
        for rank in self._ranks:
            rank.child.tell(target, arguments, rank_place(rank.number, world_size, self._store.port, directory))
        self.world = World(0, world_size, 0, "127.0.0.1", self._store.port, 0, hosts=False, files=directory)
        self._has_met = False

    def meet(self, layout: Layout, device: torch.device, timeout: float) -> Mesh:
        """torch.distributed with the other ranks, all of them in one group. timeout: seconds of one operation.

        Which network interface Gloo takes is said in the environment. This process is no rank for good, as those are
        that it starts: what else it starts later shall find its own.
        """
        before = os.environ.get(_INTERFACE)
        try:
            initialize_process_group(self.world, device, timeout)
            self._has_met = True
            return build_mesh(layout, device)
        finally:
            if before is None:
                os.environ.pop(_INTERFACE, None)

    def lost(self) -> str | None:
        """Which rank has ended and how; None while all live. Raises a rank's `UserError`."""
        limit = time.monotonic() + _LAST_WORD
        while not (ended := [rank for rank in self._ranks if _has_ended(rank)]) and time.monotonic() < limit:
            time.sleep(0.05)
        if not ended:
            return None
        # What is merely the loss of another rank is told only where nothing else is known.
        first = min(ended, key=lambda rank: (bool((rank.outcome or {}).get("lost")), rank.number))
        outcome = first.outcome or {}
        if outcome["kind"] == "user error":
            raise UserError(outcome["text"])
        if outcome["kind"] in ("killed", "vanished"):
            return f"rank {first.number} {first.child.describe_end(kernel_kills() > self._kills)}"
        return f"rank {first.number} failed: {outcome.get('type', outcome['kind'])}: {outcome.get('text', '')}"

    def close(self) -> None:
        """Ranks that were told to leave get a moment, then they are killed. Closing twice is closing once."""
        if self._has_met:
            leave_process_group()
            self._has_met = False
        limit = time.monotonic() + _FAREWELL
        for rank in self._ranks:
            rank.child.end(max(0.0, limit - time.monotonic()))
        self._ranks = []
        self._directory.cleanup()


def _has_ended(rank: Rank) -> bool:
    if rank.outcome is None and rank.child.process.poll() is not None:
        rank.child.listen()
    return rank.outcome is not None
