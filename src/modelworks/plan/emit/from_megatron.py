"""Reads the arguments that `to_megatron` writes back into the config's own keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelworks.plan.emit.launch import world_size
from modelworks.plan.emit.megatron_names import (
    ARGUMENTS,
    BIASES,
    CONTEXT,
    DEGREES,
    EXPERTS,
    MODEL,
    NORMS,
    POSITIONS,
    PRECISIONS,
    SHARDING,
)


def read(directory: Path) -> dict[str, Any]:
    found = arguments_of(directory)
    return {**_read_model(found), **_read_layout(found, world_size(directory)), **_read_training(found)}


def arguments_of(directory: Path) -> dict[str, str]:
    """Argument -> its value, "" for one that takes none."""
    lines = (directory / ARGUMENTS).read_text(encoding="utf-8").splitlines()
    split = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in split}


def _read_model(found: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {f"model.{key}": _number(found[name]) for name, key in MODEL.items()}
    given = ["--disable-bias-linear" in found, "--add-qkv-bias" in found]
    biases = next(
        key for key, names in BIASES.items() if [name in names for name in BIASES[True, False, False]] == given
    )
    values |= {
        f"model.{key}_bias": value
        for key, value in zip(("attention", "attention_output", "feed_forward"), biases, strict=True)
    }
    gelu = "gelu" if "--no-bias-gelu-fusion" in found else "gelu_tanh"
    values |= {
        "model.d_ff": int(found["--ffn-hidden-size"]),
        "model.norm": _inverse(NORMS)[found["--normalization"]],
        "model.positions": _inverse(POSITIONS)[found["--position-embedding-type"]],
        "model.vocab_size": int(found["--vocab-size"]) + 1,
        "model.feed_forward": "swiglu" if "--swiglu" in found else gelu,
        "model.tie_embeddings": "--untie-embeddings-and-output-weights" not in found,
        "model.qk_norm": "--qk-layernorm" in found,
        "model.rope_theta": float(found.get("--rotary-base", 10_000)),
    }
    if "--use-rope-scaling" in found:
        plain = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
        values["model.rope_scaling"] = {"type": "llama3", "factor": float(found["--rope-scaling-factor"]), **plain}
    if "--num-experts" in found:
        values |= {f"model.{key}": _number(found[name]) for name, key in EXPERTS.items()}
        pattern = found["--moe-layer-freq"].strip("[]").split(",")
        values["model.dense_layers"] = [layer for layer, kind in enumerate(pattern) if kind == "0"]
        values["model.router_normalize"] = "--moe-router-pre-softmax" not in found
    return values


def _read_layout(found: dict[str, str], world: int) -> dict[str, Any]:
    values: dict[str, Any] = {f"parallel.{key}": int(found[name]) for name, key in DEGREES.items()}
    data = world // (values["parallel.tp"] * values["parallel.cp"] * values["parallel.pp"])
    strategy = found.get("--data-parallel-sharding-strategy")
    zero = _inverse(SHARDING)[strategy] if strategy else int("--use-distributed-optimizer" in found)
    replicas = int(found.get("--num-distributed-optimizer-instances", 1)) if zero else data
    values |= {
        "parallel.zero": zero,
        "parallel.dp_replicate": replicas,
        "parallel.dp_shard": data // replicas,
        "parallel.sequence_parallel": "--sequence-parallel" in found,
        "parallel.accumulate_reduce": "every" if zero > 1 else "last",
        "parallel.offload": "cpu" if "--optimizer-cpu-offload" in found else "none",
    }
    if context := found.get("--cp-comm-type"):
        values["parallel.cp_mode"] = _inverse(CONTEXT)[context]
    if stages := found.get("--pipeline-model-parallel-layout"):
        counts = [part.count("t") for part in stages.split("|")]
        virtual = len(counts) // values["parallel.pp"]
        values |= {"parallel.pp_partition": counts, "parallel.pp_virtual": virtual}
        values["parallel.pp_schedule"] = "interleaved" if virtual > 1 else "1f1b"
    if size := found.get("--ddp-bucket-size"):
        values["parallel.bucket_size"] = int(size) * 4
    if minutes := found.get("--distributed-timeout-minutes"):
        values["parallel.timeout"] = int(minutes) * 60.0
    return values


def _read_training(found: dict[str, str]) -> dict[str, Any]:
    given = [name for name in ("--bf16", "--fp16", "--fp8-format") if name in found]
    precision = next(key for key, names in PRECISIONS.items() if [n for n in names if n.startswith("--")] == given)
    rate, least, clip = (float(found[name]) for name in ("--lr", "--min-lr", "--clip-grad"))
    return {
        "seed": int(found["--seed"]),
        "data.seq_len": int(found["--seq-length"]),
        "train.micro_batch": int(found["--micro-batch-size"]),
        "train.global_batch": int(found["--global-batch-size"]),
        "train.duration": f"{found['--train-iters']} steps",
        "train.precision": precision,
        "train.recompute": found.get("--recompute-granularity", "none"),
        "train.grad_clip": clip or None,
        "train.grad_clip_norm": 2.0,
        "train.loss_scale.initial": float(found.get("--initial-loss-scale", 0)),
        "train.loss_scale.growth_interval": int(found.get("--loss-scale-window", 0)),
        "optimizer.name": "adamw",
        "optimizer.lr": rate,
        "optimizer.betas": [float(found[name]) for name in ("--adam-beta1", "--adam-beta2")],
        "optimizer.eps": float(found["--adam-eps"]),
        "optimizer.weight_decay": float(found["--weight-decay"]),
        "schedule.name": found["--lr-decay-style"],
        "schedule.warmup": f"{found['--lr-warmup-iters']} steps",
        "schedule.floor": float(f"{least / rate:.12g}") if rate else 0.0,
    }


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _inverse(table: dict[Any, Any]) -> dict[Any, Any]:
    return {value: key for key, value in table.items()}
