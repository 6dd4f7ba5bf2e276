"""What each process that `modelworks plan --calibrate` starts runs: measuring its own share of the machine."""

from __future__ import annotations

import sys
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from modelworks.layout import Layout
from modelworks.parallel import build_mesh, joined, process_group
from modelworks.train import keep_freed_memory
from modelworks.train.rates import measure_rank, parts_to_measure


def run_rank(*, device: str, quiet: bool, effort: float) -> dict[str, Any]:
    """On every rank; the answer is the same on all."""
    world = joined()
    assert world is not None
    keep_freed_memory()  # as the trainer does
    with process_group(world, torch.device(device), 600.0) as labels:
        where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        mesh = build_mesh(Layout(dp_replicate=world.size), where, labels=labels)
        shown = Console(file=sys.stderr, quiet=quiet or world.rank > 0)
        with Progress(console=shown, transient=True, disable=not shown.is_terminal) as bar:
            name = f"{world.size} {'process' if world.size == 1 else 'processes'}"
            task = bar.add_task(name, total=parts_to_measure(world.size))

            def tell(what: str) -> None:
                bar.update(task, advance=1, description=f"measuring {name}: {what}")

            return measure_rank(mesh, tell, effort=effort)
