"""A checkpoint loads under any layout: the same logical tensors bit for bit, and losses as if nothing had been.

In float64, so that what layouts may change by rounding is far below what any mistake would change.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import reshard_jobs
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pool import WorkerPool

from modelworks.checkpoint import open_checkpoint
from modelworks.layout import Layout

pytestmark = pytest.mark.slow

EXPERTS = ["model.family=mixtral", "model.n_experts=4", "model.experts_per_token=2", "model.router_bias=true",
           "model.d_expert=13"]  # fmt: skip
LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "dp2": ["dp_replicate=2"],
    "dp4": ["dp_replicate=4"],
    "zero1-dp2": ["dp_shard=2", "zero=1"],
    "zero2-dp8": ["dp_shard=8", "zero=2"],
    "zero3-dp4": ["dp_shard=4", "zero=3"],
    "zero3-hybrid": ["dp_replicate=2", "dp_shard=2", "zero=3"],
    "tp4": ["tp=4"],
    "tp2-pp2-dp2": ["tp=2", "pp=2", "dp_replicate=2"],
    "tp2-zero2": ["tp=2", "dp_shard=2", "zero=2"],
    "cp2": ["cp=2"],
    "pp4": ["pp=4"],
    "pp2-interleaved": ["pp=2", "pp_schedule=interleaved", "pp_virtual=3"],
    "pp2-zbv-zero1": ["pp=2", "pp_schedule=zbv", "dp_shard=2", "zero=1"],
    "pp3-uneven": ["pp=3", "pp_partition=[3, 0, 1]"],
    "offload-cpu": ["dp_shard=2", "zero=2", "offload=cpu"],
    "offload-nvme": ["tp=2", "offload=nvme"],
}
OF_EXPERTS = {
    "ep2-cp2": ["cp=2", "ep=2"],
    "ep4-zero2": ["dp_shard=4", "zero=2", "ep=4"],
    "ep2-zero3-tp2": ["dp_shard=2", "zero=3", "ep=2", "tp=2"],
}


class Runs:
    """Runs segments on the workers, each in a directory of its own."""

    def __init__(self, workers: WorkerPool, directory: Path) -> None:
        self._workers, self._directory, self._count = workers, directory, 0

    def __call__(
        self, layout: list[str], model: list[str], source: str | None, steps: int, **more: Any
    ) -> dict[str, Any]:
        overrides = [*model, *(f"parallel.{one}" for one in layout)]
        degrees = Layout.of(reshard_jobs.read(*overrides).parallel)
        self._count += 1
        place = self._directory / f"segment-{self._count}"
        results = self._workers.run(
            reshard_jobs.segment, degrees, overrides, str(place), source, steps, n_kv_heads=2, **more
        )
        first: dict[str, Any] = results[0]
        assert all(result == first for result in results)  # losses included: all ranks know the whole loss
        return first


@pytest.fixture(scope="module")
def runs(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(workers, tmp_path_factory.mktemp("reshard"))


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> Any:
    """Losses of the run in one process that never stops, by model."""
    made: dict[tuple[str, ...], list[float]] = {}

    def get(model: list[str], steps: int) -> list[float]:
        key = tuple(model)
        if len(made.get(key, [])) < steps:
            made[key] = runs([], model, None, steps)["losses"]
        return made[key][:steps]

    return get


def tensors(where: str) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(where)
    sections = checkpoint.sections()
    return {f"{section}/{name}": tensor for section in sections for name, tensor in checkpoint.tensors(section)}


def assert_same_tensors(ours: str, theirs: str, *, masters: bool = True) -> None:
    """Bit for bit. masters: False where only one of them keeps master weights, which are then the weights."""
    left, right = tensors(ours), tensors(theirs)
    if not masters:
        for each in (left, right):
            for name in [name for name in each if name.endswith("/master")]:
                weight = each[name.removesuffix("/master").replace("optimizer/", "model/", 1)]
                assert torch.equal(each.pop(name), weight)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def goes_on(runs: Runs, unbroken: Any, names: list[str], model: list[str], steps: int) -> None:
    """Layout after layout: loading changes nothing, and the losses are those of the run that never stopped."""
    layouts = LAYOUTS | OF_EXPERTS
    source, losses = None, []
    for name in names:
        done = runs(layouts[name], model, source, steps)
        if source:
            assert_same_tensors(done["loaded"], source, masters=False)
        source = done["trained"]
        losses += done["losses"]
    assert losses == pytest.approx(unbroken(model, len(losses)), rel=1e-12, abs=0)


def test_a_chain_of_layouts(runs: Runs, unbroken: Any) -> None:
    """After the first is loaded, the next 20 losses are those of the run that never stopped, whatever else changes."""
    chain = ["tp2-pp2-dp2", "zero3-dp4", "one", "ep2-cp2", "pp2-interleaved"]
    goes_on(runs, unbroken, chain, EXPERTS, steps=5)


@pytest.mark.parametrize(
    ("optimizer", "pair"),
    [
        ("sgd", ("zero3-dp4", "tp2-zero2")),
        ("adafactor", ("tp4", "pp3-uneven")),
        ("adamw8bit", ("zero3-hybrid", "tp2-pp2-dp2")),
        ("muon", ("tp2-zero2", "pp2-zbv-zero1")),
    ],
)
def test_state_of_other_optimisers(optimizer: str, pair: tuple[str, str], runs: Runs, unbroken: Any) -> None:
    """Of rows and columns too, which are no slices of their parameter's shape; and codes, whose scales are of blocks
    that cuts go through (the model is then large enough to have some)."""
    larger = ["model.d_model=64", "model.d_ff=70"] if "8bit" in optimizer else []
    goes_on(runs, unbroken, list(pair), [*larger, f"optimizer.name={optimizer}"], steps=3)


@settings(
    max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_pairs_of_layouts(data: st.DataObject, runs: Runs, unbroken: Any) -> None:
    experts = data.draw(st.booleans())
    names = [*LAYOUTS, *(OF_EXPERTS if experts else ())]
    pair = data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=2, unique=True))
    goes_on(runs, unbroken, pair, EXPERTS if experts else [], steps=3)


@pytest.mark.parametrize("name", ["tp2-pp2-dp2", "zero3-hybrid", "zero2-dp8", "ep2-zero3-tp2"])
def test_the_same_layout_goes_on_bit_for_bit(name: str, runs: Runs) -> None:
    model, layout = EXPERTS if name in OF_EXPERTS else [], (LAYOUTS | OF_EXPERTS)[name]
    whole = runs(layout, model, None, 4)
    first = runs(layout, model, None, 2)
    second = runs(layout, model, first["trained"], 2)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert_same_tensors(second["trained"], whole["trained"])


@pytest.mark.parametrize("pair", [("zero3-dp4", "tp2-zero2"), ("offload-cpu", "pp3-uneven"), ("dp2", "offload-nvme")])
def test_master_weights_of_bf16(pair: tuple[str, str], runs: Runs) -> None:
    """Weights that compute are their roundings; both are saved, and both come back in full."""
    first = runs(LAYOUTS[pair[0]], [], None, 2, precision="bf16")
    second = runs(LAYOUTS[pair[1]], [], first["trained"], 0, precision="bf16")
    assert_same_tensors(second["loaded"], first["trained"])
    found = tensors(first["trained"])
    master = found["optimizer/blocks.0.attention.q.weight/master"]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), found["model/blocks.0.attention.q.weight"])
    assert not torch.equal(master.bfloat16().float(), master)


@pytest.mark.parametrize("layout", ["one", "zero3-dp4", "tp2-pp2-dp2"])
def test_damage_that_one_rank_finds_is_told_to_all(
    layout: str, runs: Runs, workers: WorkerPool, tmp_path: Path
) -> None:
    """One byte of the last layer's weights, which most ranks of a split model never read."""
    saved = runs(LAYOUTS["dp2"], [], None, 0)["trained"]
    copy = tmp_path / Path(saved).name
    shutil.copytree(saved, copy)
    needle = tensors(saved)["model/blocks.3.feed_forward.down.weight"].numpy().tobytes()[-64:]
    [file] = [path for path in copy.glob("*.safetensors") if needle in path.read_bytes()]
    text = bytearray(file.read_bytes())
    text[text.index(needle) + 32] ^= 1
    file.write_bytes(text)
    overrides = [f"parallel.{one}" for one in LAYOUTS[layout]]
    degrees = Layout.of(reshard_jobs.read(*overrides).parallel)
    told = workers.run(reshard_jobs.restored_alike, degrees, overrides, str(copy), n_kv_heads=2)
    assert len(set(told)) == 1
    assert told[0].startswith("CorruptedCheckpoint: ")
    assert file.name in told[0]
    assert "blocks.3.feed_forward.down.weight" in told[0]


def test_state_that_only_one_stage_misses_is_told_to_all(runs: Runs, workers: WorkerPool) -> None:
    saved = runs(LAYOUTS["dp2"], [], None, 0)["trained"]
    overrides = [f"parallel.{one}" for one in LAYOUTS["tp2-pp2-dp2"]]
    degrees = Layout.of(reshard_jobs.read(*overrides).parallel)
    lacks = "blocks.3.attention.q.weight/exp_avg"
    told = workers.run(reshard_jobs.restored_alike, degrees, overrides, saved, lacks, n_kv_heads=2)
    assert len(set(told)) == 1
    assert "its training state cannot be used here: optimiser state is missing" in told[0]
    assert lacks in told[0]
