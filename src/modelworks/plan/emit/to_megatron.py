"""Megatron-LM: the arguments of `pretrain_gpt.py`, one a line, and scripts that hand them over.

Zero 1 is its distributed optimiser, zero 2 and 3 are Megatron-FSDP. Stages of any size, and virtual ones, are written
as a pipeline layout ("Ett|tt|tL": embedding, layers, loss). Its own tokeniser of numbers and mock data stand in for
data, so that the files run as they are.
"""

from __future__ import annotations

import math
from typing import Any

from modelworks.plan.emit.from_megatron import read as read
from modelworks.plan.emit.launch import comments
from modelworks.plan.emit.megatron_names import (
    ARGUMENTS,
    BIASES,
    CONTEXT,
    DEGREES,
    EXPERTS,
    FEED_FORWARDS,
    MODEL,
    NORMS,
    POSITIONS,
    PRECISIONS,
    SHARDING,
)
from modelworks.plan.emit.settings import Wanted, steps_of

CHECKED_WITH = "megatron-core 0.16.1 (its configuration classes) and the arguments of Megatron-LM before 0.16"
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


def _model_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["model.feed_forward"] not in FEED_FORWARDS:
        reasons.append(
            f"model.feed_forward: {', '.join(FEED_FORWARDS)} are written, got {wanted['model.feed_forward']}"
        )
    if _biases(wanted) not in BIASES:
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
    if wanted["train.precision"] not in PRECISIONS:
        reasons.append(f"train.precision: {', '.join(PRECISIONS)} can be said there, got {wanted['train.precision']}")
    if wanted["optimizer.name"] != "adamw":
        reasons.append(f"optimizer.name: adamw is written, got {wanted['optimizer.name']}")
    if wanted["schedule.name"] not in _STYLES:
        reasons.append(f"schedule.name: {', '.join(_STYLES)} are written, got {wanted['schedule.name']}")
    if wanted.get("train.grad_clip_norm", 2.0) != 2.0:
        reasons.append("train.grad_clip_norm: it clips the 2-norm only")
    return reasons


def _model(wanted: Wanted) -> list[tuple[Any, ...]]:
    arguments: list[tuple[Any, ...]] = [(name, wanted[f"model.{key}"]) for name, key in MODEL.items()]
    arguments += [
        ("--group-query-attention",),
        ("--ffn-hidden-size", wanted.get("model.d_ff", wanted.get("model.d_expert"))),
        ("--normalization", NORMS[wanted["model.norm"]]),
        ("--position-embedding-type", POSITIONS[wanted["model.positions"]]),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", wanted["model.vocab_size"] - 1),  # it adds the end of a document
        ("--make-vocab-size-divisible-by", 1),
        ("--mock-data",),
        *((name,) for name in BIASES[_biases(wanted)]),
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
        arguments += [(name, wanted[f"model.{key}"]) for name, key in EXPERTS.items()]
        arguments += [
            ("--moe-layer-freq", f"[{pattern}]"),
            ("--moe-router-load-balancing-type", "seq_aux_loss"),
            ("--moe-token-dispatcher-type", "alltoall"),
        ]
        arguments += [] if wanted["model.router_normalize"] else [("--moe-router-pre-softmax",)]
        arguments += [("--moe-grouped-gemm",)] if wanted["train.precision"] != "fp32" else []
    return arguments


def _layout(wanted: Wanted) -> list[tuple[Any, ...]]:
    arguments: list[tuple[Any, ...]] = [(name, wanted[f"parallel.{key}"]) for name, key in DEGREES.items()]
    zero = wanted["parallel.zero"]
    if wanted.get("parallel.sequence_parallel"):
        arguments.append(("--sequence-parallel",))
    if wanted["parallel.cp"] > 1:
        arguments.append(("--cp-comm-type", CONTEXT[wanted["parallel.cp_mode"]]))
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
    if zero in SHARDING:
        arguments += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", SHARDING[zero]),
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
    precision = PRECISIONS[wanted["train.precision"]]
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
