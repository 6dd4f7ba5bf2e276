"""Who writes what, on drawn layouts: each element once, by a rank that holds it, in a grid, and evenly shared."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.checkpoint.grid import grid_of
from modelworks.checkpoint.owners import Owners, share_out, whole_shards
from modelworks.config import ModelConfig, ParallelConfig, parameter_shapes
from modelworks.layout import Layout, ShardSpec, plan_parameters


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelConfig, ParallelConfig]:
    """Sizes that no degree divides: shards are uneven, and some are empty."""
    parallel: dict[str, object] = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "pp": draw(st.sampled_from([1, 2])),
        "dp_replicate": draw(st.sampled_from([1, 2, 3])),
        "dp_shard": draw(st.sampled_from([1, 2, 5])),
        "cp": draw(st.sampled_from([1, 2])),
        "sequence_parallel": draw(st.booleans()),
    }
    experts = draw(st.booleans())
    if parallel["dp_shard"] != 1:
        parallel["zero"] = draw(st.sampled_from([1, 2, 3]))
    if experts:
        parallel["ep"] = draw(st.sampled_from([1, 2]))
        if (parallel["dp_replicate"] * parallel["dp_shard"] * parallel["cp"]) % parallel["ep"]:  # type: ignore[operator]
            parallel["ep"] = 1
    if parallel["pp"] != 1:
        parallel["pp_schedule"] = draw(st.sampled_from(["1f1b", "zbv"]))
    model = ModelConfig(
        family="mixtral" if experts else draw(st.sampled_from(["llama", "gpt2", "qwen3"])),
        n_layers=4,
        d_model=8,
        n_heads=4,
        n_kv_heads=draw(st.sampled_from([1, 2, 4])),
        d_ff=draw(st.sampled_from([7, 13])),
        vocab_size=11,
        max_seq_len=7,
        tie_embeddings=draw(st.booleans()),
        **({"n_experts": 4} if experts else {}),
    )
    return model, ParallelConfig(**parallel)


def held_by_all(model: ModelConfig, parallel: ParallelConfig) -> list[dict[str, ShardSpec]]:
    layout = Layout.of(parallel)
    stages = [[0], [1], [2], [3]] if parallel.pp_schedule == "zbv" else [[0, 1], [2, 3]]
    stages = stages if parallel.pp > 1 else [[0, 1, 2, 3]]
    plans = [plan_parameters(model, layout, parallel, rank, stages) for rank in range(layout.world_size)]
    return [{name: plan.stored for name, plan in own.items()} for own in plans]


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([1, 20, 1 << 16]))
def test_each_element_is_written_once_by_a_holder(case: tuple[ModelConfig, ParallelConfig], smallest: int) -> None:
    held = held_by_all(*case)
    writes = share_out(held, smallest)
    shapes = parameter_shapes(case[0])
    counts = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for own, held_here in zip(writes, held, strict=True):
        for name, parts in own.items():
            for part in parts:
                assert part.shape == shapes[name]
                counts[name][part.slices] += 1
                for inner, outer in zip(part.bounds, held_here[name].bounds, strict=True):
                    assert outer[0] <= inner[0] <= inner[1] <= outer[1]
    assert all((count == 1).all() for count in counts.values())
    for name, shape in shapes.items():
        grid_of(shape, [part.bounds for own in writes for part in own.get(name, [])])  # raises where it is none


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_replicas_share_evenly(ranks: int) -> None:
    """An embedding of more than half of all elements, and many tensors too small to cut."""
    shapes = {"embedding": (50_000, 64), "block.0": (64, 2048), "block.1": (64, 2048), "block.2": (2048, 500)}
    shapes |= {f"norm.{index}": (64,) for index in range(20)}
    held = [{name: ShardSpec.whole(name, shape) for name, shape in shapes.items()} for _ in range(ranks)]
    writes = share_out(held, smallest=1000)
    loads = [sum(part.n_local for parts in own.values() for part in parts) for own in writes]
    total = sum(math.prod(shape) for shape in shapes.values())
    assert sum(loads) == total
    assert max(loads) <= 1.15 * total / ranks
    assert share_out(held, smallest=1000) == writes
    n_parts = sum(len(parts) for own in writes for parts in own.values())
    assert n_parts <= len(shapes) + 12 * ranks  # the manifest does not grow beyond need


def test_what_cannot_be_cut_goes_to_the_rank_with_the_least() -> None:
    held = [{f"t{index}": ShardSpec.whole(f"t{index}", (10,)) for index in range(4)} for _ in range(3)]
    held[0]["own"] = ShardSpec.whole("own", (30,))
    writes = share_out(held)
    assert "own" in writes[0]
    assert set(writes[1]) | set(writes[2]) == {"t0", "t1", "t2", "t3"}
    assert len(writes[1]) == len(writes[2]) == 2


def test_empty_tensors_and_scalars_are_listed_once() -> None:
    held = [{"empty": ShardSpec.whole("empty", (0, 4)), "scalar": ShardSpec.whole("scalar", ())} for _ in range(3)]
    writes = share_out(held)
    assert sorted(name for own in writes for name in own) == ["empty", "scalar"]


def test_shards_are_the_parts_of_what_this_rank_holds() -> None:
    spec = ShardSpec("w", (6, 4), ((2, 6), (0, 4)))
    held = [{"w": spec}, {"w": spec}, {"w": ShardSpec("w", (6, 4), ((0, 2), (0, 4)))}]
    whole = torch.arange(24.0).view(6, 4)
    written = torch.zeros(6, 4)
    for rank in range(3):
        owners = Owners(held.__getitem__, rank, 3)
        own = whole[held[rank]["w"].slices]
        for shard in owners.shards("optimizer", {"w/exp_avg": own}):
            assert (shard.section, shard.spec.name, shard.spec.shape) == ("optimizer", "w/exp_avg", (6, 4))
            assert shard.key == "optimizer/w/exp_avg"
            assert torch.equal(shard.tensor, whole[shard.spec.slices])
            written[shard.spec.slices] += shard.tensor
    assert torch.equal(written, whole)


def test_a_state_of_another_shape_is_not_mistaken_for_a_slice() -> None:
    owners = Owners(lambda rank: {"w": ShardSpec.whole("w", (6, 4))}, 0, 1)
    with pytest.raises(ValueError, match=r"optimizer/w/row: shape \(6,\), that of w is \(6, 4\)"):
        owners.shards("optimizer", {"w/row": torch.zeros(6)})
    [row] = whole_shards("optimizer", {"w/row": torch.ones(6)})  # given as what it is
    assert row.spec == ShardSpec.whole("w/row", (6,))


def test_what_neighbours_both_hold_is_written_once() -> None:
    held = [{"w/scales": ShardSpec("w/scales", (7, 4), (rows, (0, 4)))} for rows in [(0, 3), (2, 5), (4, 7)]]
    writes = share_out(held)
    counts = np.zeros((7, 4), dtype=int)
    for specs, own in zip(writes, held, strict=True):
        for spec in specs.get("w/scales", ()):
            (first, last), (start, stop) = own["w/scales"].bounds[0], spec.bounds[0]
            assert first <= start <= stop <= last
            counts[spec.slices] += 1
    assert (counts == 1).all()
    grid_of((7, 4), [spec.bounds for own in writes for spec in own.get("w/scales", [])])  # raises where it is none
