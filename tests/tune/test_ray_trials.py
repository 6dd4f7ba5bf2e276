"""Trials by Ray Tune: what one asks of its machines; the rest where Ray is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelworks.config import UserError
from modelworks.tune import RayRunner, Setup, Trial
from modelworks.tune.ray_trials import _resources


def node(cpu: float, gpu: float = 0.0, *, alive: bool = True) -> dict[str, Any]:
    """As `ray.nodes()` lists it."""
    return {"Alive": alive, "Resources": {"CPU": cpu, "GPU": gpu}}


@pytest.fixture
def setup(tiny_config: Callable[..., Any], tiny_machine: Any) -> Setup:
    config = tiny_config("train.duration=8 steps", "evaluate.every=8 steps")
    return Setup(config, 8, 8, tiny_machine, "key", (), ())


@pytest.mark.parametrize(
    ("jobs", "nodes", "cpus"),
    [
        (1, [node(8)], 8),
        (4, [node(8)], 2),
        (3, [node(8), node(8)], 5),
        (2, [node(8), node(64, alive=False)], 4),
        (1, [node(8), node(4)], 8),  # on one machine
        (100, [node(8)], 1),
    ],
)
def test_trials_share_the_cpus_of_the_machines(setup: Setup, jobs: int, nodes: list[Any], cpus: int) -> None:
    assert _resources(setup, jobs, nodes) == {"cpu": cpus}


def test_a_trial_has_a_gpu_for_each_rank_on_one_machine(setup: Setup, tiny_config: Callable[..., Any]) -> None:
    split = replace(setup, config=tiny_config("train.device=cuda", "parallel.dp_replicate=4"))
    assert _resources(split, 2, [node(8, 2), node(8, 4)]) == {"cpu": 1, "gpu": 4}
    with pytest.raises(UserError, match="needs 4 GPUs on one machine, and the largest of Ray's has 2"):
        _resources(split, 2, [node(8, 2), node(8, 2)])


@pytest.mark.slow
def test_trials_that_ray_makes(setup: Setup, tmp_path: Path) -> None:
    pytest.importorskip("ray.tune")
    outcomes = list(RayRunner(setup, tmp_path, jobs=2).run([Trial(1e-3, 0), Trial(1e-2, 0), Trial(1e30, 0)]))
    assert {outcome.trial.rate: outcome.status for outcome in outcomes} == {
        1e-3: "finished",
        1e-2: "finished",
        1e30: "diverged",
    }
    assert not (tmp_path / "ray").exists()
