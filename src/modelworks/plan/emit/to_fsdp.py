"""FSDP2: a training script of plain PyTorch over a model of transformers, with its settings in `run.json`.

Not an `accelerate` configuration: that only fills in `fully_shard`'s arguments behind a launcher of its own, while a
script under torchrun says all of them, and runs here on CPUs as it does there on GPUs, which is how it was checked.
Parameters are stored in fp32; `bf16` gathers them, and computes, in bf16. Tensor, context, pipeline and expert
parallelism are torchtitan's business.
"""

from __future__ import annotations

import json
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from modelworks.config import ParallelConfig
from modelworks.plan.emit.hugging_face import FILE, model_json, model_refusals, read_model
from modelworks.plan.emit.launch import comments
from modelworks.plan.emit.settings import Wanted, steps_of

CHECKED_WITH = "torch 2.13.0 and transformers 5.24.0"
SCRIPT, SETTINGS = "train.py", "run.json"
_PRECISIONS = {"fp32": "none", "bf16": "bf16", "bf16-autocast": "autocast"}
_OPTIMIZERS = ("adamw", "adam")
_SCHEDULES = ("cosine", "linear", "constant")


def refusals(wanted: Wanted) -> list[str]:
    reasons = model_refusals(wanted)
    for key in ("tp", "cp", "pp", "ep"):
        if wanted[f"parallel.{key}"] > 1:
            reasons.append(f"parallel.{key}: FSDP is data parallel only; use {key}=1, or the target torchtitan")
    zero, sharded = wanted["parallel.zero"], wanted["parallel.dp_shard"] > 1
    if zero == 1:
        reasons.append("parallel.zero: it shards gradients with the optimiser state; use zero=2 or zero=3")
    if wanted["parallel.offload"] != "none" and not (
        wanted["parallel.offload"] == "cpu" and wanted["parallel.offload_params"]
    ):
        reasons.append("parallel.offload: all or nothing: use offload=cpu with offload_params=true (zero 3), or none")
    if wanted["train.recompute"] == "selective":
        reasons.append("train.recompute: transformers recomputes whole layers; use full or none")
    precision = wanted["train.precision"]
    if precision not in _PRECISIONS:
        reasons.append(f"train.precision: {', '.join(_PRECISIONS)} are written, got {precision}")
    if precision == "bf16" and not sharded:
        reasons.append("train.precision: FSDP keeps fp32 shards behind bf16; without shards use bf16-autocast")
    if precision == "bf16-autocast" and sharded:
        reasons.append("train.precision: with shards its mixed precision is bf16 throughout; use bf16")
    if wanted["optimizer.name"] not in _OPTIMIZERS:
        reasons.append(f"optimizer.name: {' and '.join(_OPTIMIZERS)} are written, got {wanted['optimizer.name']}")
    if wanted["schedule.name"] not in _SCHEDULES:
        reasons.append(f"schedule.name: {', '.join(_SCHEDULES)} are written, got {wanted['schedule.name']}")
    return reasons


def files(wanted: Wanted, header: list[str]) -> dict[str, str]:
    header = [
        *header,
        "Not carried over: data (a file of uint32 tokens in TOKENS, else random ones), tokeniser, checkpoints,",
        "evaluation; every parameter decays.",
    ]
    body = resources("modelworks.plan.emit").joinpath("templates/fsdp_train.py.txt").read_text(encoding="utf-8")
    return {
        SCRIPT: comments(header) + "\n" + body,
        SETTINGS: json.dumps(_settings(wanted), indent=2) + "\n",
        FILE: model_json(wanted),
    }


def program(wanted: Wanted) -> tuple[str, str]:
    return SCRIPT, ""


def read(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
    shard, offload = found["dp_shard"], found["cpu_offload"]
    options = {f"optimizer.{key}": value for key, value in found["optimizer_options"].items()}
    return read_model(directory) | {
        "seed": found["seed"],
        "data.seq_len": found["seq_len"],
        "parallel.dp_replicate": found["dp_replicate"],
        "parallel.dp_shard": shard,
        "parallel.zero": 0 if shard == 1 else 3 if found["reshard_after_forward"] else 2,
        "parallel.accumulate_reduce": found["accumulate_reduce"],
        "parallel.offload": "cpu" if offload else "none",
        "parallel.offload_params": offload,
        "parallel.timeout": found["timeout"],
        "train.micro_batch": found["micro_batch"],
        "train.global_batch": found["micro_batch"] * found["micro_batches"] * shard * found["dp_replicate"],
        "train.duration": f"{found['steps']} steps",
        "train.precision": {theirs: ours for ours, theirs in _PRECISIONS.items()}[found["mixed_precision"]],
        "train.recompute": "full" if found["activation_checkpointing"] else "none",
        "train.compile": found["compile"],
        "train.grad_clip": found["grad_clip"],
        "train.grad_clip_norm": found["grad_clip_norm"],
        "optimizer.name": found["optimizer"],
        **options,
        "schedule.name": found["schedule"],
        "schedule.warmup": f"{found['warmup_steps']} steps",
        "schedule.floor": found["floor"],
    }


def _settings(wanted: Wanted) -> dict[str, Any]:
    return {
        "dp_replicate": wanted["parallel.dp_replicate"],
        "dp_shard": wanted["parallel.dp_shard"],
        "reshard_after_forward": wanted["parallel.zero"] == 3,
        "accumulate_reduce": wanted.get("parallel.accumulate_reduce", "last"),
        "cpu_offload": wanted["parallel.offload"] == "cpu",
        "timeout": wanted.get("parallel.timeout", ParallelConfig().timeout),
        "micro_batch": wanted["train.micro_batch"],
        "micro_batches": wanted.micro_batches,
        "seq_len": wanted["data.seq_len"],
        "vocab_size": wanted["model.vocab_size"],
        "mixed_precision": _PRECISIONS[wanted["train.precision"]],
        "activation_checkpointing": wanted["train.recompute"] == "full",
        "compile": wanted["train.compile"],
        "optimizer": wanted["optimizer.name"],
        "optimizer_options": {key: wanted[f"optimizer.{key}"] for key in ("lr", "betas", "eps", "weight_decay")},
        "grad_clip": wanted["train.grad_clip"],
        "grad_clip_norm": wanted.get("train.grad_clip_norm", 2.0),
        "schedule": wanted["schedule.name"],
        "steps": steps_of(wanted.values, "train.duration"),
        "warmup_steps": steps_of(wanted.values, "schedule.warmup"),
        "floor": wanted.get("schedule.floor", 1.0),
        "seed": wanted["seed"],
    }
