"""A real measurement, as small as can be: what it gives is what the planner takes."""

import pytest
import torch

from modelworks.hardware import catalogue
from modelworks.parallel import single_process
from modelworks.plan.calibrate import Probes, fit_rates
from modelworks.plan.run import predict_run
from modelworks.train import operation_rates, rates, step_rates

SHAPE = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32, "vocab_size": 64, "rows": 2}
PROBES = (SHAPE, SHAPE | {"micro_batch": 1}, SHAPE | {"n_experts": 2})


def tiny(monkeypatch):
    monkeypatch.setattr(rates, "PRODUCTS", tuple((size, size, size) for size in (8, 16, 32, 48, 64)))
    monkeypatch.setattr(rates, "LENGTHS", (16, 32))
    monkeypatch.setattr(operation_rates, "ATTENTION_TOKENS", 64)
    monkeypatch.setattr(operation_rates, "TOKENS", 16)
    monkeypatch.setattr(operation_rates, "WIDTH", 64)
    monkeypatch.setattr(rates, "PROBES", PROBES)
    monkeypatch.setattr(step_rates, "WATCHED", SHAPE)
    monkeypatch.setattr(rates, "PRECISION_NAMES", ("fp32",))
    monkeypatch.setattr(step_rates, "SEQ_LEN", 16)


def test_a_measurement_becomes_rates_that_predict(monkeypatch):
    tiny(monkeypatch)
    told = []
    measured = rates.measure_rank(single_process(torch.device("cpu")), told.append, effort=0.01)
    assert len(told) == rates.parts_to_measure(1)
    assert measured["exchanges"] == measured["blocks"] == {}
    probes = [step_rates.probe_config(probe, "fp32") for probe in PROBES]
    fit = fit_rates({**measured, "memory_bandwidth_gb_s": 10.0}, Probes(probes, probes[0], []))
    assert fit.rates.ranks == 1
    assert set(fit.rates.costs) == {"fp32"}
    device = catalogue().device("CPU").model_copy(update={"measured": [fit.rates]})
    forward, gradients, update = measured["steps"]["fp32"][0]
    assert 0.0 < forward < gradients
    assert predict_run(probes[0], device).step_seconds < 10 * (gradients + update)


def test_a_figure_is_the_mean_of_the_rounds_or_the_less_where_one_was_disturbed():
    rounds = [
        {"ranks": 2, "products": {"fp32": [[8, 8, 8, 2.0, 5.0, 1.0]]}},
        {"ranks": 2, "products": {"fp32": [[8, 8, 8, 4.0, 5.0, 1.5]]}},
    ]
    assert rates.mean_of_rounds(rounds) == {"ranks": 2, "products": {"fp32": [[8, 8, 8, 2.0, 5.0, 1.25]]}}
    assert rates.difference_of_rounds(rounds) == pytest.approx(0.4)  # of 2/3, 0 and 0.4
