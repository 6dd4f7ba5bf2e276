"""The page of a coordinate check: how the size of each activation, and its change, goes with the width.

Made from the one object that `modelworks tune coordinates --json` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelworks.report.page import write_page
from modelworks.report.plan_charts import LogAxis

_WIDTH, _HEIGHT, _LEFT, _BELOW = 460, 230, 56, 30


def write_coordinates(path: Path, answer: Mapping[str, Any]) -> Path:
    """Write the page; one self-contained file. Returns its path. Raises OSError where it cannot be written."""
    base = answer["base_width"]
    kind = "standard parametrisation" if base is None else f"µP, base width {base}"
    return write_page(
        path,
        "coordinates.html",
        title=f"Coordinate check: {kind}",
        subtitle=" · ".join(
            [
                f"{answer['steps']} steps",
                f"{answer['optimizer']} at a rate of {answer['lr']:g}",
                f"widths {', '.join(map(str, answer['widths']))}",
                f"a mean of {answer['seeds']} initialisations",
            ]
        ),
        passed=answer["passed"],
        tolerance=answer["tolerance"],
        charts=[_chart(answer["widths"], trend, answer["activations"][trend["name"]]) for trend in answer["trends"]],
        rows=[[t["name"], _power(t["size"]), _power(t["change"]), t["problem"] or "–"] for t in answer["trends"]],
    )


def _power(exponent: float | None) -> str:
    return "not finite" if exponent is None else f"{exponent:+.2f}"


def _chart(widths: Sequence[int], trend: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Three lines over the width, both axes logarithmic. sizes: of each width, before and after each step."""
    lines = [
        ("size before the first step", 5, [each["sizes"][0] for each in sizes]),
        ("size after the last", 0, [each["sizes"][-1] for each in sizes]),
        ("change", 1, [each["changes"][-1] for each in sizes]),
    ]
    shown = [value for _, _, values in lines for value in values if _drawable(value)]
    across = LogAxis(widths, _LEFT, _WIDTH - 12)
    up = LogAxis(shown or [1.0], _HEIGHT - _BELOW, 10)
    return {
        "title": trend["name"],
        "problem": trend["problem"],
        "width": _WIDTH,
        "height": _HEIGHT,
        "bottom": _HEIGHT - _BELOW,
        "left": _LEFT,
        "x_ticks": [{"at": across.at(width), "text": f"{width:,}"} for width in widths],
        "y_ticks": [{"at": up.at(value), "text": f"{value:.3g}"} for value in up.ticks()],
        "lines": [
            {
                "label": label,
                "colour": colour,
                "points": [
                    {"x": across.at(width), "y": up.at(value), "title": f"width {width}: {value:.4g}"}
                    for width, value in zip(widths, values, strict=True)
                    if _drawable(value)
                ],
            }
            for label, colour, values in lines
        ],
    }


def _drawable(value: float | None) -> bool:
    return value is not None and value > 0 and math.isfinite(value)
