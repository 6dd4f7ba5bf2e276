import json
from dataclasses import replace

import pytest
import torch

from modelworks.config import UserError
from modelworks.hardware import Accelerator, Machine, choose_precision, facts, fingerprint, gemm_rate, peak_flops
from modelworks.hardware import measure as measure_module
from modelworks.hardware.measure import _load, measure_machine


@pytest.fixture
def machine() -> Machine:
    gemm = {"fp32": 200e9, "bf16": 400e9, "fp16": 1e9}
    return Machine(facts(), "cpu", torch.__version__, 2, gemm, 50e9, "2026-01-01T00:00:00+00:00", 0.0)


def with_gpu(machine: Machine, name: str, capability: tuple[int, int]) -> Machine:
    gpu = Accelerator(name, 1, 80 * 10**9, capability)
    return replace(machine, device="cuda", facts=replace(machine.facts, accelerator=gpu))


def test_gemm_rate_counts_two_operations_a_multiply_add(monkeypatch):
    monkeypatch.setattr(measure_module, "_median_time", lambda work, device, seconds: work() is None or 0.5)
    assert gemm_rate(3, 5, 7, "fp32") == pytest.approx(2 * 3 * 5 * 7 / 0.5)


def test_measuring_is_quick_and_plausible(tmp_path):
    measured = measure_machine(quick=True, refresh=True, cache=tmp_path)
    assert set(measured.gemm) == {"fp32", "bf16", "fp16"}
    assert all(rate > 1e6 for rate in measured.gemm.values())
    assert measured.memory_bandwidth > 1e7
    assert not list(tmp_path.iterdir())  # a quick measurement is not kept


def pretend(monkeypatch, rate: float, others: float) -> None:
    monkeypatch.setattr(measure_module, "_best_gemm", lambda *_: rate)
    monkeypatch.setattr(measure_module, "_bandwidth", lambda *_: rate)
    monkeypatch.setattr(measure_module, "_others_cores", lambda: lambda: others)


def test_results_are_kept_and_refreshed(monkeypatch, tmp_path):
    pretend(monkeypatch, 1e9, others=0.0)
    first = measure_machine(cache=tmp_path)
    pretend(monkeypatch, 2e9, others=0.0)
    assert measure_machine(cache=tmp_path) == first
    assert measure_machine(cache=tmp_path, refresh=True).gemm["fp32"] == 2e9
    assert measure_machine(cache=tmp_path).gemm["fp32"] == 2e9


def test_a_disturbed_measurement_is_flagged_and_not_kept(monkeypatch, tmp_path):
    pretend(monkeypatch, 1e9, others=float(facts().physical_cores))
    measured = measure_machine(cache=tmp_path)
    assert measured.disturbed
    assert "disturbed" in peak_flops(measured, "bf16").source
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"gemm": {"fp32": 1}}', '{"gemm": 3}', "\x00"])
def test_a_spoilt_cache_is_measured_again(monkeypatch, tmp_path, content):
    pretend(monkeypatch, 1e9, others=0.0)
    measure_machine(cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text(content)
    assert _load(kept) is None
    pretend(monkeypatch, 3e9, others=0.0)
    assert measure_machine(cache=tmp_path).gemm["bf16"] == 3e9


def test_unwritable_cache_costs_nothing_but_time(monkeypatch, tmp_path):
    pretend(monkeypatch, 1e9, others=0.0)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert measure_machine(cache=blocked / "below").gemm["fp32"] == 1e9


def test_precision_on_cpu_follows_the_measurement(machine):
    fast = choose_precision(machine)
    assert fast.value == "bf16-autocast"
    assert "2.0× fp32" in fast.reason
    slow = choose_precision(replace(machine, gemm={"fp32": 200e9, "bf16": 20e9, "fp16": 1e9}))
    assert slow.value == "fp32"
    # A busy machine's rates say nothing; its instruction sets do.
    busy = replace(machine, disturbance=0.5, facts=replace(machine.facts, features=("avx2",)))
    assert choose_precision(busy).value == "fp32"
    assert choose_precision(replace(busy, facts=replace(busy.facts, features=("amx_bf16",)))).value == "bf16-autocast"


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((9, 0), "bf16-autocast"), ((8, 0), "bf16-autocast"), ((7, 5), "fp16"), ((6, 1), "fp32")],
)
def test_precision_on_gpu_follows_the_capability(machine, capability, precision):
    assert choose_precision(with_gpu(machine, "some GPU", capability)).value == precision


def test_precision_on_a_gpu_that_is_not_there(machine):
    with pytest.raises(UserError, match="no GPU"):
        choose_precision(machine, "cuda")


def test_peak_is_measured_on_cpu_and_from_the_datasheet_on_known_gpus(machine):
    assert peak_flops(machine, "bf16").flops == 400e9
    assert "measured on this CPU" in peak_flops(machine, "bf16").source
    known = with_gpu(machine, "NVIDIA A100-SXM4-80GB", (8, 0))
    assert peak_flops(known, "bf16").flops == pytest.approx(312e12)
    unknown = with_gpu(machine, "NVIDIA Mystery", (9, 0))
    assert peak_flops(unknown, "bf16").flops == 400e9
    assert "NVIDIA Mystery, for which no datasheet peak is known" in peak_flops(unknown, "bf16").source
    with pytest.raises(UserError, match="no fp8 rate"):
        peak_flops(machine, "fp8")


def test_fingerprint_is_json(machine):
    values = json.loads(json.dumps(fingerprint(machine)))
    assert values["torch"] == torch.__version__
    assert values["measured"]["gemm_flops"]["bf16"] == 400e9
