from dataclasses import replace

import pytest

from modelworks.cli.forecast import forecast
from modelworks.config import UserError
from modelworks.hardware import (
    FORM,
    Accelerator,
    MeasuredOn,
    calibrated_device,
    calibration_file,
    catalogue,
    facts,
    write_device,
)


@pytest.fixture
def decided(tiny_config):
    return tiny_config("train.micro_batch=2", "train.precision=fp32")


def test_an_uncalibrated_machine_is_as_fast_as_its_products_were_measured(decided, tiny_machine):
    found = forecast(decided, tiny_machine, 1)
    slower = forecast(decided, replace(tiny_machine, gemm={"fp32": 1e10}), 1)
    assert "right to a factor of two" in found.basis
    assert found.step_seconds < slower.step_seconds
    assert found.memory == slower.memory > 0


def test_a_calibrated_machine_is_planned_with_its_own_rates(decided, tiny_config, tiny_machine, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELWORKS_HARDWARE", str(tmp_path))
    here = facts()
    on = MeasuredOn(form=FORM, cpu=here.cpu, cores=here.cores, torch="2", at="2026-01-02T00:00:00+00:00")
    write_device(calibrated_device(here, catalogue().device("CPU").measured, on), calibration_file())
    assert forecast(decided, tiny_machine, 1).basis == "from rates measured here on 2026-01-02"
    old = calibrated_device(here, catalogue().device("CPU").measured, on.model_copy(update={"form": 1}))
    write_device(old, calibration_file())
    basis = forecast(decided, tiny_machine, 1).basis
    assert "measures this one; the calibration that is there of 2026-01-02 is an earlier version's" in basis
    write_device(calibrated_device(here, catalogue().device("CPU").measured, on), calibration_file())
    parallel = decided.parallel.model_copy(update={"dp_replicate": 4})
    several = tiny_config("train.micro_batch=1", "train.precision=fp32").model_copy(update={"parallel": parallel})
    assert "4 processes as if 2 shared the cores longer" in forecast(several, tiny_machine, 1).basis


def test_what_cannot_be_predicted_is_an_error_that_says_why(decided, tiny_machine):
    with pytest.raises(UserError, match="several machines"):
        forecast(decided, tiny_machine, 2)
    gpu = Accelerator(name="NVIDIA Unheard 1", count=1, memory=10**10, capability=(9, 0))
    on_gpu = decided.model_copy(update={"train": decided.train.model_copy(update={"device": "cuda"})})
    with pytest.raises(UserError, match="NVIDIA Unheard 1"):
        forecast(on_gpu, replace(tiny_machine, facts=replace(tiny_machine.facts, accelerator=gpu)), 1)
    known = replace(gpu, name="NVIDIA H100 80GB HBM3")
    found = forecast(on_gpu, replace(tiny_machine, facts=replace(tiny_machine.facts, accelerator=known)), 1)
    assert found.basis == "from the catalogue's figures for H100-SXM-80GB"


def test_stages_of_a_ramp_are_forecast_beside_the_full_batch(tiny_config, tiny_machine):
    keys = ("train.micro_batch=2", "train.precision=fp32", "train.global_batch=8")
    ramp = "train.batch_ramp=[{batch: 2, until: 2 steps}, {batch: 4, until: 4 steps}]"
    found = forecast(tiny_config(*keys, ramp), tiny_machine, 1)
    alone = [forecast(tiny_config(*keys[:2], f"train.global_batch={rows}"), tiny_machine, 1) for rows in (2, 4, 8)]
    assert found.stages == ((2, alone[0].step_seconds), (4, alone[1].step_seconds))
    assert found.step_seconds == alone[2].step_seconds
    assert alone[2].stages == ()
