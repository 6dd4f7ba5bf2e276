"""8-bit moments: the tables, the nearest code, and codes that no cut of a tensor changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.layout import ShardSpec, n_tiles, tile_grid, tile_shape, tiles_of
from modelworks.optim.codec import Blocks, SharedTiles, dequantize, dynamic_map, nearest_codes, quantize


def test_the_tables_have_256_values_and_are_those_of_bitsandbytes() -> None:
    # Figures printed by bitsandbytes 0.50.2, functional.create_dynamic_map, whose tables these equal bit for bit.
    for signed, least, smallest, total in [(True, -0.9929687, 5.5e-7, 1.0), (False, 0.0, 3.25e-7, 75.1053)]:
        table = dynamic_map(signed)
        assert table.unique().numel() == 256
        assert torch.equal(table, table.sort().values)
        torch.testing.assert_close(table[0], torch.tensor(least))
        torch.testing.assert_close(table[table > 0][0], torch.tensor(smallest))
        torch.testing.assert_close(table.double().sum(), torch.tensor(total, dtype=torch.float64), rtol=1e-5, atol=1e-3)


def test_the_code_is_that_of_the_nearest_value() -> None:
    generator = torch.Generator().manual_seed(0)
    for signed in (True, False):
        table = dynamic_map(signed)
        between = (table[1:].double() + table[:-1].double()).div(2).float()
        near = [torch.nextafter(between, torch.full_like(between, far)) for far in (-2.0, 2.0)]
        spread = torch.rand(20_000, generator=generator) * 10 ** (-9 * torch.rand(20_000, generator=generator))
        values = torch.cat([table, between, *near, spread, -spread, torch.tensor([0.0, -0.0, 1e-40, -1e-40])])
        values = values.clamp(-1.0 if signed else 0.0, 1.0)
        distance = (values[:, None].double() - table.double()).abs()
        chosen = distance.gather(1, nearest_codes(values, signed).long()[:, None])[:, 0]
        # Float32 cannot tell the two values beside a limit apart by more than its own rounding.
        assert (chosen - distance.min(1).values <= 2.4e-7 * values.abs().double()).all()


def test_codes_and_scales_are_those_of_bitsandbytes() -> None:
    # Printed by bitsandbytes 0.50.2 on CPU: quantize_blockwise(values, code=create_dynamic_map(True), blocksize=256).
    # All but one of the 512: its CPU kernel makes 131 (2e-5) of the first value, which is 0 and has a code of its own.
    values = torch.sin(torch.arange(512, dtype=torch.float64) ** 1.5).float() * torch.linspace(1e-4, 1, 512)
    codes, scales = quantize(values.view(1, 512), signed=True)
    torch.testing.assert_close(scales.flatten(), torch.tensor([0.49140289425849915, 0.9802857041358948]))
    theirs = [131, 62, 162, 45, 177, 212, 209, 43, 49, 41, 199, 206, 35, 220, 238, 4]
    assert codes.flatten()[0] == 127
    assert codes.flatten()[::32].tolist()[1:] == theirs[1:]
    assert int(codes.long().sum()) == 67182 - 131 + 127


def test_errors_by_magnitude() -> None:
    values = torch.logspace(-5, 0, 4096)
    back = dequantize(*quantize(values.view(1, -1).expand(1, -1).contiguous(), signed=True), signed=True).flatten()
    assert ((back - values).abs() / values)[-256:].max() < 0.034  # one block, all within its largest decade


def test_tile_shapes() -> None:
    assert tile_shape((128, 4096)) == (1, 256)
    assert tile_shape((4096, 64)) == (4, 64)
    assert tile_shape((512, 384)) == (2, 128)
    assert tile_shape((5000,)) == (1, 256)
    assert tile_grid((3, 512, 384)) == (3, 256, 3)
    assert tile_grid((5000,)) == (20,)
    assert tile_grid(()) == ()
    assert n_tiles((512, 384)) == 512 * 384 // 256
    assert n_tiles((5000,)) == 20


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ShardSpec]]:
    """A shape, and shards that cover it once: cuts along any dimensions at any places."""
    n_dimensions = draw(st.integers(1, 3))
    limits = [600] if n_dimensions == 1 else [3, 40, 300][3 - n_dimensions :]
    shape = tuple(draw(st.integers(1, limit)) for limit in limits)
    shards = [ShardSpec.whole("w", shape)]
    for dimension in range(n_dimensions):
        parts = draw(st.integers(1, 3))
        shards = [shard.cut(dimension, parts, index) for shard in shards for index in range(parts)]
    return shape, shards


@settings(max_examples=60, deadline=None)
@given(case=cut_tensors(), signed=st.booleans(), most=st.integers(1, 5000))
def test_codes_of_shards_are_those_of_the_whole_tensor(
    case: tuple[tuple[int, ...], list[ShardSpec]], signed: bool, most: int
) -> None:
    shape, shards = case
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shards))) ** 3
    values = values if signed else values.abs()
    codes, scales = quantize(values, signed=signed)
    grid = torch.zeros(tile_grid(shape))
    local: dict[int, torch.Tensor] = {}
    for index, shard in enumerate(shards):  # every rank its own maxima, then the largest: what SharedTiles does
        blocks, part = Blocks(shard), values[shard.slices].contiguous()
        local[index] = torch.zeros(blocks.tiles.local_shape)
        for piece in blocks.pieces(most):
            blocks.keep(piece, blocks.largest(piece, blocks.view(part)[piece.index]), local[index])
        held = grid[blocks.tiles.slices]
        torch.maximum(held, local[index], out=held)
    assert torch.equal(grid, scales)
    for shard in shards:
        blocks, part = Blocks(shard), values[shard.slices].contiguous()
        own_scales = scales[tiles_of(shard).slices].contiguous()
        own = torch.full(part.shape, 77, dtype=torch.uint8)
        decoded = torch.empty(part.shape)
        for piece in blocks.pieces(most):
            blocks.encode(piece, blocks.view(part)[piece.index], own, own_scales, signed=signed)
            blocks.view(decoded)[piece.index] = blocks.decode(
                piece, own, own_scales, signed=signed, dtype=torch.float32
            )
        assert torch.equal(own, codes[shard.slices])
        assert torch.equal(decoded, dequantize(codes, scales, signed=signed)[shard.slices])


@settings(max_examples=30, deadline=None)
@given(case=cut_tensors())
def test_shared_tiles_get_the_largest_of_their_holders(case: tuple[tuple[int, ...], list[ShardSpec]]) -> None:
    shape, shards = case
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = quantize(values, signed=True)[1]
    parts = []
    for shard in shards:
        blocks, part = Blocks(shard), values[shard.slices].contiguous()
        scales = torch.zeros(blocks.tiles.local_shape)
        for piece in blocks.pieces():
            blocks.keep(piece, blocks.largest(piece, blocks.view(part)[piece.index]), scales)
        parts.append(scales)
    agreed = _run_together(shape, shards, parts)
    for shard, scales in zip(shards, agreed, strict=True):
        assert torch.equal(scales, expected[tiles_of(shard).slices])


def _run_together(shape: tuple[int, ...], shards: list[ShardSpec], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank in a thread of its own; a reduction waits for all of them."""
    barrier, sent = threading.Barrier(len(shards)), {}

    def run(rank: int) -> torch.Tensor:
        def reduce(vector: torch.Tensor, how: str) -> torch.Tensor:
            assert how == "max"
            sent[rank] = vector
            barrier.wait()
            largest = torch.stack([sent[each] for each in range(len(shards))]).amax(0)
            barrier.wait()
            return largest

        scales = parts[rank].clone()
        SharedTiles({"w": shape}, {"w": shards[rank]}, reduce).agree([{"w": scales}])
        return scales

    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(run, range(len(shards))))


def test_extreme_values_leave_the_rest_of_a_block_finite() -> None:
    values = torch.ones(2, 256)
    values[0, 0], values[1, 0] = float("inf"), 3e38
    back = dequantize(*quantize(values, signed=True), signed=True)
    assert back.isfinite().all()
    zeros = dequantize(*quantize(torch.zeros(3, 256), signed=False), signed=False)
    assert torch.equal(zeros, torch.zeros(3, 256))


def test_codes_are_kept_through_decoding_and_encoding_at_any_scale() -> None:
    largest = torch.finfo(torch.float32).max
    for signed in (True, False):
        for scale in (3e-39, 1.2e-38, 1e-20, 0.3, 1.0, 7e4, 1e30, 9e37, largest):
            codes = torch.arange(255, -1, -1, dtype=torch.uint8).view(1, 256)  # 255 is what the largest has
            scales = torch.full((1, 1), scale)
            values = dequantize(codes, scales, signed=signed)
            again, same = quantize(values, signed=signed)
            assert torch.equal(same, scales)
            # The values nearest to 0 are below what float32 holds at the smallest scales.
            kept = values.abs() > 1e-43
            assert torch.equal(again[kept], codes[kept]), (signed, scale)
