"""Megatron-LM: the arguments of `pretrain_gpt.py`, one a line, and scripts that hand them over.

Zero 1 is its distributed optimiser, zero 2 and 3 are Megatron-FSDP. Stages of any size, and virtual ones, are written
as a pipeline layout ("Ett|tt|tL": embedding, layers, loss). Its own tokeniser of numbers and mock data stand in for
data, so that the files run as they are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from modelworks.plan.emit.launch import comments, world_size
from modelworks.plan.emit.settings import Wanted, steps_of

CHECKED_WITH = "megatron-core 0.16.1 (its configuration classes) and the arguments of Megatron-LM before 0.16"
ARGUMENTS = "megatron.args"
_MODEL = {
    "--num-layers": "n_layers",
    "--hidden-size": "d_model",
    "--num-attention-heads": "n_heads",
    "--num-query-groups": "n_kv_heads",
    "--kv-channels": "head_dim",
    "--max-position-embeddings": "max_seq_len",
    "--norm-epsilon": "norm_eps",
    "--init-method-std": "init_std",
    "--hidden-dropout": "dropout",
    "--attention-dropout": "attention_dropout",
}
_EXPERTS = {
    "--num-experts": "n_experts",
    "--moe-router-topk": "experts_per_token",
    "--moe-ffn-hidden-size": "d_expert",
    "--moe-aux-loss-coeff": "router_aux_loss",
    "--moe-z-loss-coeff": "router_z_loss",
}
_DEGREES = {
    "--tensor-model-parallel-size": "tp",
    "--context-parallel-size": "cp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
}
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
_FEED_FORWARDS = ("swiglu", "gelu", "gelu_tanh")
_PRECISIONS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format", "hybrid"],
}
_CONTEXT = {"ring": "p2p", "ulysses": "a2a"}
_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# q, k, v; output; feed-forward -> the arguments
_BIASES: dict[tuple[bool, bool, bool], list[str]] = {
    (False, False, False): ["--disable-bias-linear"],
    (True, False, False): ["--disable-bias-linear", "--add-qkv-bias"],
    (True, True, True): [],
}
_STYLES = ("cosine", "linear", "constant")


def refusals(wanted: Wanted) -> list[str]:
    return [*_model_refusals(wanted), *_layout_refusals(wanted), *_training_refusals(wanted)]


def files(wanted: Wanted, header: list[str]) -> dict[str, str]:
    header = [
        *header,
        "Not carried over: data (mock data stand in for it), tokeniser, checkpoints, evaluation. Biases and norms do",
        "not decay, embeddings do. Recompute selective is Megatron's own: the core of attention.",
    ]
    arguments = [*_model(wanted), *_layout(wanted), *_training(wanted)]
    lines = [" ".join(map(str, argument)) for argument in arguments]
    return {ARGUMENTS: comments(header) + "\n".join(lines) + "\n"}


def program(wanted: Wanted) -> tuple[str, str]:
    # tensor and context parallelism want one queue before Blackwell; FSDP wants more
    queues = 1 if wanted["parallel.zero"] < 2 else 8
    prelude = (
        f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}\n"
        f"mapfile -t arguments < <(grep -v '^#' {ARGUMENTS} | tr ' ' '\\n')\n"
    )
    return '"${MEGATRON_LM:?set it to a checkout of Megatron-LM}/pretrain_gpt.py" "${arguments[@]}"', prelude


def read(directory: Path) -> dict[str, Any]:
    found = arguments_of(directory)
    return {**_read_model(found), **_read_layout(found, world_size(directory)), **_read_training(found)}


def arguments_of(directory: Path) -> dict[str, str]:
    """Argument -> its value, "" for one that takes none."""
    lines = (directory / ARGUMENTS).read_text(encoding="utf-8").splitlines()
    split = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in split}


def _model_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["model.feed_forward"] not in _FEED_FORWARDS:
        reasons.append(
            f"model.feed_forward: {', '.join(_FEED_FORWARDS)} are written, got {wanted['model.feed_forward']}"
        )
    if _biases(wanted) not in _BIASES:
        reasons.append("model: biases on q, k and v alone, on all linear layers or on none can be said there")
    if wanted["model.feed_forward"] == "gelu_tanh" and not wanted["model.feed_forward_bias"]:
        reasons.append("model.feed_forward: gelu_tanh comes with its fused bias there; use gelu, or feed_forward_bias")
    theta = wanted.get("model.rope_theta", 0)
    if theta != int(theta):
        reasons.append(f"model.rope_theta: it takes a whole number, got {theta}")
    scaling = wanted.get("model.rope_scaling")
    fixed = {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 8192}
    if scaling and any(scaling[key] != value for key, value in fixed.items()):
        reasons.append("model.rope_scaling: only llama3 with its factors 1 and 4 from 8192 positions can be said there")
    if wanted["model.n_experts"]:
        if wanted["model.router_bias"]:
            reasons.append("model.router_bias: it goes with sigmoid scores there, and ours are a softmax's")
        if wanted["model.expert_capacity"] is not None:
            reasons.append("model.expert_capacity: its capacity is of a micro-batch, ours of a sequence; use null")
        if wanted["train.precision"] == "fp16":
            reasons.append("train.precision: its experts do not run in fp16; use bf16")
    return reasons


def _layout_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    zero, pp, replicas = wanted["parallel.zero"], wanted["parallel.pp"], wanted["parallel.dp_replicate"]
    if zero > 1 and (pp > 1 or replicas > 1):
        reasons.append(f"parallel.zero: {zero} (Megatron-FSDP) is written for pp=1 and dp_replicate=1; use zero=1")
    reduced = wanted.get("parallel.accumulate_reduce")
    if reduced and reduced != ("every" if zero > 1 else "last"):
        expected = "every" if zero > 1 else "last"
        reasons.append(f"parallel.accumulate_reduce: with zero={zero} it is {expected} there, got {reduced}")
    if wanted["parallel.offload"] == "nvme" or (wanted["parallel.offload"] == "cpu" and zero != 1):
        reasons.append("parallel.offload: optimiser state goes to the host with its distributed optimiser only: zero=1")
    if wanted["parallel.offload"] == "cpu" and wanted["train.precision"] == "fp32":
        reasons.append("parallel.offload: its offloaded optimiser needs bf16")
    if pp == 1:
        return reasons
    schedule, count = wanted["parallel.pp_schedule"], wanted.micro_batches
    if schedule not in ("1f1b", "interleaved"):
        reasons.append(f"parallel.pp_schedule: it has 1f1b and interleaved, got {schedule}")
    if schedule == "interleaved" and count % pp:
        reasons.append(f"train.micro_batch: interleaved goes in groups of pp={pp}; {count} micro-batches do not")
    return reasons


def _training_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["train.precision"] not in _PRECISIONS:
        reasons.append(f"train.precision: {', '.join(_PRECISIONS)} can be said there, got {wanted['train.precision']}")
    if wanted["optimizer.name"] != "adamw":
        reasons.append(f"optimizer.name: adamw is written, got {wanted['optimizer.name']}")
    if wanted["schedule.name"] not in _STYLES:
        reasons.append(f"schedule.name: {', '.join(_STYLES)} are written, got {wanted['schedule.name']}")
    if wanted.get("train.grad_clip_norm", 2.0) != 2.0:
        reasons.append("train.grad_clip_norm: it clips the 2-norm only")
    return reasons


def _model(wanted: Wanted) -> list[tuple[Any, ...]]:
    arguments: list[tuple[Any, ...]] = [(name, wanted[f"model.{key}"]) for name, key in _MODEL.items()]
    arguments += [
        ("--group-query-attention",),
        ("--ffn-hidden-size", wanted.get("model.d_ff", wanted.get("model.d_expert"))),
        ("--normalization", _NORMS[wanted["model.norm"]]),
        ("--position-embedding-type", _POSITIONS[wanted["model.positions"]]),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", wanted["model.vocab_size"] - 1),  # it adds the end of a document
        ("--make-vocab-size-divisible-by", 1),
        ("--mock-data",),
        *((name,) for name in _BIASES[_biases(wanted)]),
    ]
    feed_forward, scaling = wanted["model.feed_forward"], wanted.get("model.rope_scaling")
    arguments += [("--swiglu",)] if feed_forward == "swiglu" else []
    arguments += [("--no-bias-gelu-fusion",)] if feed_forward == "gelu" else []
    arguments += [] if wanted["model.tie_embeddings"] else [("--untie-embeddings-and-output-weights",)]
    arguments += [("--qk-layernorm",)] if wanted["model.qk_norm"] else []
    arguments += [("--rotary-base", int(wanted["model.rope_theta"]))] if wanted["model.positions"] == "rope" else []
    arguments += [("--use-rope-scaling",), ("--rope-scaling-factor", scaling["factor"])] if scaling else []
    if wanted["model.n_experts"]:
        dense = wanted["model.dense_layers"]
        pattern = ",".join(str(int(layer not in dense)) for layer in range(wanted["model.n_layers"]))
        arguments += [(name, wanted[f"model.{key}"]) for name, key in _EXPERTS.items()]
        arguments += [
            ("--moe-layer-freq", f"[{pattern}]"),
            ("--moe-router-load-balancing-type", "seq_aux_loss"),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
        arguments += [] if wanted["model.router_normalize"] else [("--moe-router-pre-softmax",)]
        arguments += [("--moe-grouped-gemm",)] if wanted["train.precision"] != "fp32" else []
    return arguments


def _layout(wanted: Wanted) -> list[tuple[Any, ...]]:
    arguments: list[tuple[Any, ...]] = [(name, wanted[f"parallel.{key}"]) for name, key in _DEGREES.items()]
    zero = wanted["parallel.zero"]
    if wanted.get("parallel.sequence_parallel"):
        arguments.append(("--sequence-parallel",))
    if wanted["parallel.cp"] > 1:
        arguments.append(("--cp-comm-type", _CONTEXT[wanted["parallel.cp_mode"]]))
    if wanted["model.n_experts"]:
        arguments.append(("--expert-tensor-parallel-size", wanted["parallel.tp"]))
    if wanted["parallel.pp"] > 1:
        arguments.append(("--pipeline-model-parallel-layout", _stages(wanted["parallel.pp_partition"])))
    arguments.append(("--overlap-grad-reduce",))
    if zero:
        arguments += [("--use-distributed-optimizer",), ("--overlap-param-gather",)]
    if zero == 1:
        # whole replicas of the optimiser's shards: its instances
        arguments.append(("--num-distributed-optimizer-instances", wanted["parallel.dp_replicate"]))
    if zero in _SHARDING:
        arguments += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", _SHARDING[zero]),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    if wanted["parallel.offload"] == "cpu":
        arguments += [
            ("--optimizer-cpu-offload",),
            ("--optimizer-offload-fraction", 1.0),
            ("--use-precision-aware-optimizer",),
        ]
    if (size := wanted.get("parallel.bucket_size")) is not None:
        arguments.append(("--ddp-bucket-size", size // 4))  # elements, in fp32
    if (timeout := wanted.get("parallel.timeout")) is not None:
        arguments.append(("--distributed-timeout-minutes", math.ceil(timeout / 60)))
    return arguments


def _training(wanted: Wanted) -> list[tuple[Any, ...]]:
    rate, clip = wanted["optimizer.lr"], wanted["train.grad_clip"]
    first, second = wanted["optimizer.betas"]
    recompute: dict[str, list[tuple[Any, ...]]] = {
        "none": [],
        "selective": [("--recompute-granularity", "selective")],
        "full": [
            ("--recompute-granularity", "full"),
            ("--recompute-method", "uniform"),
            ("--recompute-num-layers", 1),
        ],
    }
    precision = _PRECISIONS[wanted["train.precision"]]
    steps = steps_of(wanted.values, "train.duration")
    arguments: list[tuple[Any, ...]] = [
        ("--seq-length", wanted["data.seq_len"]),
        ("--micro-batch-size", wanted["train.micro_batch"]),
        ("--global-batch-size", wanted["train.global_batch"]),
        ("--train-iters", steps),
        *recompute[wanted["train.recompute"]],
        *([tuple(precision[:1])] if precision else []),
        *([tuple(precision[1:])] if precision[1:] else []),
        ("--optimizer", "adam"),
        ("--lr", rate),
        ("--min-lr", rate * wanted.get("schedule.floor", 1.0)),
        ("--lr-decay-style", wanted["schedule.name"]),
        ("--lr-decay-iters", steps),
        ("--lr-warmup-iters", steps_of(wanted.values, "schedule.warmup")),
        ("--adam-beta1", first),
        ("--adam-beta2", second),
        ("--adam-eps", wanted["optimizer.eps"]),
        ("--weight-decay", wanted["optimizer.weight_decay"]),
        ("--clip-grad", 0.0 if clip is None else clip),
        ("--seed", wanted["seed"]),
        ("--eval-iters", 0),
        ("--transformer-impl", "transformer_engine"),
    ]
    if wanted["train.precision"] == "fp16":
        arguments += [
            ("--initial-loss-scale", wanted["train.loss_scale.initial"]),
            ("--loss-scale-window", wanted["train.loss_scale.growth_interval"]),
        ]
    return arguments


def _stages(counts: list[int]) -> str:
    """`Ett|tt|tL`: embedding, layers, loss; virtual stages follow each other in the order that a token meets them."""
    parts = ["t" * count for count in counts]
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)


def _biases(wanted: Wanted) -> tuple[bool, bool, bool]:
    return tuple(wanted[f"model.{key}_bias"] for key in ("attention", "attention_output", "feed_forward"))


def _read_model(found: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {f"model.{key}": _number(found[name]) for name, key in _MODEL.items()}
    given = ["--disable-bias-linear" in found, "--add-qkv-bias" in found]
    biases = next(
        key for key, names in _BIASES.items() if [name in names for name in _BIASES[True, False, False]] == given
    )
    values |= {
        f"model.{key}_bias": value
        for key, value in zip(("attention", "attention_output", "feed_forward"), biases, strict=True)
    }
    gelu = "gelu" if "--no-bias-gelu-fusion" in found else "gelu_tanh"
    values |= {
        "model.d_ff": int(found["--ffn-hidden-size"]),
        "model.norm": _inverse(_NORMS)[found["--normalization"]],
        "model.positions": _inverse(_POSITIONS)[found["--position-embedding-type"]],
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
        values |= {f"model.{key}": _number(found[name]) for name, key in _EXPERTS.items()}
        pattern = found["--moe-layer-freq"].strip("[]").split(",")
        values["model.dense_layers"] = [layer for layer, kind in enumerate(pattern) if kind == "0"]
        values["model.router_normalize"] = "--moe-router-pre-softmax" not in found
    return values


def _read_layout(found: dict[str, str], world: int) -> dict[str, Any]:
    values: dict[str, Any] = {f"parallel.{key}": int(found[name]) for name, key in _DEGREES.items()}
    data = world // (values["parallel.tp"] * values["parallel.cp"] * values["parallel.pp"])
    strategy = found.get("--data-parallel-sharding-strategy")
    zero = _inverse(_SHARDING)[strategy] if strategy else int("--use-distributed-optimizer" in found)
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
        values["parallel.cp_mode"] = _inverse(_CONTEXT)[context]
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
    precision = next(key for key, names in _PRECISIONS.items() if [n for n in names if n.startswith("--")] == given)
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
