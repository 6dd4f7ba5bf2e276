"""The benchmark of accuracy takes any table of its columns, and says what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import plan_accuracy
from benchmarks._plan_sweeps import spearman

HEADER = "layers,hidden,seq,gpu,n_gpus,micro_batch,global_batch_seqs,step_time_s,tp,precision,software\n"


def scored(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str) -> dict[str, object]:
    table = tmp_path / "table.csv"
    table.write_text(HEADER + rows, encoding="utf-8")
    assert plan_accuracy.main([str(table), "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_rows_that_cannot_be_predicted_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = "32,4096,4096,H100,8,1,64,5.0,2,bf16,\n"
    changes = [
        ("H100", "Abacus", "device Abacus is not in the catalogue"),
        ("H100", "A100", "the catalogue has no rate of fp8 for A100-SXM-80GB, only of fp32, bf16, fp16"),
        ("bf16", "int3", "precision: got 'int3', expected one of fp32, bf16, bf16-autocast, fp16, fp8"),
        ("bf16,", "bf16,alpa", "software alpa is not known"),
        (",1,64", ",,64", "no micro_batch"),
        (",1,64", ",one,64", "micro_batch: no number that can be"),
        ("5.0", "nan", "step_time_s: no number that can be"),
        (",2,bf16", ",3,bf16", "tp x pp x cp x dp does not divide the devices"),
    ]
    rows = [
        good.replace(*change[:2]).replace("bf16", "fp8" if "fp8 for" in change[2] else "bf16") for change in changes
    ]
    result = scored(tmp_path, capsys, good + "".join(rows))
    assert result["not_scored"] == {reason: 1 for *_, reason in changes}
    assert result["memory"] == {"rows": 0, "mean_ape": None, "median_ape": None, "worst_ape": None, "by_source": {}}
    step_time = result["step_time"]
    assert isinstance(step_time, dict)
    assert step_time["rows"] == 1
    assert set(step_time) >= {"mean_ape", "median_ape", "worst_ape", "by_source"}


@pytest.mark.parametrize("content", ["", "layers,hidden\n1,2\n", HEADER.replace("step_time_s", "seconds")])
def test_a_table_without_what_is_needed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(content, encoding="utf-8")
    assert plan_accuracy.main([str(table)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {table}: no column ")


def test_ranks() -> None:
    assert spearman(np.array([1.0, 2.0, 3.0, 3.0]), np.array([10.0, 20.0, 40.0, 40.0])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1.0)
