"""A real measurement, as small as can be: what it gives is what the planner takes."""

import torch

from modelworks.hardware import catalogue
from modelworks.parallel import single_process
from modelworks.plan.calibrate import fit_rates
from modelworks.plan.run import predict_run
from modelworks.train import rates


def tiny(monkeypatch):
    shape = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32, "vocab_size": 64, "rows": 2}
    monkeypatch.setattr(rates, "PRODUCTS", tuple((size, size, size) for size in (8, 16, 32, 48, 64)))
    monkeypatch.setattr(rates, "LENGTHS", (16, 32))
    monkeypatch.setattr(rates, "PROBES", (shape, shape | {"micro_batch": 1}, shape | {"n_experts": 2}))
    monkeypatch.setattr(rates, "PRECISION_NAMES", ("fp32",))
    monkeypatch.setattr(rates, "SEQ_LEN", 16)


def test_a_measurement_becomes_rates_that_predict(monkeypatch):
    tiny(monkeypatch)
    told = []
    measured = rates.measure_rank(single_process(torch.device("cpu")), told.append, effort=0.01)
    assert len(told) == rates.parts_to_measure(1)
    assert measured["exchanges"] == {}
    probes = [rates.probe_config(probe, "fp32") for probe in rates.PROBES]
    fit = fit_rates({**measured, "memory_bandwidth_gb_s": 10.0}, probes)
    assert fit.rates.ranks == 1
    assert set(fit.rates.costs) == {"fp32"}
    device = catalogue().device("CPU").model_copy(update={"measured": [fit.rates]})
    forward, gradients, update = measured["steps"]["fp32"][0]
    assert 0.0 < forward < gradients
    assert predict_run(probes[0], device).step_seconds < 10 * (gradients + update)


def test_of_each_figure_the_less_disturbed_round_counts():
    rounds = [{"products": {"fp32": [[8, 8, 8, 2.0, 5.0, 1.0]]}}, {"products": {"fp32": [[8, 8, 8, 3.0, 4.0, 1.0]]}}]
    assert rates._fastest(rounds, "products", "fp32") == [[8, 8, 8, 2.0, 4.0, 1.0]]
