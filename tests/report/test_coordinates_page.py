"""The page of a coordinate check: whole, and drawn also where a number is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from page_checks import check_page

from modelworks.report import write_coordinates


def answer(**changes: Any) -> dict[str, Any]:
    sizes = [{"width": width, "sizes": [1.0, width / 64], "changes": [width / 128]} for width in (64, 128, 256)]
    stuck = [{**each, "changes": [0.0]} for each in sizes]
    return {
        "passed": False, "base_width": None, "optimizer": "adamw", "lr": 1e-3, "widths": [64, 128, 256], "steps": 1,
        "seeds": 3, "rows": 8, "tolerance": 0.3,
        "trends": [
            {"name": "logits", "size": 1.0, "change": 1.0, "problem": "its size grows as width^1.00"},
            {"name": "<b>blocks.0</b>", "size": 1.0, "change": None, "problem": ""},
        ],
        "activations": {"logits": sizes, "<b>blocks.0</b>": stuck},
    } | changes  # fmt: skip


def test_every_activation_is_drawn(tmp_path: Path) -> None:
    page = check_page(write_coordinates(tmp_path / "page.html", answer()))
    assert page.tags.count("svg") == 2
    assert page.tags.count("circle") == 3 * 3 + 2 * 3
    assert "standard parametrisation" in page.text
    assert "not finite" in page.text
    assert "does not prove" in page.text
