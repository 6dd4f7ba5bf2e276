"""What is said and recorded before the first step: decisions with their reasons, predictions and baselines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from modelworks.config import count_parameters, format_bytes, format_count, training_flops_per_token
from modelworks.hardware import Machine, Peak, fingerprint, peak_flops
from modelworks.layout import Layout
from modelworks.train.derivation import Decision, Derived
from modelworks.train.recording import RunLog
from modelworks.train.state import TrainState


def print_decisions(derived: Derived, console: Console) -> None:
    """The table of everything that was not written in the configuration, with the reasons."""
    table = Table("derived", "value", "reason", box=None, pad_edge=False)
    for decision in (*derived.decisions, *_sizes(derived)):
        table.add_row(decision.key, decision.value, decision.reason)
    console.print(table)


def _sizes(derived: Derived) -> list[Decision]:
    config = derived.config
    count = count_parameters(config.model)
    flops = training_flops_per_token(config.model, config.data.seq_len).training
    memory = derived.memory
    active = f"; a token uses {format_count(count.active)}" if count.active < count.total else ""
    parts = ", ".join(f"{name} {format_bytes(value)}" for name, value in asdict(memory).items())
    return [
        Decision(
            "parameters", format_count(count.total), f"{count.non_embedding:,} without embeddings and head{active}"
        ),
        Decision("FLOPs per token", format_count(flops), "training: 3 x the forward pass, attention counted causally"),
        Decision(f"memory{_of_fullest(derived)}", format_bytes(memory.total), parts),
    ]


def _of_fullest(derived: Derived) -> str:
    return " of the fullest rank" if Layout.of(derived.config.parallel).world_size > 1 else ""


def compute_name(derived: Derived) -> Any:
    return {"fp32": "fp32", "fp16": "fp16"}.get(derived.precision.name, "bf16")


def job_peak(derived: Derived, machine: Machine, n_hosts: int) -> Peak:
    """The denominator of MFU: what all that computes this run could do together, whatever the layout.

    A CPU's rate is measured with all the cores that the ranks on it use together, so it counts once a machine (machines
    are taken to be alike); every rank of a GPU run has a device of its own.
    """
    peak = peak_flops(machine, compute_name(derived))
    world = Layout.of(derived.config.parallel).world_size
    many, what = (world, "devices") if derived.device.type == "cuda" else (n_hosts, "machines")
    return peak if many == 1 else Peak(many * peak.flops, f"{many} {what}, each: {peak.source}")


def record_start(
    log: RunLog, state: TrainState, derived: Derived, baselines: dict[str, float], machine: Machine, peak: Peak
) -> None:
    """What is known before the first step: decisions, predictions, baselines. Once a run, and again on resume.

    peak: the denominator of MFU.
    """
    step, config = state.step, derived.config
    parameters = state.model.count_parameters()
    log.event(step, "environment", fingerprint(machine))
    for decision in derived.decisions:
        log.event(step, "decision", asdict(decision))
    if step:
        log.event(step, "resume", f"resumed at step {step}")
        return
    flops = training_flops_per_token(config.model, config.data.seq_len)
    log.figure(0, "predicted/parameters", count_parameters(config.model).total, "parameters", kind="predicted")
    log.figure(0, "model/parameters", parameters, "parameters")
    log.figure(0, "predicted/flops_per_token", flops.training, "FLOP/token", kind="predicted")
    log.figure(0, "machine/peak_flops", peak.flops, "FLOP/s")
    log.event(0, "decision", {"key": "MFU denominator", "value": f"{peak.flops:.4g} FLOP/s", "reason": peak.source})
    for name, value in {**asdict(derived.memory), "total": derived.memory.total}.items():
        log.figure(0, f"predicted/memory_{name}", value, "bytes", kind="predicted")
    if derived.staging:
        log.figure(0, "predicted/checkpoint_staging", derived.staging, "bytes", kind="predicted")
    for name, value in baselines.items():
        log.figure(0, f"baseline/{name}_bits_per_byte", value, "bits/byte")
