"""Finding a run's rate and batch: how they scale, what the gradients' noise says, and short runs that try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.tune.coordinates import CoordinateCheck as CoordinateCheck
    from modelworks.tune.coordinates import check_coordinates as check_coordinates
    from modelworks.tune.critical_batch import CriticalBatch as CriticalBatch
    from modelworks.tune.critical_batch import examples_factor as examples_factor
    from modelworks.tune.critical_batch import read_critical_batch as read_critical_batch
    from modelworks.tune.critical_batch import steps_factor as steps_factor
    from modelworks.tune.local import LocalRunner as LocalRunner
    from modelworks.tune.plot import text_rows as text_rows
    from modelworks.tune.proposal import Proposal as Proposal
    from modelworks.tune.proposal import propose as propose
    from modelworks.tune.rate_finder import TrialsFailed as TrialsFailed
    from modelworks.tune.rate_finder import find_rate as find_rate
    from modelworks.tune.rate_records import write_rate_records as write_rate_records
    from modelworks.tune.ray_trials import RayRunner as RayRunner
    from modelworks.tune.scaling import scale_factor as scale_factor
    from modelworks.tune.scaling import scale_rate as scale_rate
    from modelworks.tune.search import Search as Search
    from modelworks.tune.setup import Setup as Setup
    from modelworks.tune.setup import prepare_trials as prepare_trials
    from modelworks.tune.store import TrialStore as TrialStore
    from modelworks.tune.trials import Outcome as Outcome
    from modelworks.tune.trials import Trial as Trial
    from modelworks.tune.widths import at_width as at_width

_HOME = {
    "CoordinateCheck": "coordinates",
    "CriticalBatch": "critical_batch",
    "LocalRunner": "local",
    "Outcome": "trials",
    "Proposal": "proposal",
    "RayRunner": "ray_trials",
    "Search": "search",
    "Setup": "setup",
    "Trial": "trials",
    "TrialStore": "store",
    "TrialsFailed": "rate_finder",
    "at_width": "widths",
    "check_coordinates": "coordinates",
    "examples_factor": "critical_batch",
    "find_rate": "rate_finder",
    "prepare_trials": "setup",
    "propose": "proposal",
    "read_critical_batch": "critical_batch",
    "scale_factor": "scaling",
    "scale_rate": "scaling",
    "steps_factor": "critical_batch",
    "text_rows": "plot",
    "write_rate_records": "rate_records",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)
