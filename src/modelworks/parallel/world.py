"""Joining the other processes of a run, whoever started them: `launch` on this machine or torchrun on many.

Both leave the same words in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so a rank does
not care. All ranks meet in one TCPStore at that address; what the ranks tell each other outside collectives goes
through it under names of this package, a fresh set for each attempt that torchrun makes.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from modelworks.config import UserError
from modelworks.parallel.labels import DIRECTORY_VARIABLE
from modelworks.parallel.mesh import Mesh

_MEETING = timedelta(minutes=5)  # for the other processes to start
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among those of its run.

    rank: from 0 to size - 1; local_rank: among those of this machine; address, port: where the ranks' store is.
    attempt: how often torchrun has started over. hosts: whether rank 0 must open the store (else it is open already).
    files: a directory shared with `launch`, None under torchrun.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    attempt: int
    hosts: bool
    files: Path | None

    @cached_property
    def _store(self) -> TCPStore:
        is_master = self.hosts and self.rank == 0
        return TCPStore(self.address, self.port, None, is_master, _MEETING, wait_for_workers=False)

    def store(self, purpose: str) -> Store:
        """A connection of its own: a store answers one question at a time, and a thread may have to wait for it."""
        name = f"modelworks/{self.attempt}/{purpose}"
        return PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]  # missing in the stubs

    def is_first_to_say(self, text: str) -> bool:
        """Whether no rank has asked for this text before: what all ranks would say is then said once."""
        try:
            times = self.store("said").add(hashlib.sha256(text.encode()).hexdigest(), 1)
            return bool(times == 1)
        except RuntimeError:  # the store is gone, and with it the way to ask: rather said twice than never
            return True


def joined() -> World | None:
    """The run that this process was started for as one of its ranks; None for a process on its own."""
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return None
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise UserError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}: start the ranks with torchrun, "
            f"which sets {', '.join(_VARIABLES)}, or unset {', '.join(given)} to start a run here"
        )
    rank, size, local_rank, port = (_whole(given, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    if rank >= size:
        raise UserError(f"the environment has RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}")
    files = os.environ.get(DIRECTORY_VARIABLE)
    return World(
        rank,
        size,
        local_rank,
        given["MASTER_ADDR"],
        port,
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        Path(files) if files else None,
    )


def initialize_process_group(world: World, device: torch.device, timeout: float) -> None:
    """torch.distributed for all ranks: Gloo on CPU; NCCL on CUDA, where this process takes device `local_rank`.

    timeout: seconds after which the backend itself gives up an operation.
    """
    if device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {world.rank} needs CUDA device {world.local_rank} of its machine, which shows "
                f"{torch.cuda.device_count()}: start one process for each device"
            )
        torch.cuda.set_device(world.local_rank)
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_towards(world.address)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=world.store("process-group"),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )


def leave_process_group() -> None:
    """The end of what `initialize_process_group` began."""
    dist.destroy_process_group()


def agree(flag: bool, mesh: Mesh, group: str = "world") -> bool:
    """Whether any rank of the group says so; the same answer on all of them, who must all ask.

    For decisions that only one rank may come to by itself, such as to stop because of a signal.
    """
    said = torch.tensor(float(flag), device=mesh.device)
    return bool(mesh.group(group).all_reduce_(said, "max").item())


def interface_towards(address: str) -> str | None:
    """The network interface that reaches an address; None where that cannot be told.

    Gloo would take the one that the host's name stands for, often a loopback that other machines cannot reach.
    """
    try:
        found = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(place)  # of a datagram socket: chooses the way, sends nothing
            except OSError:
                continue
            own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == own for each in addresses):
                return name
    return None


def _whole(given: dict[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise UserError(f"the environment has {name}={given[name]}, expected a whole number")
    return int(given[name])
