"""Lower bounds of a pipeline's step and what its ranks keep, against the simulated schedules themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.layout import V_SHAPED
from modelworks.layout.pipeline import FULL_GRADIENT, Costs, compute_orders
from modelworks.plan.bounds import least_seconds
from modelworks.plan.columns import SCHEDULES
from modelworks.plan.held import most_held
from modelworks.plan.pipeline import Sends, simulated, stage_costs
from modelworks.plan.placements import Pipeline

TIMES = st.floats(0.0, 3.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipeline, tuple[int, ...]]:
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 5))
    virtual = draw(st.integers(2, 3)) if schedule.startswith("interleaved") else 1
    count = pp * (2 if schedule in V_SHAPED else virtual)
    counts = tuple(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    return Pipeline(pp, SCHEDULES.index(schedule), virtual, draw(st.integers(1, 23))), counts


@settings(max_examples=150, deadline=None)
@given(pipelines(), st.tuples(TIMES, TIMES, TIMES), st.tuples(TIMES, TIMES, TIMES), st.tuples(TIMES, TIMES))
def test_no_step_is_shorter_than_its_bound(
    drawn: tuple[Pipeline, tuple[int, ...]],
    layer: tuple[float, ...],
    head: tuple[float, ...],
    sends: tuple[float, ...],
) -> None:
    pipeline, counts = drawn
    costs = stage_costs(layer, head, Sends(*sends), counts)
    whole = simulated(pipeline.name, costs, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual).makespan
    columns = (np.array(values)[:, None] for values in (layer, head, sends))
    bound = float(least_seconds(pipeline, counts, *columns)[0])
    assert bound <= whole * (1.0 + 1e-9) + 1e-12


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_even_stages_reach_their_bound(schedule: str, virtual: int) -> None:
    pipeline, counts = Pipeline(4, SCHEDULES.index(schedule), virtual, 16), (2,) * 4 * virtual
    bound = least_seconds(pipeline, counts, np.ones((3, 1)), np.zeros((3, 1)), np.zeros((2, 1)))
    costs = Costs(*((2.0,) * 4 * virtual for _ in range(3)), send=0.0)
    assert float(bound[0]) == pytest.approx(simulated(schedule, costs, 4, 16, virtual).makespan)


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_a_rank_keeps_what_its_order_says(drawn: tuple[Pipeline, tuple[int, ...]]) -> None:
    pipeline, counts = drawn
    orders = compute_orders(pipeline.name, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual)
    expected = []
    for order in orders:
        signs = [counts[stage] * ((kind == "forward") - (kind in FULL_GRADIENT)) for kind, stage, _ in order]
        expected.append(float(np.max(np.cumsum(signs), initial=0.0)))
    found = most_held(pipeline.name, counts, pipeline.pp, pipeline.n_micro_batches, pipeline.virtual)
    assert list(found) == expected
