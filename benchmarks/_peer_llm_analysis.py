"""Step times by llm-analysis, run by a Python that has it installed (and not Modelworks): JSON in, JSON out.

In: {"efficiency": share of the peak, "rows": [...]}; out: seconds for each row, or a string that says why not.
"""

import json
import logging
import sys

from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_dtype_config_by_name, get_gpu_config_by_name
from llm_analysis.logger import logger

DEVICES = {
    "A100-SXM-40GB": "a100-sxm-40gb",
    "A100-SXM-80GB": "a100-sxm-80gb",
    "H100-SXM-80GB": "h100-sxm-80gb",
    "V100-SXM2-32GB": "v100-sxm-32gb",
}


def main() -> None:
    logger.setLevel(logging.ERROR)
    asked = json.load(sys.stdin)
    json.dump([_predicted(row, asked["efficiency"]) for row in asked["rows"]], sys.stdout)


def _predicted(row: dict, efficiency: float) -> "float | str":
    if row["device"] not in DEVICES:
        return f"no {row['device']}"
    if row["cp"] > 1:
        return "no context parallelism"
    if row["frozen"]:
        return "no frozen weights"
    if row["experts"] and row["sparse"] < row["layers"]:
        return "no layers without experts between those with"
    model = ModelConfig(
        name="row", num_layers=row["layers"], n_head=row["heads"], hidden_dim=row["hidden"], vocab_size=row["vocab"],
        max_seq_len=row["seq"], num_key_value_heads=row["kv_heads"],
        num_key_value_groups=row["heads"] // row["kv_heads"],
        ffn_embed_dim=row["ffn"], expansion_ratio=row["ffn"] / row["hidden"],
        model_type="llama" if row["gated"] else "gpt2",
        moe_num_experts=max(row["experts"], 1), moe_top_k=max(row["top_k"], 1),
    )  # fmt: skip
    parallelism = ParallelismConfig(
        tp_size=row["tp"], pp_size=row["pp"], dp_size=row["dp"], ep_size=row["ep"], sp_size=row["tp"]
    )
    try:
        analysis = LLMAnalysis(
            model,
            get_gpu_config_by_name(DEVICES[row["device"]]),
            get_dtype_config_by_name("w8a8e16" if row["fp8"] else "w16a16e16"),
            parallelism,
            flops_efficiency=efficiency,
        )
        found = analysis.training(
            batch_size_per_gpu=row["micro_batch"],
            gradient_accumulation_steps=row["micro_batches"],
            seq_len=row["seq"],
            activation_recomputation=ActivationRecomputation(row["recompute"]),
            ds_zero=DSZeRO(row["zero"]),
            flash_attn=row["flash"],
            mlp_gated_linear_units=row["gated"],
        )
    except AssertionError as error:
        return "does not fit, by its own count" if "max_batch_size" in str(error) else f"refused: {error}"
    return float(found["latency_per_iter"])


if __name__ == "__main__":
    main()
