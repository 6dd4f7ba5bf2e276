"""Pages about runs, from their records alone."""

from __future__ import annotations

from modelworks.report.comparison import write_comparison
from modelworks.report.coordinates_page import write_coordinates
from modelworks.report.load_page import write_load
from modelworks.report.noise_page import write_noise
from modelworks.report.plan_page import write_plan
from modelworks.report.rates import write_rates
from modelworks.report.run_report import write_report

__all__ = [
    "write_comparison",
    "write_coordinates",
    "write_load",
    "write_noise",
    "write_plan",
    "write_rates",
    "write_report",
]
