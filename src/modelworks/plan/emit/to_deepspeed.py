"""DeepSpeed: `ds_config.json`, and a training script that hands it to `deepspeed.initialize` with transformers' model.

What DeepSpeed can do to a model that it did not write: ZeRO 0-3 with offload, and tensor parallelism of the linear
layers (AutoTP), without sequence parallelism. Its pipelines take a model rewritten as a list of layers, its experts
layers of its own, so neither is written here.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from modelworks.config import ParallelConfig
from modelworks.plan.emit.hugging_face import FILE, model_json, model_refusals, read_model
from modelworks.plan.emit.launch import comments, world_size
from modelworks.plan.emit.settings import Wanted, steps_of

CHECKED_WITH = "deepspeed 0.19.8, torch 2.13.0 and transformers 5.24.0"
SCRIPT, CONFIG, SETTINGS = "train.py", "ds_config.json", "run.json"
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "lamb": "Lamb", "lion": "Lion"}
_SCHEDULES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}
_LEAST_WARMUP = 2  # its schedulers take no less


def refusals(wanted: Wanted) -> list[str]:
    return [*model_refusals(wanted), *_layout_refusals(wanted), *_training_refusals(wanted)]


def files(wanted: Wanted, header: list[str]) -> dict[str, str]:
    header = [
        *header,
        "Not carried over: data (a file of uint32 tokens in TOKENS, else random ones), tokeniser, checkpoints,",
        "evaluation; every parameter decays.",
    ]
    body = resources("modelworks.plan.emit").joinpath("templates/deepspeed_train.py.txt").read_text(encoding="utf-8")
    settings = {
        "seq_len": wanted["data.seq_len"],
        "vocab_size": wanted["model.vocab_size"],
        "steps": steps_of(wanted.values, "train.duration"),
        "seed": wanted["seed"],
        "activation_checkpointing": wanted["train.recompute"] == "full",
        "timeout": wanted.get("parallel.timeout", ParallelConfig().timeout),
    }
    return {
        SCRIPT: comments(header) + "\n" + body,
        CONFIG: json.dumps(_config(wanted), indent=2) + "\n",
        SETTINGS: json.dumps(settings, indent=2) + "\n",
        FILE: model_json(wanted),
    }


def program(wanted: Wanted) -> tuple[str, str]:
    return SCRIPT, ""


def read(directory: Path) -> dict[str, Any]:
    run, found = (json.loads((directory / name).read_text(encoding="utf-8")) for name in (SETTINGS, CONFIG))
    return {
        **read_model(directory),
        **_read_layout(found, world_size(directory)),
        **_read_training(found),
        "seed": run["seed"],
        "data.seq_len": run["seq_len"],
        "train.duration": f"{run['steps']} steps",
        "train.recompute": "full" if run["activation_checkpointing"] else "none",
        "parallel.timeout": run["timeout"],
    }


def _layout_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    zero, tp, offload = wanted["parallel.zero"], wanted["parallel.tp"], wanted["parallel.offload"]
    if wanted["parallel.pp"] > 1:
        reasons.append(
            "parallel.pp: its pipelines take a model rewritten as a list of layers, not transformers'; use pp=1"
        )
    if wanted["parallel.cp"] > 1:
        reasons.append("parallel.cp: its sequence parallelism (Ulysses) needs attention of its own; use cp=1")
    if wanted["parallel.ep"] > 1:
        reasons.append("parallel.ep: its experts are layers of its own, not transformers'; use ep=1")
    if wanted.get("parallel.sequence_parallel"):
        reasons.append("parallel.sequence_parallel: its tensor parallelism has none; use sequence_parallel=false")
    if tp > 1 and zero == 3:
        reasons.append("parallel.zero: its tensor parallelism goes with ZeRO 0 to 2; use zero=2, or tp=1")
    if tp > 1 and wanted["model.n_kv_heads"] % tp:
        reasons.append(f"parallel.tp: it must divide model.n_kv_heads = {wanted['model.n_kv_heads']} there")
    if zero and wanted["parallel.dp_replicate"] > 1:
        reasons.append(
            "parallel.dp_replicate: it shards over all data-parallel ranks (MiCS was removed); use dp_replicate=1"
        )
    reduced, expected = wanted.get("parallel.accumulate_reduce"), "every" if zero > 1 else "last"
    if reduced and reduced != expected:
        reasons.append(f"parallel.accumulate_reduce: with zero={zero} it is {expected} there, got {reduced}")
    if offload != "none" and (zero == 0 or (offload == "nvme" and zero < 3)):
        reasons.append(f"parallel.offload: {offload} goes with ZeRO {'1 to 3' if offload == 'cpu' else '3'} there")
    if offload == "nvme" and wanted["parallel.offload_path"] is None:
        reasons.append("parallel.offload_path: it wants the directory of the files")
    return reasons


def _training_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["train.precision"] == "fp8":
        reasons.append("train.precision: fp8 needs other linear layers than transformers'; use bf16")
    if wanted["train.recompute"] == "selective":
        reasons.append("train.recompute: transformers recomputes whole layers; use full or none")
    if wanted["optimizer.name"] not in _OPTIMIZERS:
        reasons.append(f"optimizer.name: {', '.join(_OPTIMIZERS)} are written, got {wanted['optimizer.name']}")
    if wanted["schedule.name"] not in _SCHEDULES:
        reasons.append(f"schedule.name: {', '.join(_SCHEDULES)} are written, got {wanted['schedule.name']}")
    elif wanted["schedule.name"] == "linear" and wanted["schedule.floor"]:
        reasons.append(f"schedule.floor: its linear schedule falls to 0, got {wanted['schedule.floor']}; use cosine")
    if str(wanted["schedule.warmup"]) in ("0 steps", "1 steps"):
        reasons.append(f"schedule.warmup: its schedules warm up for {_LEAST_WARMUP} steps at least")
    if wanted.get("train.grad_clip_norm", 2.0) != 2.0:
        reasons.append("train.grad_clip_norm: it clips the 2-norm only")
    if wanted["train.precision"] == "fp16" and not math.log2(wanted["train.loss_scale.initial"]).is_integer():
        reasons.append("train.loss_scale.initial: it takes a power of 2")
    return reasons


def _config(wanted: Wanted) -> dict[str, Any]:
    precision, tp = wanted["train.precision"], wanted["parallel.tp"]
    values: dict[str, Any] = {
        "train_batch_size": wanted["train.global_batch"],
        "train_micro_batch_size_per_gpu": wanted["train.micro_batch"],
        "gradient_accumulation_steps": wanted.micro_batches,
        "zero_optimization": _zero(wanted),
        "optimizer": {
            "type": _OPTIMIZERS[wanted["optimizer.name"]],
            "params": {key: wanted[f"optimizer.{key}"] for key in ("lr", "betas", "eps", "weight_decay")},
        },
        "scheduler": _scheduler(wanted),
        "gradient_clipping": wanted["train.grad_clip"] or 0.0,
    }
    if precision == "bf16":
        values["bf16"] = {"enabled": True}
    if precision == "bf16-autocast":
        values["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if precision == "fp16":
        values["fp16"] = {
            "enabled": True,
            "initial_scale_power": int(math.log2(wanted["train.loss_scale.initial"])),
            "loss_scale_window": wanted["train.loss_scale.growth_interval"],
        }
    if tp > 1:
        values["tensor_parallel"] = {"autotp_size": tp}
    if wanted["train.compile"]:
        values["compile"] = {"enabled": True}
    return values


def _zero(wanted: Wanted) -> dict[str, Any]:
    values: dict[str, Any] = {"stage": wanted["parallel.zero"]}
    if (offload := wanted["parallel.offload"]) != "none":
        target: dict[str, Any] = {"device": offload, "pin_memory": True}
        if offload == "nvme":
            target["nvme_path"] = wanted["parallel.offload_path"]
        values["offload_optimizer"] = target
    if wanted["parallel.offload_params"]:
        values["offload_param"] = {"device": "cpu", "pin_memory": True}
    if (size := wanted.get("parallel.bucket_size")) is not None:
        values["reduce_bucket_size"] = size // 4  # elements
    return values


def _scheduler(wanted: Wanted) -> dict[str, Any]:
    warmup, steps = (steps_of(wanted.values, key) for key in ("schedule.warmup", "train.duration"))
    name, rate = wanted["schedule.name"], wanted["optimizer.lr"]
    if name == "cosine":
        params = {
            "total_num_steps": steps,
            "warmup_num_steps": warmup,
            "warmup_min_ratio": 0.0,
            "warmup_type": "linear",
            "cos_min_ratio": wanted["schedule.floor"],
        }
    else:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": warmup, "warmup_type": "linear"}
        params |= {"total_num_steps": steps} if name == "linear" else {}
    return {"type": _SCHEDULES[name], "params": params}


def _read_layout(found: dict[str, Any], world: int) -> dict[str, Any]:
    zero = found["zero_optimization"]
    tp, stage = found.get("tensor_parallel", {}).get("autotp_size", 1), zero["stage"]
    data = world // tp
    shard = data if stage else 1
    offload = zero.get("offload_optimizer", {"device": "none"})
    values = {
        "parallel.tp": tp,
        "parallel.zero": stage,
        "parallel.dp_shard": shard,
        "parallel.dp_replicate": data // shard,
        "parallel.sequence_parallel": False,
        "parallel.accumulate_reduce": "every" if stage > 1 else "last",
        "parallel.offload": offload["device"],
        "parallel.offload_path": offload.get("nvme_path"),
        "parallel.offload_params": "offload_param" in zero,
    }
    return values | ({"parallel.bucket_size": size * 4} if (size := zero.get("reduce_bucket_size")) else {})


def _read_training(found: dict[str, Any]) -> dict[str, Any]:
    precisions = {"bf16": "bf16", "fp16": "fp16", "torch_autocast": "bf16-autocast"}
    schedule, optimizer = found["scheduler"], found["optimizer"]
    name = {theirs: ours for ours, theirs in _SCHEDULES.items()}[schedule["type"]]
    scale = found.get("fp16", {})
    return {
        "train.global_batch": found["train_batch_size"],
        "train.micro_batch": found["train_micro_batch_size_per_gpu"],
        "train.precision": next((ours for key, ours in precisions.items() if key in found), "fp32"),
        "train.grad_clip": found["gradient_clipping"] or None,
        "train.grad_clip_norm": 2.0,
        "train.compile": found.get("compile", {}).get("enabled", False),
        "train.loss_scale.initial": float(2 ** scale.get("initial_scale_power", 0)),
        "train.loss_scale.growth_interval": scale.get("loss_scale_window"),
        "optimizer.name": {theirs: ours for ours, theirs in _OPTIMIZERS.items()}[optimizer["type"]],
        **{f"optimizer.{key}": value for key, value in optimizer["params"].items()},
        "schedule.name": name,
        "schedule.warmup": f"{schedule['params']['warmup_num_steps']} steps",
        "schedule.floor": schedule["params"].get("cos_min_ratio", 0.0),
    }
