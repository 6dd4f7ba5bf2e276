"""What does not fit is named, and the layouts that are offered instead do fit."""

from __future__ import annotations

from typing import Any

import pytest

from modelworks.config import ParallelConfig, RunConfig, UserError
from modelworks.layout import Layout, check_layout, nearest_layouts, shrink_layout


def config(model: dict[str, Any] | None = None, batch: int = 8, **parallel: Any) -> RunConfig:
    shape = {"n_layers": 6, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 300, "max_seq_len": 64}
    return RunConfig.model_validate(
        {
            "model": shape | (model or {}),
            "data": {"seq_len": 32, "tokenizer": {"vocab_size": 300}},
            "train": {"global_batch": batch},
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (config(tp=3), r"parallel\.tp: got 3, expected a divisor of model\.n_heads = 4"),
        (config(dp_replicate=3), r"train\.global_batch: 8 rows cannot be shared by dp_replicate \* dp_shard = 3"),
        (config(dp_shard=2), r"parallel\.zero: got 0, expected 1, 2 or 3 with dp_shard=2"),
        (config(zero=1), r"parallel\.zero: got 1, expected 0 with dp_shard=1"),
        (config(cp=3), r"data\.seq_len: got 32, expected a multiple of 2 \* cp .* = 6"),
        (config(cp=4, cp_mode="ulysses"), r"parallel\.cp: got 4 with cp_mode ulysses"),
        (config(pp=9), r"parallel\.pp: 9 stages for 6 layers, expected at most 8"),
        (config(pp=2, pp_schedule="interleaved"), r"parallel\.pp_virtual: got 1, expected at least 2"),
        (config(pp=2, pp_virtual=2), r"parallel\.pp_virtual: got 2, expected 1 with pp_schedule 1f1b"),
        (config(pp=2, pp_partition=[3, 2]), r"parallel\.pp_partition: got \[3, 2\] \(2 stages, 5 layers\)"),
        (config(pp_schedule="zbv"), r"parallel\.pp_schedule: got zbv, expected 1f1b \(the default\) with pp=1"),
        (config(dp_replicate=2, ep=2), r"parallel\.ep: got 2, expected 1: this model has no experts"),
        (config({"attention_dropout": 0.1}, cp=2), r"model\.attention_dropout: .* expected 0 with cp > 1"),
    ],
)
def test_refused(run: RunConfig, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        check_layout(run)
    offered = str(error.value).partition("nearest layouts that work: ")[2].split(", or ")
    assert offered
    for text in offered:
        text, _, fewer = text.partition(" (")
        degrees = dict(part.split("=") for part in text.split() if "=" in part)
        parallel = ParallelConfig(**{key: int(value) for key, value in degrees.items()})
        wanted = int(fewer.split()[0]) if fewer else Layout.of(run.parallel).world_size
        assert Layout.of(parallel).world_size == wanted
        check_layout(run.model_copy(update={"parallel": parallel}))


def test_the_number_of_processes_must_agree() -> None:
    with pytest.raises(UserError, match=r"tp=2 needs 2 processes .* and there are 4; nearest .*dp_replicate=2 tp=2"):
        check_layout(config(tp=2), world_size=4)
    check_layout(config(tp=2, dp_shard=2, zero=3), world_size=4)


def test_the_nearest_layout_keeps_what_it_can() -> None:
    near = nearest_layouts(config(tp=4, dp_shard=2, zero=2, pp=1), 8)
    assert near[0] == "dp_shard=2 tp=4 zero=2"
    assert all("zero=2" in text or "dp_shard" not in text for text in near)


MIXTRAL = {"family": "mixtral", "n_experts": 4, "experts_per_token": 2}


@pytest.mark.parametrize(
    ("asked", "world_size", "expected"),
    [
        (config(dp_replicate=4), 2, Layout(dp_replicate=2)),
        (config(dp_replicate=4), 3, Layout(dp_replicate=2)),  # eight rows: three ranks cannot share them
        (config(dp_replicate=2, dp_shard=2, zero=3), 2, Layout(dp_shard=2)),  # shards, so that it still fits
        (config(dp_shard=4, zero=2), 2, Layout(dp_shard=2)),
        (config(dp_shard=4, zero=2), 1, Layout()),
        (config(dp_replicate=4, tp=2), 4, Layout(dp_replicate=2, tp=2)),
        (config(dp_replicate=4, tp=2), 3, Layout(tp=2)),
        (config(dp_replicate=2, pp=2), 3, Layout(pp=2)),
        (config(dp_replicate=2, cp=2), 2, Layout(cp=2)),
        (config(MIXTRAL, dp_replicate=8, ep=4), 4, Layout(dp_replicate=4, ep=4)),
        (config(MIXTRAL, dp_replicate=4, ep=4), 2, Layout(dp_replicate=2, ep=2)),
    ],
)
def test_a_run_that_lost_ranks_keeps_what_the_model_needs(asked: RunConfig, world_size: int, expected: Layout) -> None:
    smaller = shrink_layout(asked, world_size)
    assert Layout.of(smaller) == expected
    check_layout(asked.model_copy(update={"parallel": smaller}), expected.world_size)
    kept = {key: getattr(asked.parallel, key) for key in ("zero",) if smaller.dp_shard > 1}
    assert all(getattr(smaller, key) == value for key, value in kept.items())


def test_where_the_model_parallel_degrees_do_not_fit_they_give_way() -> None:
    smaller = shrink_layout(config(tp=2, pp=2, pp_schedule="interleaved", pp_virtual=2), 2)
    assert Layout.of(smaller).world_size == 2
    check_layout(config(**smaller.model_dump()), 2)


def test_where_nothing_fits_it_is_said() -> None:
    """Shards in host memory exist with zero 3 alone, and one process has no shards."""
    with pytest.raises(UserError, match="no layout of 1 processes or fewer fits this run, which asks for dp_shard=2"):
        shrink_layout(config(dp_shard=2, zero=3, offload_params=True), 1)
