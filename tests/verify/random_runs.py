"""Hypothesis-drawn runs: a layout of a few ranks and the settings of model, step and precision that it may touch."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from modelworks.config import RunConfig, UserError
from modelworks.layout import check_layout
from modelworks.verify import shrink

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral")
SPLIT_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
VIRTUAL = {"interleaved": 2, "interleaved-zb": 2}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev")


@st.composite
def small_runs(draw: Any, most_ranks: int) -> RunConfig:
    """A run of at most `most_ranks` ranks and more than one, which its layout fits, made small."""
    family = draw(st.sampled_from(FAMILIES))
    # one choice among all splits: lists of axes would come out short and alike
    halvings = range(1, most_ranks.bit_length())
    splits = [axes for n in halvings for axes in combinations_with_replacement(SPLIT_AXES, n)]
    degrees = draw(st.sampled_from(splits))
    parallel: dict[str, Any] = {axis: 2 ** degrees.count(axis) for axis in degrees}
    if "dp_shard" in parallel:
        parallel["zero"] = draw(st.integers(1, 3))
    if "pp" in parallel:
        parallel["pp_schedule"] = schedule = draw(st.sampled_from(SCHEDULES))
        parallel["pp_virtual"] = VIRTUAL.get(schedule, 1)
        parallel["pp_gather"] = draw(st.sampled_from(["step", "micro-batch"]))
    parallel["accumulate_reduce"] = draw(st.sampled_from(["last", "every"]))
    parallel["sequence_parallel"] = draw(st.booleans())
    parallel["cp_mode"] = draw(st.sampled_from(["ring", "ulysses"]))
    model: dict[str, Any] = {
        "family": family,
        "n_layers": draw(st.sampled_from([5, 8])),
        "n_heads": 8,
        "n_kv_heads": draw(st.sampled_from([8, 4, 2, 1])) if family != "gpt2" else 8,
        "head_dim": 64,
        "d_model": draw(st.sampled_from([512, 320])),
        "d_ff": draw(st.sampled_from([512, 513])),
        "vocab_size": draw(st.sampled_from([1000, 1001])),
        "max_seq_len": 256,
        "tie_embeddings": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "sliding_window": draw(st.sampled_from([None, 64])),
        "norm_position": draw(st.sampled_from(["pre", "pre", "post"])),
    }
    if family == "mixtral":
        parallel["ep"] = draw(st.sampled_from([1, 2, 4]))
        model |= {
            "n_experts": 8,
            "experts_per_token": draw(st.integers(1, 3)),
            "router_aux_loss": draw(st.sampled_from([0.0, 0.01])),
            "router_z_loss": draw(st.sampled_from([0.0, 0.001])),
            "router_bias": draw(st.booleans()),
            "router_normalize": draw(st.booleans()),
            "expert_capacity": draw(st.sampled_from([None, 1.0])),
        }
    run = RunConfig.model_validate(
        {
            "seed": draw(st.integers(0, 1000)),
            "model": model,
            "data": {
                "seq_len": 256,
                "tokenizer": "none",
                "packing": draw(st.sampled_from(["within-document", "across"])),
            },
            "train": {
                "global_batch": 64,
                "grad_clip": draw(st.sampled_from([None, 0.1])),
                "grad_clip_norm": draw(st.sampled_from([1.0, 2.0, 3.0, "inf"])),
                "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
                "z_loss": draw(st.sampled_from([0.0, 1e-3])),
                "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            },
            "optimizer": {"lr": 1e-3},
            "parallel": parallel,
        }
    )
    try:
        check_layout(run)
    except UserError:
        assume(False)
    return shrink(run)
