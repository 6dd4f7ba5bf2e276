"""The most bytes of tensors that each rank of a run holds at once, as torch's allocator counts them.

A step is the trainer's own; what is left out is the loop around it (data, records, checkpoints). Every allocation of
the process is seen from before the model is built, so nothing is assumed about what lives already.
"""

from __future__ import annotations

import bisect
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from modelworks.config import RunConfig, dump_yaml, parse_run_config
from modelworks.layout import Layout
from modelworks.optim import build_optimizer
from modelworks.parallel import build_mesh, joined, launch, process_group, split_model
from modelworks.train import PRECISIONS, apply_gradients, compute_gradients, data_rows
from modelworks.train.step_rates import random_batch

STEPS = 3


def live_peaks(config: RunConfig) -> list[int]:
    """Bytes, by rank. config: resolved, on a CPU."""
    with tempfile.TemporaryDirectory() as directory:
        world_size = Layout.of(config.parallel).world_size
        arguments = {"config": dump_yaml(config)}
        return launch("benchmarks._live_memory:run_rank", world_size, arguments, directory=Path(directory))


def run_rank(config: str) -> int:
    """On each rank."""
    parsed, world = parse_run_config(config, "the run"), joined()
    assert world is not None
    device = torch.device("cpu")
    traced = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with process_group(world, device, 600.0) as labels, traced as events:
        layout = Layout.of(parsed.parallel)
        _train(parsed, build_mesh(layout, device, n_kv_heads=parsed.model.n_kv_heads, labels=labels))
    return _peak(events)


def _train(config: RunConfig, mesh: Any) -> None:
    precision = PRECISIONS[config.train.precision]
    model = split_model(config, mesh, dtype=precision.parameter_dtype)
    model.train()
    optimizer = build_optimizer(model.stored.items(), config.optimizer, split=model.split)
    batch = random_batch(config).rows(data_rows(model, config.train.global_batch))
    for step in range(STEPS):
        gradients = compute_gradients(
            model, batch, config, step=step, micro_batch=int(config.train.micro_batch), precision=precision
        )
        apply_gradients(model, optimizer, gradients, config, lr=1e-4)
        del gradients


def _peak(events: Any) -> int:
    """The profiler sees what this thread does. A tensor that an exchange's thread lets go of last is known to be gone
    once its memory is handed out again."""
    most = total = 0
    live: dict[int, int] = {}  # address -> bytes
    addresses: list[int] = []  # of those, in order
    for _, address, size in _allocations(events):
        if size < 0:
            gone = [address] if address in live else []
        else:
            first = bisect.bisect_left(addresses, address)
            if first and addresses[first - 1] + live[addresses[first - 1]] > address:
                first -= 1
            gone = addresses[first : bisect.bisect_left(addresses, address + size)]
        for old in gone:
            total -= live.pop(old)
            addresses.remove(old)
        if size > 0:
            live[address] = size
            bisect.insort(addresses, address)
            total += size
            most = max(most, total)
    return most


def _allocations(events: Any) -> list[tuple[int, int, int]]:
    """(time, address, bytes; negative where they are freed), in order."""
    found, left = [], list(events.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda each: each[0])
