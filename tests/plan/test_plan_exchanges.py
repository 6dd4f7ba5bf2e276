"""Links and what the host adds: from first principles, whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planned import A100, MACHINE, split

from modelworks.config import ModelConfig, UserError, preset
from modelworks.hardware import Link, device
from modelworks.layout.pipeline import Costs
from modelworks.plan import CONSTANTS, MEGATRON_2021, Machine, Split, step_time, work_of
from modelworks.plan.communication import all_reduce, all_to_all, point_to_point
from modelworks.plan.compute import utilisation
from modelworks.plan.elements import layer_elements
from modelworks.plan.held import held_over_time
from modelworks.plan.pipeline import pipelined, simulated
from modelworks.plan.step_time import layer_costs
from modelworks.plan.topology import Group, group


def seconds(layers: ModelConfig, layout: Split, **options: object) -> float:
    return float(step_time(work_of(layers, layout, A100, **options)).total)  # type: ignore[arg-type]


def test_few_bytes_go_down_a_tree() -> None:
    """A ring takes 2 (N - 1) steps, a tree some 2 log2 N: what has no bytes takes the shorter."""
    ranks = 1024.0
    steps = float(all_reduce(MACHINE, group(MACHINE, 1.0, ranks), 0.0, CONSTANTS)) / MACHINE.network_latency
    assert steps == pytest.approx(2 * np.log2(ranks) + 2)
    assert float(all_reduce(MACHINE, group(MACHINE, 1.0, 2.0), 0.0, CONSTANTS)) == pytest.approx(
        2 * MACHINE.link_latency
    )


@pytest.mark.parametrize("exchange", [all_reduce, all_to_all])
def test_beyond_a_leaf_switch_the_network_is_narrower(exchange: object) -> None:
    """Twice oversubscribed above 32 devices: groups that reach further take twice as long, nearer ones do not."""
    machine = MACHINE.with_(network_latency=0.0)
    thin = machine.with_(leaf=32.0, oversubscription=2.0)
    for stride, ranks, factor in ((8.0, 4.0, 1.0), (8.0, 8.0, 2.0), (1.0, 8.0, 1.0)):
        near, far = (float(exchange(each, group(each, stride, ranks), 1e9, CONSTANTS)) for each in (machine, thin))  # type: ignore[operator]
        assert far / near == pytest.approx(factor, rel=1e-3)
    assert float(point_to_point(thin, 1.0, 1e9, CONSTANTS, span=64.0)) == pytest.approx(
        2 * float(point_to_point(thin, 1.0, 1e9, CONSTANTS, span=8.0))
    )


def test_devices_on_pcie_exchange_over_pcie() -> None:
    """Inside the server at the bus's rate, between servers at the adapter's."""
    machine = Machine.of(device("L40S").model_copy(update={"network_gbit_s": 50.0}), "bf16")
    inside, across = Group(8.0, 8.0), Group(8.0, 1.0)
    bus, adapter = 31e9 * CONSTANTS.link, 50e9 / 8 * CONSTANTS.network
    for where, rate in ((inside, bus), (across, adapter)):
        moved = float(all_reduce(machine, where, 8e9, CONSTANTS) - all_reduce(machine, where, 0.0, CONSTANTS))
        assert moved == pytest.approx(2 * 7 / 8 * 8e9 / rate)


def test_links_of_a_catalogue_of_ones_own_are_used() -> None:
    own = A100.model_copy(
        update={
            "link": Link(name="own", gb_s=10.0, devices=4),
            "network_leaf_devices": 64,
            "network_oversubscription": 4.0,
        }
    )
    machine = Machine.of(own, "bf16")
    assert (machine.node, machine.link_bandwidth, machine.leaf, machine.oversubscription) == (4.0, 10e9, 64.0, 4.0)


def test_a_device_without_narrow_types_is_refused() -> None:
    with pytest.raises(UserError, match="no rate of fp8 for A100-SXM-80GB, only of fp32, bf16, fp16"):
        Machine.of(A100, "fp8")


def test_one_tile_more_is_one_wave_more() -> None:
    """As many tiles as there are units run at once; the next one waits."""
    work = work_of(preset("llama-3-8b"), split(), A100)
    tile, units = CONSTANTS.tile, 108.0
    full, ragged = (float(utilisation(work, tile, n * tile, 4096.0)) for n in (units, units + 1))
    depth = 4096 / (4096 + CONSTANTS.depth)
    assert full == pytest.approx(depth)
    assert ragged == pytest.approx(depth * (1 - CONSTANTS.wave * (1 - (units + 1) / (2 * units))))


def test_the_host_sets_the_pace_of_small_layers() -> None:
    """Launching takes as long for two layers as for one that is half as wide; a host that waits adds its own time."""
    tiny = preset("gpt2-tiny")
    launch = replace(CONSTANTS, launch=1.0)
    slow = seconds(tiny, split(), constants=launch) / (3.0 * tiny.n_layers * 64.0)
    assert slow == pytest.approx(1.0, rel=0.01)
    large, blocking = preset("gpt3-13b"), MEGATRON_2021.with_(blocking=1.0)
    costs = [seconds(large, split(micro_batch=4.0), software=each) for each in (MEGATRON_2021, blocking)]
    waited = 3.0 * large.n_layers * 16 * (CONSTANTS.launch + CONSTANTS.kernel_waits)
    assert costs[1] - costs[0] == pytest.approx(waited, rel=1e-6)


def test_gradients_are_added_up_but_for_the_first_micro_batch() -> None:
    layers = preset("gpt3-13b")
    fused = MEGATRON_2021.with_(fused_accumulation=1.0)
    once, often = (
        [seconds(layers, split(global_batch=rows), software=each) for each in (MEGATRON_2021, fused)]
        for rows in (1.0, 8.0)
    )
    assert once[0] == pytest.approx(once[1])
    layout = split(global_batch=8.0)
    work = work_of(layers, layout, A100)
    moved = 7 * layers.n_layers * float(layer_elements(work.shape, layout)) * (2 + 2 * 2)
    assert often[0] - often[1] == pytest.approx(moved / (A100.memory_bandwidth_tb_s * 1e12 * CONSTANTS.memory))  # type: ignore[operator]


def test_uneven_stages_wait_for_the_slowest() -> None:
    """m micro-batches on the last stage, which has the head, and once round the others."""
    costs = Costs((1.0, 1.0, 3.0), (1.0, 1.0, 3.0), (1.0, 1.0, 3.0), send=0.0)
    assert simulated("1f1b", costs, 3, 16).makespan == pytest.approx(16 * 9.0 + 3.0 + 3.0)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zbv", 1)])
def test_memory_over_time_peaks_where_the_schedule_does(schedule: str, virtual: int) -> None:
    """Nothing is held before and after, and most of it when `pipelined` says."""
    per_rank = 2 if schedule == "zbv" else virtual
    layers = tuple(range(1, 2 * per_rank + 1))
    costs = Costs.even(2 * per_rank)
    costs = replace(costs, forward=tuple(costs.forward), backward_input=tuple(costs.backward_input),
                    backward_weight=tuple(costs.backward_weight))  # fmt: skip
    curves = held_over_time(simulated(schedule, costs, 2, 8, virtual), layers)
    most = pipelined(schedule, costs, layers, 2, 8, virtual).held
    assert [max(held for _, held in curve) for curve in curves] == list(most)
    assert all(curve[-1][1] == 0.0 for curve in curves)


def test_what_waits_on_the_host_comes_over_its_bus() -> None:
    layers = preset("llama-3-8b")
    layout = split(dp_shard=8.0, zero=3.0)
    here, away = (step_time(work_of(layers, each, A100)) for each in (layout, layout.with_(offload_activations=1.0)))
    assert float(away.gather) > float(here.gather)
    assert float(away.linear) == float(here.linear)


def test_a_pass_has_its_parts() -> None:
    """What a simulation gets for a layer is what the step is made of."""
    layers = preset("gpt3-13b")
    work = work_of(layers, split(recompute=2.0), A100)
    layer, head, _ = layer_costs(work)
    time = step_time(work)
    parts = time.linear + time.attention + time.elementwise + time.recompute + time.gather + time.head
    assert float(64 * (layers.n_layers * layer.total + head.total)) == pytest.approx(float(parts))
