"""What Megatron-Core makes of emitted arguments: `python megatron_sees.py DIRECTORY WORLD ...`.

The wheel of megatron-core has the configuration classes, not Megatron-LM's argument parser. So each argument is taken
for the field of its name, as `core_transformer_config_from_args` does, with the few that it translates written out
below; then `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig` are made, whose own checks run.
An argument that is neither a field nor listed fails the check.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from telling import tell_each

# Arguments of the training program, not of the core's classes; read in its parser.
OF_TRAINING = [
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_warmup_iters",
    "seed",
    "eval_iters",
    "tokenizer_type",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "mock_data",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "ckpt_format",
    "use_megatron_fsdp",
    "distributed_timeout_minutes",
    "ddp_bucket_size",
    "group_query_attention",
    "transformer_impl",
    "num_distributed_optimizer_instances",
    "use_distributed_optimizer",
    "expert_tensor_parallel_size",
    "initial_loss_scale",
    "loss_scale_window",
]
RENAMED = {
    "num_experts": "num_moe_experts",
    "norm_epsilon": "layernorm_epsilon",
    "clip_grad": "clip_grad",
    "fp8_format": "fp8",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
}
SWITCHES: dict[str, dict[str, Any]] = {
    "disable_bias_linear": {"add_bias_linear": False},
    "swiglu": {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
    "no_bias_gelu_fusion": {"bias_activation_fusion": False},
}


def main(directory: str, world: int) -> dict[str, Any]:
    lines = (Path(directory) / "megatron.args").read_text().splitlines()
    split = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    found = {name.removeprefix("--").replace("-", "_"): value for name, _, value in split}
    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = [{field.name: str(field.type) for field in dataclasses.fields(each)} for each in classes]
    chosen: list[dict[str, Any]] = [{}, {}, {}]
    for name, text in found.items():
        target = RENAMED.get(name, name)
        if name in SWITCHES:
            chosen[0] |= SWITCHES[name]
            continue
        homes = [index for index, known in enumerate(fields) if target in known]
        if not homes and name not in OF_TRAINING:
            raise SystemExit(f"--{name} is no argument that we know, and no field of the core's classes")
        for index in homes:
            chosen[index][target] = value_of(text, name)
    dtype = torch.bfloat16 if "bf16" in found else torch.float16 if "fp16" in found else torch.float32
    chosen[0] |= {"pipeline_dtype": dtype, "params_dtype": dtype}
    if chosen[0].get("pipeline_model_parallel_layout"):
        stages = len(str(chosen[0]["pipeline_model_parallel_layout"]).split("|"))
        virtual = stages // int(found["pipeline_model_parallel_size"])
        chosen[0]["virtual_pipeline_model_parallel_size"] = virtual if virtual > 1 else None
        chosen[0]["overlap_p2p_comm"], chosen[0]["batch_p2p_comm"] = virtual > 1, virtual == 1
    if "add_bias_linear" not in chosen[0] and "swiglu" not in found:
        chosen[0]["add_qkv_bias"] = True
    core = TransformerConfig(**chosen[0])
    optimizer, ddp = OptimizerConfig(**chosen[1]), DistributedDataParallelConfig(**chosen[2])
    return seen(found, core, optimizer, ddp, world)


def value_of(text: str, name: str) -> Any:
    if text == "":
        return True
    if name == "moe_layer_freq":
        return json.loads(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def seen(found: dict[str, str], core: Any, optimizer: Any, ddp: Any, world: int) -> dict[str, Any]:
    pp = core.pipeline_model_parallel_size
    data = world // (core.tensor_model_parallel_size * core.context_parallel_size * pp)
    strategy = {"no_shard": 0, "optim_grads": 2, "optim_grads_params": 3}[ddp.data_parallel_sharding_strategy]
    zero = strategy or int(optimizer.use_distributed_optimizer)
    assert optimizer.decoupled_weight_decay
    values = {
        "model.n_layers": core.num_layers,
        "model.d_model": core.hidden_size,
        "model.n_heads": core.num_attention_heads,
        "model.n_kv_heads": core.num_query_groups,
        "model.head_dim": core.kv_channels,
        "model.norm": {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}[core.normalization],
        "model.norm_eps": core.layernorm_epsilon,
        "model.qk_norm": core.qk_layernorm,
        "model.init_std": core.init_method_std,
        "model.dropout": core.hidden_dropout,
        "model.attention_dropout": core.attention_dropout,
        "model.attention_bias": core.add_bias_linear or core.add_qkv_bias,
        "model.feed_forward_bias": core.add_bias_linear,
        "model.vocab_size": NullTokenizer(found["vocab_size"]).vocab_size,
        "parallel.tp": core.tensor_model_parallel_size,
        "parallel.cp": core.context_parallel_size,
        "parallel.pp": pp,
        "parallel.ep": core.expert_model_parallel_size,
        "parallel.zero": zero,
        "data_ranks": data,
        "train.recompute": core.recompute_granularity or "none",
        "train.precision": "fp8" if core.fp8 else "bf16" if core.bf16 else "fp16" if core.fp16 else "fp32",
        "train.grad_clip": optimizer.clip_grad or None,
        "optimizer.lr": optimizer.lr,
        "optimizer.betas": [optimizer.adam_beta1, optimizer.adam_beta2],
        "optimizer.eps": optimizer.adam_eps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "parallel.offload": "cpu" if optimizer.optimizer_cpu_offload else "none",
    }
    if core.num_moe_experts is None:
        values["model.d_ff"] = core.ffn_hidden_size
    else:
        values |= {
            "model.n_experts": core.num_moe_experts,
            "model.experts_per_token": core.moe_router_topk,
            "model.d_expert": core.moe_ffn_hidden_size,
            "model.router_aux_loss": core.moe_aux_loss_coeff,
            "model.router_z_loss": core.moe_z_loss_coeff,
            "model.router_normalize": not core.moe_router_pre_softmax,
        }
    if core.tensor_model_parallel_size > 1:
        values["parallel.sequence_parallel"] = core.sequence_parallel
    if pp > 1:
        layout = core.pipeline_model_parallel_layout
        layout.validate_layer_layout(core.num_layers, 0)
        virtual = layout.virtual_pipeline_model_parallel_size
        counts = [layout.layout[rank][v].count(LayerType.decoder) for v in range(virtual) for rank in range(pp)]
        values |= {"parallel.pp_partition": counts, "parallel.pp_virtual": virtual}
    return values


if __name__ == "__main__":
    tell_each(main)
