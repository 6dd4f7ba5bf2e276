"""Bytes of state that each optimiser really keeps, against the planner's and the trainer's predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from modelworks.config import OptimizerConfig, RunConfig, TrainConfig, count_parameters, parameter_shapes
from modelworks.config.named_models import preset
from modelworks.config.optimizers import OptimizerName
from modelworks.hardware import catalogue
from modelworks.layout import ShardSpec, whole_tensors
from modelworks.optim import Optimizer, Split, build_optimizer
from modelworks.plan.optimizer_bytes import optimizer_bytes
from modelworks.plan.optimizer_bytes import state_bytes as planner_bytes
from modelworks.plan.run import candidate_of
from modelworks.train.state_memory import state_bytes

MODEL = preset("mixtral-tiny")
SHAPES = parameter_shapes(MODEL)
CASES: list[dict[str, Any]] = [{"name": name} for name in get_args(OptimizerName)] + [
    {"name": "sgd", "momentum": 0.0},
    {"name": "adafactor", "first_moment": 0.9},
]


def built(config: OptimizerConfig, specs: Mapping[str, ShardSpec], dtype: torch.dtype) -> Optimizer:
    parameters = {name: torch.zeros(spec.local_shape, dtype=dtype).requires_grad_() for name, spec in specs.items()}
    return build_optimizer(parameters.items(), config, split=Split(specs, SHAPES))


def planned(config: OptimizerConfig) -> str:
    train = TrainConfig(micro_batch=1, precision="fp32")
    run = RunConfig(model=MODEL, train=train, optimizer=config)
    return candidate_of(run, next(iter(catalogue().devices.values()))).optimizer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_planner_and_the_trainer_predict_what_is_kept(case: dict[str, Any]) -> None:
    config = OptimizerConfig(**case)
    whole = whole_tensors(SHAPES)
    parts = {name: replace(spec, bounds=((1, spec.shape[0] // 2), *spec.bounds[1:])) for name, spec in whole.items()}
    for specs in (whole, parts):
        kept = built(config, specs, torch.float32).state_bytes()
        assert kept == sum(
            optimizer_bytes(planned(config), spec.shape, parameter=name, held=spec.local_shape)
            for name, spec in specs.items()
        )
        masters = 4 * sum(spec.n_local for spec in specs.values())
        assert built(config, specs, torch.bfloat16).state_bytes() == kept + masters
        for itemsize, offloaded in ((4, False), (2, False), (4, True)):
            found = state_bytes(config, MODEL, specs, itemsize=itemsize, offloaded=offloaded)
            assert sum(found.values()) == kept + (masters if itemsize == 2 or offloaded else 0)


def test_the_table_in_the_documentation_is_what_is_allocated() -> None:
    model = preset("llama-3-8b")
    elements = count_parameters(model).total
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.count("|") == 5]
    [start] = [index for index, row in enumerate(rows) if row[-1] == "bytes per parameter"]
    told = {name: float(row[-1]) for row in rows[start + 2 :] for name in row[0].split(", ")}
    assert told.keys() == set(get_args(OptimizerName))
    for name, stated in told.items():
        config = OptimizerConfig(name=name)  # type: ignore[arg-type]
        allocated = sum(state_bytes(config, model, itemsize=4, offloaded=False).values())
        assert round(allocated / elements, 3) == stated, name
        assert planner_bytes(planned(config), model).mean * elements == pytest.approx(allocated)
