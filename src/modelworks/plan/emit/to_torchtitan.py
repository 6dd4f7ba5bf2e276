"""torchtitan: a module of Python with a config function, which is what it takes since it left TOML.

The settings are literals under torchtitan's own names at the top of the file; the rest of it builds the model from
torchtitan's blocks. torchtitan shards with FSDP2, so there is no ZeRO-1: what it shards, it shards wholly, and keeps
the parameters gathered until the backward pass (zero 2) or not (zero 3).
"""

from __future__ import annotations

import ast
from importlib.resources import files as resources
from pathlib import Path
from pprint import pformat
from typing import Any

from modelworks.plan.emit.launch import comments
from modelworks.plan.emit.settings import Wanted, steps_of

CHECKED_WITH = "torchtitan 0.3.0 and torch 2.13.0"
MODULE = "modelworks_layout"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_NAMES = {"n_layers": "n_layers", "dim": "d_model", "n_heads": "n_heads", "n_kv_heads": "n_kv_heads"}
_NAMES |= {"head_dim": "head_dim", "vocab_size": "vocab_size", "enable_weight_tying": "tie_embeddings"}
_NAMES |= {"norm_eps": "norm_eps", "init_std": "init_std", "qk_norm": "qk_norm"}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
_DEGREES = {
    "data_parallel_replicate_degree": "dp_replicate",
    "data_parallel_shard_degree": "dp_shard",
    "tensor_parallel_degree": "tp",
    "context_parallel_degree": "cp",
    "pipeline_parallel_degree": "pp",
    "expert_parallel_degree": "ep",
}
_HEAD = """
import os
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
    register_moe_load_balancing_hook,
)
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

"""


def refusals(wanted: Wanted) -> list[str]:
    return [*_model_refusals(wanted), *_layout_refusals(wanted), *_training_refusals(wanted)]


def files(wanted: Wanted, header: list[str]) -> dict[str, str]:
    header = [
        *header,
        "Not carried over: data (DATASET, c4 by default), tokeniser (HF_ASSETS), checkpoints, evaluation; every",
        "parameter decays. The model is built from torchtitan's Qwen3 blocks, with or without their norms of heads.",
    ]
    literals = "\n".join(f"{name} = {pformat(value, width=110)}" for name, value in _constants(wanted).items())
    body = resources("modelworks.plan.emit").joinpath("templates/torchtitan_layout.py.txt").read_text(encoding="utf-8")
    return {f"{MODULE}.py": comments(header) + _HEAD + literals + "\n" + body}


def program(wanted: Wanted) -> tuple[str, str]:
    prelude = 'export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"\n'
    return f"-m torchtitan.train --module {MODULE} --config train", prelude


def read(directory: Path) -> dict[str, Any]:
    tree = ast.parse((directory / f"{MODULE}.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    found = {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}  # type: ignore[attr-defined]
    return {**_read_model(found), **_read_layout(found), **_read_training(found)}


def _model_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    expected = {"norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rope"}
    for key, value in expected.items():
        if wanted[f"model.{key}"] != value:
            reasons.append(f"model.{key}: its decoders have {value} only, got {wanted[f'model.{key}']}")
    scaling = wanted.get("model.rope_scaling")
    if scaling and scaling["type"] != "llama3":
        reasons.append(f"model.rope_scaling: of the scalings only llama3 is written, got {scaling['type']}")
    if wanted["model.n_experts"]:
        if not wanted["model.router_bias"] or wanted["model.router_aux_loss"]:
            reasons.append(
                "model.router_aux_loss: it balances experts by a bias on the router, without a loss; "
                "set model.router_bias=true and model.router_aux_loss=0"
            )
        if wanted["parallel.tp"] > 1:
            reasons.append("parallel.tp: its expert groups take over the tensor-parallel ranks; use tp=1 with experts")
        if (wanted["parallel.dp_shard"] * wanted["parallel.cp"]) % wanted["parallel.ep"]:
            reasons.append("parallel.ep: its expert groups lie inside one replica: ep must divide dp_shard * cp")
    return reasons


def _layout_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    pp, zero, virtual = wanted["parallel.pp"], wanted["parallel.zero"], wanted.get("parallel.pp_virtual", 1)
    if wanted["model.n_kv_heads"] % wanted["parallel.tp"]:
        reasons.append(f"parallel.tp: it must divide model.n_kv_heads = {wanted['model.n_kv_heads']} there")
    if zero == 1:
        reasons.append("parallel.zero: it shards gradients with the optimiser state (FSDP2); use zero=2 or zero=3")
    if zero == 2 and pp > 1:
        reasons.append("parallel.zero: with pp it shards parameters too; use zero=3 with pp_gather=step")
    if wanted.get("parallel.accumulate_reduce") == "last" and pp == 1:
        reasons.append("parallel.accumulate_reduce: it reduces the gradients of every micro-batch; use every")
    if wanted.get("parallel.accumulate_reduce") == "every" and pp > 1:
        reasons.append("parallel.accumulate_reduce: under a pipeline it reduces gradients once; use last")
    if wanted.get("parallel.cp_mode") == "ulysses":
        reasons.append("parallel.cp_mode: its context parallelism splits the sequence, not heads; use ring")
    if wanted["parallel.offload"] != "none" and not (
        wanted["parallel.offload"] == "cpu" and wanted["parallel.offload_params"]
    ):
        reasons.append("parallel.offload: all or nothing: use offload=cpu with offload_params=true (zero 3), or none")
    if pp == 1:
        return reasons
    schedule, count = wanted["parallel.pp_schedule"], wanted.micro_batches
    if schedule not in SCHEDULES:
        reasons.append(f"parallel.pp_schedule: torch has no {schedule}; it has {', '.join(SCHEDULES)}")
    if schedule in ("interleaved", "interleaved-zb") and count % max(1, count // pp):
        reasons.append(
            f"train.micro_batch: {schedule} in torch goes in rounds of pp={pp}; {count} micro-batches do not"
        )
    if schedule == "dualpipev" and count < pp * virtual:
        reasons.append(f"parallel.pp_schedule: dualpipev needs {pp * virtual} micro-batches at least, got {count}")
    if wanted["model.tie_embeddings"]:
        reasons.append("model.tie_embeddings: stages do not share weights there; use pp=1, or untie")
    return reasons


def _training_refusals(wanted: Wanted) -> list[str]:
    reasons = []
    if wanted["train.precision"] not in ("bf16", "fp32"):
        reasons.append(
            f"train.precision: bf16 (over fp32 shards) and fp32 are written, got {wanted['train.precision']}"
        )
    if wanted["optimizer.name"] not in _OPTIMIZERS:
        reasons.append(f"optimizer.name: {' and '.join(_OPTIMIZERS)} are written, got {wanted['optimizer.name']}")
    if wanted["schedule.name"] not in ("cosine", "linear", "constant"):
        reasons.append(f"schedule.name: cosine, linear and constant are written, got {wanted['schedule.name']}")
    if wanted["train.grad_clip"] is None:
        reasons.append("train.grad_clip: it always clips; set a large value")
    if wanted.get("train.grad_clip_norm", 2.0) != 2.0:
        reasons.append("train.grad_clip_norm: it clips the 2-norm only")
    return reasons


def _constants(wanted: Wanted) -> dict[str, Any]:
    experts = None
    if wanted["model.n_experts"]:
        experts = {
            "num_experts": wanted["model.n_experts"],
            "top_k": wanted["model.experts_per_token"],
            "hidden_dim": wanted["model.d_expert"],
            "route_norm": wanted["model.router_normalize"],
            "load_balance_coeff": wanted["model.router_bias_rate"],
            "dense_layers": wanted["model.dense_layers"],
        }
    scaling = wanted["model.rope_scaling"]
    rope = {"dim": wanted["model.head_dim"], "max_seq_len": wanted["model.max_seq_len"]}
    rope["theta"] = wanted["model.rope_theta"]
    if scaling:
        rope |= {"scaling": "llama", "scaling_factor": scaling["factor"]}
        rope |= {key: scaling[key] for key in ("low_freq_factor", "high_freq_factor")}
        rope["original_max_position_embeddings"] = scaling["original_max_seq_len"]
    steps, constant = steps_of(wanted.values, "train.duration"), wanted["schedule.name"] == "constant"
    decay = {"decay_ratio": 0.0} if constant else {"decay_type": wanted["schedule.name"]}
    return {
        "MODEL": {theirs: wanted[f"model.{ours}"] for theirs, ours in _NAMES.items()}
        | {"hidden_dim": wanted.get("model.d_ff", wanted.get("model.d_expert"))},
        "ROPE": rope,
        "EXPERTS": experts,
        "PARALLELISM": _parallelism(wanted),
        "TRAINING": {
            "seq_len": wanted["data.seq_len"],
            "steps": steps,
            "local_batch_size": _local_batch(wanted),
            "global_batch_size": wanted["train.global_batch"],
            "max_norm": wanted["train.grad_clip"],
            "dtype": "float32",
            "mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[wanted["train.precision"]],
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": wanted["parallel.offload"] == "cpu",
            "disable_cuda_graphs": True,
        },
        "RECOMPUTE": wanted["train.recompute"],
        "COMPILE": {"enable": wanted["train.compile"]},
        "OPTIMIZER_NAME": _OPTIMIZERS[wanted["optimizer.name"]],
        "OPTIMIZER": {key: _tuple(wanted[f"optimizer.{key}"]) for key in ("lr", "betas", "eps", "weight_decay")},
        "SCHEDULE": {
            "warmup_steps": steps_of(wanted.values, "schedule.warmup"),
            "min_lr_factor": wanted.get("schedule.floor", 1.0),
            **decay,
        },
        "COMM": {"train_timeout_seconds": int(wanted["parallel.timeout"])} if wanted.get("parallel.timeout") else {},
        "DEBUG": {"seed": wanted["seed"]},
    }


def _parallelism(wanted: Wanted) -> dict[str, Any]:
    values: dict[str, Any] = {theirs: wanted[f"parallel.{ours}"] for theirs, ours in _DEGREES.items()}
    values["enable_sequence_parallel"] = wanted.get("parallel.sequence_parallel", True)
    zero, gather = wanted["parallel.zero"], wanted.get("parallel.pp_gather", "micro-batch")
    values["fsdp_reshard_after_forward"] = "always" if zero == 3 and gather == "micro-batch" else "never"
    if wanted["parallel.cp"] > 1:
        values["context_parallel_load_balancer"] = "headtail"
    if wanted["parallel.pp"] > 1:
        values["pipeline_parallel_schedule"] = SCHEDULES[wanted["parallel.pp_schedule"]]
        values["pipeline_parallel_microbatch_size"] = wanted["train.micro_batch"]
        values["module_fqns_per_model_part"] = _parts(wanted["parallel.pp_partition"])
    return values


def _parts(counts: list[int]) -> list[list[str]]:
    """The modules of each stage; the embedding goes with the first, norm and head with the last."""
    parts, layer = [], 0
    for count in counts:
        parts.append([f"layers.{number}" for number in range(layer, layer + count)])
        layer += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _local_batch(wanted: Wanted) -> int:
    """Rows of a rank in one call: of a micro-batch, or of all that go through the pipeline."""
    rows: int = wanted["train.micro_batch"]
    return rows * wanted.micro_batches if wanted["parallel.pp"] > 1 else rows


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _read_model(found: dict[str, Any]) -> dict[str, Any]:
    model, rope, experts = found["MODEL"], found["ROPE"], found["EXPERTS"]
    values = {f"model.{ours}": model[theirs] for theirs, ours in _NAMES.items()}
    values |= {"model.norm": "rmsnorm", "model.feed_forward": "swiglu", "model.positions": "rope"}
    values |= {"model.d_ff": model["hidden_dim"], "model.max_seq_len": rope["max_seq_len"]}
    values["model.rope_theta"] = rope["theta"]
    if rope.get("scaling") == "llama":
        values["model.rope_scaling"] = {
            "type": "llama3",
            "factor": rope["scaling_factor"],
            "original_max_seq_len": rope["original_max_position_embeddings"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
        }
    if experts:
        values |= {"model.router_bias": True, "model.router_bias_rate": experts["load_balance_coeff"]}
        values |= {"model.n_experts": experts["num_experts"], "model.experts_per_token": experts["top_k"]}
        values |= {"model.d_expert": experts["hidden_dim"], "model.dense_layers": experts["dense_layers"]}
        values["model.router_normalize"] = experts["route_norm"]
    return values


def _read_layout(found: dict[str, Any]) -> dict[str, Any]:
    split, training = found["PARALLELISM"], found["TRAINING"]
    values: dict[str, Any] = {f"parallel.{ours}": split[theirs] for theirs, ours in _DEGREES.items()}
    pp, shards, gathered = values["parallel.pp"], values["parallel.dp_shard"], split["fsdp_reshard_after_forward"]
    values["parallel.sequence_parallel"] = split["enable_sequence_parallel"]
    values["parallel.zero"] = 0 if shards == 1 else 2 if gathered == "never" and pp == 1 else 3
    values["parallel.pp_gather"] = "step" if gathered == "never" else "micro-batch"
    values["parallel.accumulate_reduce"] = "every" if pp == 1 else "last"
    values["parallel.cp_mode"] = "ring"
    offloaded = training["enable_cpu_offload"]
    values |= {"parallel.offload": "cpu" if offloaded else "none", "parallel.offload_params": offloaded}
    if timeout := found["COMM"].get("train_timeout_seconds"):
        values["parallel.timeout"] = float(timeout)
    values["train.micro_batch"] = training["local_batch_size"]
    if pp > 1:
        parts = split["module_fqns_per_model_part"]
        values["parallel.pp_partition"] = [sum(name.startswith("layers.") for name in part) for part in parts]
        values["parallel.pp_virtual"] = len(parts) // pp
        theirs = {name: ours for ours, name in SCHEDULES.items()}
        values["parallel.pp_schedule"] = theirs[split["pipeline_parallel_schedule"]]
        values["train.micro_batch"] = split["pipeline_parallel_microbatch_size"]
    return values


def _read_training(found: dict[str, Any]) -> dict[str, Any]:
    training, schedule = found["TRAINING"], found["SCHEDULE"]
    optimizer = {name: ours for ours, name in _OPTIMIZERS.items()}[found["OPTIMIZER_NAME"]]
    values = {f"optimizer.{key}": list(value) if key == "betas" else value for key, value in found["OPTIMIZER"].items()}
    return values | {
        "seed": found["DEBUG"]["seed"],
        "data.seq_len": training["seq_len"],
        "train.duration": f"{training['steps']} steps",
        "train.global_batch": training["global_batch_size"],
        "train.precision": {"bfloat16": "bf16", "float32": "fp32"}[training["mixed_precision_param"]],
        "train.grad_clip": training["max_norm"],
        "train.grad_clip_norm": 2.0,
        "train.recompute": found["RECOMPUTE"],
        "train.compile": found["COMPILE"]["enable"],
        "optimizer.name": optimizer,
        "schedule.name": schedule.get("decay_type", "constant"),
        "schedule.warmup": f"{schedule['warmup_steps']} steps",
        "schedule.floor": schedule["min_lr_factor"],
    }
