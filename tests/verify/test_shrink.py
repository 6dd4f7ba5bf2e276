"""The small run of a verification is split as the user's is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from modelworks.config import ModelConfig, RunConfig, UserError
from modelworks.layout import check_layout
from modelworks.layout.feasible import layout_problems
from modelworks.layout.pipeline import stage_layers
from modelworks.verify import shrink

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev"]


@st.composite
def runs(draw: Any) -> RunConfig:
    """Runs of published sizes, and layouts of them; not all fit."""
    degree = st.sampled_from([1, 2, 4, 8])
    n_kv_heads, shared = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 16])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    n_layers = draw(st.integers(2, 40))
    model: dict[str, Any] = {
        "n_layers": n_layers,
        "n_heads": n_kv_heads * shared,
        "n_kv_heads": n_kv_heads,
        "head_dim": 64,
        "d_model": draw(st.sampled_from([n_kv_heads * shared * 64, 1024])),
        "d_ff": draw(st.sampled_from([1536, 2816, 1365])),
        "vocab_size": draw(st.sampled_from([32000, 50257, 128256])),
        "max_seq_len": 4096,
        "tie_embeddings": draw(st.booleans()),
        "sliding_window": draw(st.sampled_from([None, 512, 4096])),
    }
    if draw(st.booleans()):
        dense = draw(st.sampled_from([[], [0], [n_layers - 1]]))
        model |= {"family": "mixtral", "n_experts": draw(st.sampled_from([4, 8, 60])), "dense_layers": dense}
        model |= {"d_expert": 768, "experts_per_token": draw(st.integers(1, 4))}
        if not dense:
            model["d_ff"] = 768
    schedule = draw(st.sampled_from(SCHEDULES))
    pp, dp_shard = draw(degree), draw(degree)
    parallel: dict[str, Any] = {
        "tp": draw(degree),
        "cp": draw(st.sampled_from([1, 2, 4])),
        "cp_mode": draw(st.sampled_from(["ring", "ulysses"])),
        "dp_replicate": draw(st.sampled_from([1, 2])),
        "dp_shard": dp_shard,
        "zero": draw(st.sampled_from([1, 2, 3])) if dp_shard > 1 else 0,
        "sequence_parallel": draw(st.booleans()),
        "ep": draw(st.sampled_from([1, 2, 4])) if "n_experts" in model else 1,
    }
    if pp > 1:
        virtual = draw(st.sampled_from([2, 3])) if schedule.startswith("interleaved") else 1
        parallel |= {"pp": pp, "pp_schedule": schedule, "pp_virtual": virtual}
        stages = pp * (2 if schedule in ("zbv", "dualpipev") else virtual)
        if stages <= n_layers and draw(st.booleans()):
            parallel["pp_partition"] = [1] * (stages - 1) + [n_layers - stages + 1]
    return RunConfig.model_validate(
        {
            "model": model,
            "data": {"seq_len": draw(st.sampled_from([1024, 4096])), "tokenizer": "none"},
            "train": {"global_batch": 256},
            "parallel": parallel,
        }
    )


def kept(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """What a layout's code branches on, by name."""
    model, parallel = config.model, config.parallel
    yield "layout", parallel.model_copy(update={"pp_partition": None, "bucket_size": 1, "timeout": 1.0})
    yield "tied", model.tie_embeddings
    for name in ("d_ff", "vocab_size", "d_expert"):
        yield f"{name} divides", getattr(model, name) % parallel.tp == 0
    yield "key heads are copied", max(1, parallel.tp // model.n_kv_heads)
    yield "queries share key heads", model.n_heads > model.n_kv_heads
    yield "one key head for all", model.n_kv_heads == 1 and parallel.tp > 1
    yield "stream as wide as heads", model.d_model == model.d_attention
    window = model.sliding_window
    yield "window", None if window is None else window < config.data.seq_len
    yield "experts", (model.n_experts > 0, model.n_experts > model.experts_per_token, bool(model.n_experts))
    yield "several experts a rank", model.n_experts > parallel.ep
    yield "kinds of layers", {model.has_experts(layer) for layer in range(model.n_layers)}
    stages = [len(layers) for layers in stage_layers(config)]
    yield "several layers on a stage", max(stages) > 1
    yield "stages without layers", [stage for stage, count in enumerate(stages) if count == 0]


@given(runs())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_small_run_is_split_alike(run: RunConfig) -> None:
    assume(not list(layout_problems(run)))
    small = shrink(run)
    check_layout(small)
    RunConfig.model_validate(small.model_dump(by_alias=True))  # and is a run that the user could have written
    assert dict(kept(small)) == dict(kept(run))
    assert small.model.d_model <= 1024
    assert small.model.n_layers <= run.model.n_layers
    assert small.train.global_batch // (run.parallel.dp_replicate * run.parallel.dp_shard) >= 2


@pytest.mark.parametrize(
    ("preset", "parallel"),
    [
        ("llama-3-8b", {"tp": 8}),
        ("mixtral-8x7b", {"dp_shard": 8, "zero": 3, "ep": 8}),
        ("gpt3-175b", {"tp": 8, "pp": 4}),
        ("smollm2-135m", {"tp": 3, "sequence_parallel": False}),
    ],
)
def test_presets_shrink(preset: str, parallel: dict[str, Any]) -> None:
    run = RunConfig.model_validate(
        {"model": preset, "data": {"tokenizer": "none", "seq_len": 1024}, "parallel": parallel}
    )
    small = shrink(run)
    assert dict(kept(small)) == dict(kept(run))
    assert small.model.vocab_size < 100
    assert isinstance(small.model, ModelConfig)


def test_what_does_not_fit_is_refused() -> None:
    run = RunConfig.model_validate(
        {"model": "smollm2-135m", "data": {"tokenizer": "none", "seq_len": 1024}, "parallel": {"tp": 2}}
    )
    with pytest.raises(UserError, match=r"parallel\.tp: got 2, expected a divisor of model\.n_heads = 9"):
        shrink(run)
