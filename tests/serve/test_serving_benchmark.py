"""The arithmetic of the serving benchmark: what counts as decoding, and its tables."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import _results, _serve_tables
from benchmarks._serve_engines import engines
from benchmarks._serve_offline import CASES, decode_rate


def test_decoding_counts_while_all_decode() -> None:
    # The second begins at 3 s and the first ends at 6 s: three tokens of each come after 3 s and until 6 s.
    assert decode_rate([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3.0, 4.0, 5.0, 6.0, 7.0]]) == pytest.approx(6 / 3)


def test_tables_hold_medians_and_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    marks = ["<!-- measured: offline -->", "old", "<!-- end -->", "<!-- measured: targets -->", "<!-- end -->"]
    page.write_text("\n".join(["before", *marks, "after", ""]))
    monkeypatch.setattr(_serve_tables, "PAGE", page)
    monkeypatch.setattr(_serve_tables, "write_results", partial(_results.write_results, directory=tmp_path))
    monkeypatch.setattr(sys, "argv", ["serve.py"])

    def row(engine: str, case: str, number: int, figures: Any, phase: str = "offline") -> dict[str, Any]:
        return {"phase": phase, "engine": engine, "case": case, "round": number, "figures": figures}

    rows = [row("", "bandwidth", 0, 26.9030016e9, "machine")]
    for number, factor in enumerate((1.0, 3.0, 2.0)):
        rows += [row("modelworks-native", case, number, 40.0 * factor) for case in CASES]
        rows += [row("llama.cpp-bf16", case, number, 50.0) for case in CASES]
        rows += [row("llama.cpp-q4_1", case, number, 500.0) for case in CASES]
    _serve_tables.write_report(rows, engines(tmp_path, 2), 2)
    text = page.read_text()
    assert text.startswith("before\n<!-- measured: offline -->\n| engine, weights |")
    assert "old" not in text
    assert "| **Modelworks, compiled steps, bf16** | 80 (120) | 80 (120) |" in text
    assert "| decode 8, tokens/s | 80.0 | 50.0 (llama.cpp-bf16) | **1.60** | 1.2 |" in text
    assert "100 tokens/s at batch 1 and no more; modelworks-native reaches 120 % of it" in text
    results = json.loads((tmp_path / "serve.json").read_text())["results"]
    assert results["offline"]["decode 1"]["llama.cpp-bf16"]["best"] == 50
