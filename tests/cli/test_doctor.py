import json

import pytest

from modelworks.cli import doctor
from modelworks.cli.main import main
from modelworks.hardware import Machine, facts


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    gemm = {"fp32": 200e9, "bf16": 400e9, "fp16": 1e9}
    machine = Machine(facts(), "cpu", "2.13.0", 1, gemm, 50e9, "2026-01-01T00:00:00+00:00", 0.4)
    calls = []

    def measure(**options):
        calls.append(options)
        return machine

    monkeypatch.setattr(doctor, "measure_machine", measure)
    return calls


def test_tables_name_the_machine_the_rates_and_the_choices(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for text in ("cores", "400 GFLOP/s", "2× fp32", "bf16-autocast", "MFU is measured against"):
        assert text in shown


def test_json_is_the_last_line(capsys, measured):
    assert main(["doctor", "--json", "--measure"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["machine"]["gemm"]["bf16"] == 400e9
    assert result["chosen"]["precision"]["value"] == "bf16-autocast"
    assert measured[0]["refresh"] is True


def test_traps_are_named(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "compiler", lambda: (None, "no C++ compiler found"))
    monkeypatch.setattr(doctor, "LOW_DISK", 10**18)
    assert main(["doctor", "--json"]) == 0
    warnings = " ".join(json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"])
    assert "compile: true` will fail: no C++ compiler found" in warnings
    assert "checkpoints may not fit" in warnings
    assert "idle machine" in warnings
