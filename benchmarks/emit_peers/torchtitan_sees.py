"""What torchtitan makes of emitted files: `python torchtitan_sees.py DIRECTORY WORLD ...`.

torchtitan's own parser reads the module; its model is built without memory, its mesh sizes and stages are worked out.
Prints our keys with the values that its objects hold, as JSON.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from telling import tell_each


def main(directory: str, world: int) -> dict[str, Any]:
    sys.path.insert(0, directory)
    sys.modules.pop("modelworks_layout", None)  # that of the layout before
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    config = ConfigManager().parse_args(["--module", "modelworks_layout", "--config", "train"])
    spec = config.model_spec.model
    limit = spec.layers[0].attention.rope.max_seq_len  # `update_from_config` sets it to the sequence's length
    spec.update_from_config(config=config)
    split, training = config.parallelism, config.training
    dims = ParallelDims.from_config(split, world)
    with torch.device("meta"):
        model = spec.build()
    attention, rope = spec.layers[0].attention, spec.layers[0].attention.rope
    group = config.optimizer.param_groups[0]
    kind = {FullAC.Config: "full", SelectiveAC.Config: "selective", type(None): "none"}
    seen = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model.n_layers": len(spec.layers),
        "model.d_model": spec.dim,
        "model.vocab_size": spec.vocab_size,
        "model.tie_embeddings": spec.enable_weight_tying,
        "model.n_heads": attention.n_heads,
        "model.n_kv_heads": attention.n_kv_heads,
        "model.head_dim": attention.head_dim,
        "model.qk_norm": attention.qk_norm is not None,
        "model.norm_eps": spec.norm.eps,
        "model.rope_theta": rope.theta,
        "model.max_seq_len": limit,
        "data.seq_len": training.seq_len,
        "train.global_batch": training.global_batch_size,
        "train.duration": f"{training.steps} steps",
        "train.grad_clip": training.max_norm,
        "train.recompute": kind[type(config.activation_checkpoint)],
        "train.precision": {"bfloat16": "bf16", "float32": "fp32"}[training.mixed_precision_param],
        "optimizer.name": group.optimizer_name.lower(),
        "schedule.warmup": f"{config.lr_scheduler.warmup_steps} steps",
        "schedule.floor": config.lr_scheduler.min_lr_factor,
        "seed": config.debug.seed,
        "parallel.ep": dims.ep,
        **{f"parallel.{axis}": getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")},
        **{
            f"optimizer.{key}": list(value) if isinstance(value, tuple) else value
            for key, value in group.optimizer_kwargs.items()
        },
    }
    if dims.tp > 1:
        seen["parallel.sequence_parallel"] = split.enable_sequence_parallel
    rows = training.local_batch_size
    if dims.pp > 1:
        parts = split.module_fqns_per_model_part
        names = {name for name, _ in model.named_children()} | {f"layers.{layer}" for layer in range(len(spec.layers))}
        assert {name for part in parts for name in part} <= names
        placed = [name for part in parts for name in part if "." in name]
        assert placed == [f"layers.{layer}" for layer in range(len(spec.layers))]
        schedule = get_schedule_class(split.pipeline_parallel_schedule)
        ours = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b", "ScheduleInterleaved1F1B": "interleaved"}
        ours |= {"ScheduleInterleavedZeroBubble": "interleaved-zb", "ScheduleZBVZeroBubble": "zbv"}
        ours |= {"ScheduleDualPipeV": "dualpipev"}
        rows = split.pipeline_parallel_microbatch_size
        seen["parallel.pp_partition"] = [sum("." in name for name in part) for part in parts]
        seen["parallel.pp_virtual"] = len(parts) // dims.pp
        seen["parallel.pp_schedule"] = ours[schedule.__name__]
    seen["train.micro_batch"] = rows
    moe = next((layer.moe for layer in spec.layers if layer.moe is not None), None)
    if moe is not None:
        seen |= {
            "model.n_experts": moe.num_experts,
            "model.experts_per_token": moe.router.top_k,
            "model.d_expert": moe.routed_experts.inner_experts.hidden_dim,
            "model.dense_layers": [n for n, layer in enumerate(spec.layers) if layer.moe is None],
            "model.router_normalize": moe.router.route_norm,
            "model.router_bias_rate": moe.load_balance_coeff,
        }
    else:
        seen["model.d_ff"] = spec.layers[0].feed_forward.w1.out_features
    return seen


if __name__ == "__main__":
    tell_each(main)
