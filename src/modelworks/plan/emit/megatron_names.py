"""What Megatron-LM calls the keys of a run description and their values, for writing and for reading."""

from __future__ import annotations

ARGUMENTS = "megatron.args"
MODEL = {
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
EXPERTS = {
    "--num-experts": "n_experts",
    "--moe-router-topk": "experts_per_token",
    "--moe-ffn-hidden-size": "d_expert",
    "--moe-aux-loss-coeff": "router_aux_loss",
    "--moe-z-loss-coeff": "router_z_loss",
}
DEGREES = {
    "--tensor-model-parallel-size": "tp",
    "--context-parallel-size": "cp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
}
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
FEED_FORWARDS = ("swiglu", "gelu", "gelu_tanh")
PRECISIONS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp8": ["--bf16", "--fp8-format", "hybrid"],
}
CONTEXT = {"ring": "p2p", "ulysses": "a2a"}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# q, k, v; output; feed-forward -> the arguments
BIASES: dict[tuple[bool, bool, bool], list[str]] = {
    (False, False, False): ["--disable-bias-linear"],
    (True, False, False): ["--disable-bias-linear", "--add-qkv-bias"],
    (True, True, True): [],
}
