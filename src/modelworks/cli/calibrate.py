"""Measuring this machine for the planner: what `modelworks plan --calibrate` does, in a few minutes.

    calibration = calibrate(output.print)
    path = write(calibration)             # where `hardware.this_machine()` finds it

For each number of processes the trainer's own parts are timed in as many processes at once, with the threads that the
trainer would give them (`train.rates`), and the planner finds what everything costs (`plan.calibrate`). All of it is
done twice, one after the other, so that a figure's two measurements lie minutes apart.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from modelworks.hardware import (
    FORM,
    THIS_MACHINE,
    Device,
    Link,
    MeasuredOn,
    Rates,
    calibrated_device,
    calibration_file,
    choose_threads,
    facts,
    match_cuda_name,
    write_device,
)

if TYPE_CHECKING:
    from modelworks.hardware import Machine, MachineFacts
    from modelworks.plan.calibrate import Probes

MOST_RANKS = 8  # beyond it, ranks are taken to share the cores as eight do
ROUNDS = 2


@dataclass(frozen=True)
class Calibration:
    """device: this machine. errors: (ranks, precision) -> predicted / measured - 1 of the steps that costs are fitted
    to. spread: by how much a figure of one round differs from the other, typically, as a part of it. disturbed: others
    kept the cores busy, so that the rates are too low. seconds: that it took."""

    device: Device
    errors: dict[tuple[int, str], list[float]]
    spread: float
    disturbed: bool
    seconds: float


def calibrate(
    tell: Callable[[str], None],
    *,
    quiet: bool = False,
    effort: float = 1.0,
    ranks: Sequence[int] | None = None,
) -> Calibration:
    """Measure. tell: is given a line for people now and then; quiet: no progress bar. effort: of the repetitions,
    relative to what gives steady figures. ranks: numbers of processes; None: powers of two up to the cores (GPUs).

    Raises what `parallel.launch` does. On CUDA the figures of the catalogue's entry are replaced by measured ones.
    """
    import torch

    from modelworks.hardware import measure_machine
    from modelworks.parallel import launch
    from modelworks.plan.calibrate import fit_rates
    from modelworks.train.rates import difference_of_rounds, mean_of_rounds

    started = time.monotonic()
    found = facts(accelerator=True)
    kind = "cuda" if found.accelerator else "cpu"
    torch.set_num_threads(int(choose_threads(found).value))
    tell(
        f"measuring this machine: {found.cpu}, {found.cores} cores; it takes a few minutes, and nothing else should run"
    )
    machine = measure_machine(device=kind, refresh=True)
    counts = list(ranks or _counts(found))
    rounds: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for number in range(1, ROUNDS + 1):
        for count in counts:
            who = f"{count} {'process' if count == 1 else 'processes at once'}"
            tell(f"measuring {who}, {number} of {ROUNDS}")
            with tempfile.TemporaryDirectory() as directory:
                arguments = {"device": kind, "quiet": quiet, "effort": effort / ROUNDS}
                target = "modelworks.cli.calibrate_rank:run_rank"
                rounds[count].append(launch(target, count, arguments, directory=Path(directory), device=kind)[0])
    rates: list[Rates] = []
    errors: dict[tuple[int, str], list[float]] = {}
    for count in counts:
        bandwidth = machine.memory_bandwidth / 1e9 / (1 if kind == "cuda" else count)
        measured = mean_of_rounds(rounds[count]) | {"memory_bandwidth_gb_s": bandwidth}
        fit = fit_rates(measured, probes(count))
        rates.append(fit.rates)
        errors |= {(count, precision): list(each) for precision, each in fit.errors.items()}
    again = measure_machine(device=kind, quick=True, refresh=True)
    return Calibration(
        device=_device(found, machine, rates),
        errors=errors,
        spread=max(difference_of_rounds(each) for each in rounds.values()),
        disturbed=machine.disturbed or again.disturbed,
        seconds=time.monotonic() - started,
    )


def probes(ranks: int) -> Probes:
    """The runs whose steps so many ranks have timed, in the order of what they tell."""
    from modelworks.plan.calibrate import Probes
    from modelworks.train.step_rates import PROBES, SHARDED, WATCHED, probe_config

    return Probes(
        steps=[probe_config(probe, "fp32") for probe in PROBES],
        watched=probe_config(WATCHED, "fp32"),
        sharded=[probe_config(probe, "fp32", ranks=ranks) for probe in SHARDED],
    )


def write(calibration: Calibration, path: Path | None = None) -> Path:
    """To `path`, by default where `this_machine()` looks. Returns it. Raises UserError where it cannot be written."""
    path = path or calibration_file()
    write_device(calibration.device, path)
    return path


def describe(calibration: Calibration) -> list[str]:
    """What was measured, in lines for people."""
    lines = []
    for each in calibration.device.measured:
        who = f"{each.ranks} {'process' if each.ranks == 1 else 'processes'} of {each.threads} threads"
        best = ", ".join(f"{dtype} {each.best_product(dtype) / 1e9:.0f}" for dtype in each.products)
        costs = ", ".join(f"{name} {1e3 * cost.layer.forward:.2f}" for name, cost in each.costs.items())
        lines.append(f"{who}: best products {best} GFLOP/s each; a layer's calls {costs} ms")
        for kind, (latency, second) in each.exchange_fits.items():
            rate = f"{1e-9 / second:.2f} GB/s" if second else "no limit found"
            lines.append(f"  {kind.replace('_', '-')}: {1e6 * latency:.0f} µs and {rate}")
    for (count, precision), errors in calibration.errors.items():
        typical = median(abs(error) for error in errors)
        lines.append(
            f"steps timed on {count}, {precision}: refitted within {typical:.0%} (median), {_worst(errors):.0%}"
        )
    lines.append(f"the two rounds differ by {calibration.spread:.0%} (median): no prediction can be closer than that")
    if calibration.disturbed:
        lines.append("warning: other programs kept the cores busy meanwhile; the rates are too low: calibrate again")
    return lines


def _counts(found: MachineFacts) -> list[int]:
    """Numbers of processes to measure."""
    most = found.accelerator.count if found.accelerator else max(2, found.cores)
    return [count for count in (1, 2, 4, 8) if count <= min(most, MOST_RANKS)]


def _device(found: MachineFacts, machine: Machine, rates: list[Rates]) -> Device:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    gpu = found.accelerator
    on = MeasuredOn(
        form=FORM,
        cpu=found.cpu,
        cores=found.cores,
        torch=machine.torch,
        at=at,
        accelerator=gpu.name if gpu else None,
    )
    if gpu is None:
        return calibrated_device(found, rates, on, peaks=machine.gemm)
    import torch

    entry = match_cuda_name(gpu.name)
    update: dict[str, Any] = {
        "measured_bf16_tflops": machine.gemm["bf16"] / 1e12,
        "memory_bandwidth_tb_s": machine.memory_bandwidth / 1e12,
        "measured_on": on,
        "name": THIS_MACHINE,
        "also": [],
        "cuda_names": [],
    }
    if len(rates) > 1:
        latency, each = rates[-1].exchange_fits["all_reduce"]
        wire = 2.0 * (rates[-1].ranks - 1) / rates[-1].ranks
        steps = 2 * (rates[-1].ranks - 1)
        update["link"] = Link(
            name="measured", gb_s=wire / each / 1e9, devices=gpu.count, latency_us=1e6 * latency / steps or None
        )
    base = entry or Device(
        name=gpu.name,
        vendor="amd" if torch.version.hip else "nvidia",
        memory_gb=gpu.memory / 1e9,
        dense_tflops={"fp32": machine.gemm["fp32"] / 1e12, "bf16": machine.gemm["bf16"] / 1e12},
        source=f"measured here with torch {machine.torch}, {at}",
    )
    return base.model_copy(update=update)


def _worst(errors: Sequence[float]) -> float:
    return max(abs(error) for error in errors)
