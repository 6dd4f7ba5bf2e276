"""Formulas of communication against the closed forms of the literature. That they are what a step sends is tested on
real ranks in `tests/parallel/test_traffic_formulas.py`."""

from __future__ import annotations

from typing import Any

import pytest

from modelworks.config import RunConfig, count_parameters, layer_of, parameter_shapes, presets
from modelworks.layout import Layout, data_parallel_traffic, plan_parameters
from modelworks.layout.pipeline import stage_layers
from modelworks.layout.traffic import figured_layers, step_traffic, traffic_by_cause

ROWS, LENGTH, WIDTH, LAYERS = 16, 64, 32, 4


def run(model: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    shape = {"n_layers": LAYERS, "d_model": WIDTH, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64, "vocab_size": 96}
    return RunConfig.model_validate(
        {
            "model": {**shape, "max_seq_len": LENGTH, **(model or {})},
            "data": {"seq_len": LENGTH, "packing": "across", "tokenizer": "tokenizer.json"},
            "train": {"global_batch": ROWS},
            "parallel": parallel,
        }
    )


def total(config: RunConfig, cause: str, rank: int = 0, rows: tuple[int, ...] = (2, 2)) -> float:
    return sum(volume.bytes for volume in traffic_by_cause(config, rank, rows)[cause].values())


def test_layers_that_figures_are_told_by() -> None:
    for name, model in presets().items():
        if model.n_layers <= 16:  # the same families are there in larger sizes
            assert figured_layers(model) == len(set(map(layer_of, parameter_shapes(model)))), name


def test_one_process_sends_nothing() -> None:
    assert step_traffic(run(), 0, [4, 4]) == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallel_bytes(ranks: int) -> None:
    gradients = 4 * count_parameters(run().model).total
    plain = total(run(dp_replicate=ranks), "data")
    assert plain == pytest.approx(2 * (ranks - 1) / ranks * gradients)
    for zero in (1, 2):
        assert total(run(dp_shard=ranks, zero=zero), "data") == plain
        every = total(run(dp_shard=ranks, zero=zero, accumulate_reduce="every"), "data")
        assert every == pytest.approx(plain * 1.5)  # two micro-batches: twice the reduction, one gathering
    assert total(run(dp_replicate=ranks, accumulate_reduce="every"), "data") == pytest.approx(2 * plain)
    once = total(run(dp_shard=ranks, zero=3), "data", rows=(4,))
    assert 1.4 * plain < once < 1.5 * plain  # what lies outside the blocks is gathered once, not twice


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [False, True])
def test_counted_out_it_is_the_formula(zero: int, every: bool) -> None:
    how = "every" if every else "last"
    sharded = {"dp_shard": 2, "zero": zero} if zero else {}
    config = run({"tie_embeddings": True}, dp_replicate=2, tp=2, accumulate_reduce=how, **sharded)
    layout = Layout.of(config.parallel)
    for rank in range(layout.world_size):
        plans = plan_parameters(config.model, layout, config.parallel, rank, stage_layers(config))
        formula = data_parallel_traffic(plans, layout, rank, zero=zero, accumulate=how, micro_batches=3)
        counted = traffic_by_cause(config, rank, [1, 1, 1])["data"]
        assert {key: volume.bytes for key, volume in counted.items()} == pytest.approx(formula)


def test_smaller_buckets_send_the_same_in_more_calls() -> None:
    large, small = (
        traffic_by_cause(run(dp_replicate=2, bucket_size=size), 0, [4])["data"]["data", "all_reduce"]
        for size in (10**9, 2000)
    )
    assert large.calls == 1 < small.calls
    assert large.bytes == small.bytes


def test_sequence_parallelism_sends_what_plain_tensor_parallelism_sends() -> None:
    stream = 4 * 2 * LENGTH * WIDTH
    plain = total(run(tp=4, sequence_parallel=False), "tensor", rows=(2,))
    # Two all-reduces a layer forward and two backward, and one each for the embedding and after the final norm.
    assert plain == pytest.approx((4 * LAYERS + 2) * 2 * 3 / 4 * stream)
    # The embedding and the final norm now each communicate in both directions, but half as much in each.
    assert total(run(tp=4), "tensor", rows=(2,)) == pytest.approx(plain)


def test_each_pipeline_edge_carries_the_stream_both_ways() -> None:
    stream = 4 * 2 * LENGTH * WIDTH
    sent = [traffic_by_cause(run(pp=4), rank, [2] * 8)["pipeline"]["pp", "send"] for rank in range(4)]
    assert [(volume.calls, volume.bytes) for volume in sent] == [
        (8, 8 * stream), (16, 16 * stream), (16, 16 * stream), (8, 8 * stream)
    ]  # fmt: skip


def test_ring_and_ulysses() -> None:
    keys = 2 * 4 * 2 * (LENGTH // 2) * 2 * (WIDTH // 4)
    queries = 4 * 2 * (LENGTH // 2) * WIDTH
    assert total(run(cp=2), "context", rows=(2,)) == LAYERS * 3 * keys
    assert total(run(cp=2, cp_mode="ulysses"), "context", rows=(2,)) == LAYERS * (2 * queries + keys)


def test_experts_send_what_their_tokens_choose() -> None:
    moe = {"family": "mixtral", "n_experts": 4, "experts_per_token": 2}
    config = run(moe, dp_replicate=2, ep=2)
    chosen = 2 * LENGTH * 2  # of one micro-batch
    counts = LAYERS * 4 * 8 / 2
    assert total(config, "experts", rows=(2,)) == LAYERS * 4 * chosen / 2 * WIDTH * 4 + counts
    # All of a rank's tokens go to the other's experts, whose tokens stay there.
    sent = step_traffic(config, 0, [2], routed=(LAYERS * chosen, 0))["ep", "all_to_all"]
    assert sent.bytes == LAYERS * 2 * chosen * WIDTH * 4 + counts


def test_what_keeps_ranks_in_step_is_a_few_scalars() -> None:
    control = traffic_by_cause(run(dp_replicate=2, tp=2), 0, [2])["control"]
    assert control["world", "all_reduce"].calls == 3
    assert sum(volume.bytes for volume in control.values()) < 100 + 1.5 * 8 * (LAYERS + 3)  # norms of layers
