"""The two scripts that every target gets: `launch.sh` for one node's torchrun, `slurm.sh` for a batch of nodes.

Both run in the directory of the files. Nothing that a user wrote (names, paths) stands in them unquoted, and comments
and `#SBATCH` lines hold only characters that cannot end them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelworks.config import UserError
from modelworks.hardware import Device

LAUNCH, BATCH = "launch.sh", "slurm.sh"
_DEVICES_OF_A_NODE = 8  # where the catalogue does not say


@dataclass(frozen=True)
class Nodes:
    nodes: int
    devices: int  # of each

    @classmethod
    def of(cls, device: Device, n_devices: int) -> Nodes:
        """Whole nodes, as large as the catalogue says. Raises UserError where the devices leave one partly empty."""
        size = (device.link.devices or _DEVICES_OF_A_NODE) if device.link else 1
        if n_devices <= size:
            return cls(1, n_devices)
        if n_devices % size:
            near = n_devices // size * size
            raise UserError(
                f"{n_devices} devices: a node of {plain(device.name)} has {size}, and torchrun starts as many on every "
                f"node; use {near} or {near + size}"
            )
        return cls(n_devices // size, size)


def scripts(name: str, nodes: Nodes, header: Sequence[str], program: str, prelude: str) -> dict[str, str]:
    """File name -> text. header: lines of comment. program: what follows torchrun's own options, as bash.

    prelude: lines of bash before it.
    """
    comment = comments(header)
    launch = f"""#!/bin/bash
{comment}# On each of {nodes.nodes} node(s): bash {LAUNCH}
# Where there are several, set MASTER_ADDR on all of them to the address of the first.
set -euo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
{prelude}exec torchrun \\
  --nnodes {nodes.nodes} --nproc-per-node {nodes.devices} \\
  --rdzv-backend c10d --rdzv-endpoint "${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-29500}}" \\
  --rdzv-id "${{RDZV_ID:-{word(name)}}}" \\
  {program}
"""
    batch = f"""#!/bin/bash
#SBATCH --job-name={word(name)}
#SBATCH --nodes={nodes.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={nodes.devices}
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
{comment}# In the directory of this file: sbatch {BATCH}
# Add --partition, --account and --time as your cluster asks.
set -euo pipefail
cd -- "$SLURM_SUBMIT_DIR"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
RDZV_ID="$SLURM_JOB_ID"
export MASTER_ADDR MASTER_PORT RDZV_ID
exec srun --kill-on-bad-exit=1 bash {LAUNCH}
"""
    return {LAUNCH: launch, BATCH: batch}


def world_size(directory: Path) -> int:
    """Processes that the launch script in `directory` starts, on all nodes."""
    found = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", (directory / LAUNCH).read_text(encoding="utf-8"))
    if found is None:
        raise UserError(f"{directory / LAUNCH}: names no number of nodes and processes, as `--emit` writes it")
    return int(found[1]) * int(found[2])


def comments(lines: Sequence[str]) -> str:
    return "".join(f"# {plain(line)}\n" for line in lines)


def plain(text: str) -> str:
    """On one line, printable: what may stand in a comment or a message."""
    return "".join(character if character.isprintable() else " " for character in text)


def word(text: str) -> str:
    """A name that needs no quotes anywhere."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("-") or "run"
