import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from modelworks.config import UserError
from modelworks.hardware import (
    FORM,
    MeasuredOn,
    Rates,
    calibrated_device,
    calibration_file,
    catalogue,
    device,
    facts,
    non_negative_fit,
    this_machine,
    write_device,
)

CPU = catalogue().device("CPU")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELWORKS_HARDWARE", str(tmp_path))
    return tmp_path


@given(
    arrays(np.float64, (12, 3), elements=st.floats(0.1, 10.0)),
    arrays(np.float64, 12, elements=st.floats(0.1, 10.0)),
    arrays(np.float64, 3, elements=st.floats(-2.0, 2.0)),
)
def test_no_other_non_negative_coefficients_fit_better(features, values, change):
    found = non_negative_fit(features, values, values)
    assert (found >= 0.0).all()

    def error(coefficients):
        return float(np.sum((features @ coefficients / values - 1.0) ** 2))

    assert error(found) <= error(np.maximum(found + change, 0.0)) + 1e-9


def test_products_and_exchanges_are_fitted_to_their_rows():
    shapes = [(64, 256, 512), (512, 64, 256), (1024, 1024, 64), (2048, 256, 1024), (128, 4096, 128), (4096, 64, 64)]

    def seconds(m, n, k):
        return 1e-5 + 2e-11 * m * n * k + 3e-10 * m * n + 1e-10 * n * k

    rows = [(m, n, k, seconds(m, n, k), 2 * seconds(m, n, k), seconds(m, n, k)) for m, n, k in shapes]
    exchanges = {"all_reduce": [(size, 1e-4 + size / 2e9) for size in (4096, 2**20, 2**24)]}
    assert CPU.measured[0].product_fits  # known before, and not taken over
    rates = CPU.measured[0].changed(products={"fp32": rows}, exchanges=exchanges)
    assert rates.product_fits["fp32"][0] == pytest.approx([1e-5, 2e-11, 3e-10, 0.0, 1e-10], rel=1e-6, abs=1e-16)
    assert rates.product_fits["fp32"][1][1] == pytest.approx(4e-11)
    assert rates.exchange_fits["all_reduce"] == pytest.approx((1e-4, 5e-10))
    assert rates.best_product("fp32") == max(
        2 * m * n * k / row[3] for (m, n, k), row in zip(shapes, rows, strict=True)
    )


def test_this_machine_is_assumed_until_it_was_measured(directory):
    here = this_machine()
    assert not here.is_calibrated
    assert "not calibrated" in here.note
    assert here.memory_gb == pytest.approx(facts().memory / 1e9)
    assert [rates.threads * rates.ranks <= facts().cores for rates in here.measured]


def test_a_calibration_is_found_where_it_was_written_and_only_on_its_machine(directory):
    found = facts()
    on = MeasuredOn(form=FORM, cpu=found.cpu, cores=found.cores, torch="2", at="2026-01-01T00:00:00+00:00")
    measured = calibrated_device(found, CPU.measured, on)
    assert this_machine().is_calibrated is False
    write_device(measured, calibration_file())
    here = this_machine()
    assert here.is_calibrated
    assert device("this-machine") == here
    assert here.measured[0].products == CPU.measured[0].products
    assert here.dense_tflops["fp32"] == pytest.approx(CPU.measured[0].best_product("fp32") / 1e12, rel=1e-3)
    other = measured.model_copy(update={"measured_on": on.model_copy(update={"cores": found.cores + 1})})
    write_device(other, calibration_file())
    assert not this_machine().is_calibrated
    assert f"{found.cores + 1} cores" in this_machine().note


def test_a_calibration_of_an_earlier_form_counts_as_none_and_is_told(directory):
    found = facts()
    on = MeasuredOn(cpu=found.cpu, cores=found.cores, torch="2", at="2025-01-02T00:00:00+00:00")
    write_device(calibrated_device(found, CPU.measured, on), calibration_file())
    text = calibration_file().read_text().replace("operations:", "parts:")  # which no reader knows
    calibration_file().write_text(text)
    here = this_machine()
    assert not here.is_calibrated
    assert "2025-01-02 is an earlier version's: calibrate again" in here.note
    assert device("H100").name.startswith("H100")
    with pytest.raises(UserError, match="calibrated by an earlier version; modelworks plan --calibrate --out"):
        device(str(calibration_file()))


def test_scaled_rates_take_longer_for_work_and_as_long_for_calls():
    rates = CPU.measured[0]
    slower = rates.scaled(2.0, ranks=4, threads=1)
    assert (slower.ranks, slower.threads) == (4, 1)
    assert slower.best_product("fp32") == pytest.approx(rates.best_product("fp32") / 2.0)
    before, after = rates.costs["fp32"], slower.costs["fp32"]
    assert (after.update, after.layer) == (2.0 * before.update, before.layer)
    assert after.weight.backward == 2.0 * before.weight.backward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "devices: [{name: Mine, memory_gb: 16, dense_tflops: {bf16: 1}, source: me, nots: 1}]",
            "nots: unknown key; did you mean note",
        ),
        ("devices: [{name: Mine, memory_gb: -1, dense_tflops: {bf16: 1}, source: me}]", "Mine: memory_gb: .*greater"),
        ("devices: [{name: Mine, dense_tflops: {bf16: 1}, source: me}]", "Mine: memory_gb: field required"),
        ("devices: {}", "expected a list under `devices:`"),
        ("devices: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_catalogue_of_ones_own_name_the_file_and_the_key(directory, text, message):
    (directory / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=f"mine.yaml.*{message}"):
        device("H100")


def test_catalogues_of_ones_own_are_read_again_when_they_change(directory):
    path = directory / "mine.yaml"
    path.write_text("devices: [{name: Mine, memory_gb: 16, dense_tflops: {bf16: 100}, source: me}]")
    assert device("mine").memory_gb == 16
    path.write_text("devices: [{name: Mine, memory_gb: 32, dense_tflops: {bf16: 100}, source: me, note: changed}]")
    assert device("mine").memory_gb == 32
    assert device(str(path)).name == "Mine"
    path.write_text("devices: []")
    with pytest.raises(UserError, match="holds 0 devices"):
        device(str(path))


def test_a_directory_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MODELWORKS_HARDWARE", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"MODELWORKS_HARDWARE is .*nowhere"):
        catalogue()


def test_rates_without_a_product_are_refused():
    with pytest.raises(ValueError, match="products"):
        Rates.model_validate(CPU.measured[0].model_dump() | {"products": {"fp32": []}})
