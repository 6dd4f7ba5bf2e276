"""Every sentence about a winner against the numbers and the ranks that it speaks of: experts, several nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from modelworks.config import ModelConfig
from modelworks.hardware import device
from modelworks.layout import Layout
from modelworks.plan import Job, Limits, Search, evaluate, explain, search
from modelworks.plan.explain import _COMPUTE, _EXCHANGES

EXPERTS = ModelConfig(n_layers=12, d_model=2048, n_heads=16, vocab_size=32_000, max_seq_len=4096, n_experts=16,
                      d_expert=1408, experts_per_token=2, d_ff=8192, dense_layers=[0])  # fmt: skip
NODE = 8  # of H100s
PARTS = {"tp": "tensor", "cp": "context", "ep": "experts"}


def found(**fixed: Any) -> Search:
    return search(Job(EXPERTS, device("H100"), 32, 4096, 128), Limits(fixed))


@pytest.fixture(scope="module", params=[{"ep": 4, "tp": 1}, {"ep": 8, "tp": 2, "cp": 2}, {"ep": 16, "pp": 2}], ids=str)
def answer(request: pytest.FixtureRequest) -> Search:
    return found(**request.param)


def test_where_the_ranks_of_an_axis_lie(answer: Search) -> None:
    winner = answer.best[0]
    parallel, parts = winner.candidate.parallel, winner.prediction.parts
    layout, sentences = Layout.of(parallel), explain(answer)
    for axis, part in PARTS.items():
        mine = [text for text in sentences if re.match(rf"(both|all \d+|\d+) ranks of {axis} ", text)]
        ranks = layout.ranks(0, axis)
        assert len(mine) == (len(ranks) > 1)
        for text in mine:
            nodes = [rank // NODE for rank in ranks]
            if len(set(nodes)) == 1:
                assert "lie in one node of 8" in text
            else:
                assert f"go over the network, {nodes.count(0)} of them in each node of 8" in text
            assert f"takes {parts[part]:.2f} s of the step" in text
    if parallel.pp > 1:
        first, second = layout.ranks(0, "pp")[:2]
        where = "lie in one node" if first // NODE == second // NODE else "lie in different nodes"
        assert any(
            f"neighbouring stages of pp {where}" in text and f"{parts['sends']:.2f} s" in text for text in sentences
        )


def test_what_binds_and_by_how_much(answer: Search) -> None:
    winner, sentences = answer.best[0], explain(answer)
    total, parts = winner.prediction.step_seconds, winner.prediction.parts
    (binds,) = [text for text in sentences if " binds" in text]
    shares = {
        name: int(share) for name, share in re.findall(r"(compute|network|waiting in the pipeline) (\d+)%", binds)
    }
    assert shares["compute"] == round(100 * sum(parts[name] for name in _COMPUTE) / total)
    assert shares["network"] == round(100 * sum(parts[name] for name in _EXCHANGES) / total)
    if saved := re.match(r"memory binds: (.*) would save (\d+) ms a step and is ([\d.]+) GB too large", binds):
        (each,) = [each for each in answer.neighbours if each.change == saved[1]]
        assert each.prediction is not None
        assert float(saved[2]) == pytest.approx(1e3 * (total - each.prediction.step_seconds), abs=1.0)
        assert float(saved[3]) == pytest.approx((each.prediction.memory - each.prediction.memory_limit) / 1e9, abs=0.06)


def test_what_neighbours_lack_or_cost(answer: Search) -> None:
    best = answer.best[0].prediction
    for each in answer.neighbours:
        if each.prediction is None:
            assert each.verdict == "refused"
            continue
        assert each.candidate is not None
        again = evaluate(each.candidate, headroom=answer.limits.headroom, timeline=False)
        assert again.fits == (each.verdict != "does not fit")
        if each.verdict == "does not fit":
            needs, over = re.findall(r"([\d.]+) GB", each.why)[:2]
            assert float(needs) == pytest.approx(again.memory / 1e9, abs=0.06)
            assert float(over) == pytest.approx((again.memory - again.memory_limit) / 1e9, abs=0.06)
        else:
            step = again.step_seconds - best.step_seconds
            number, unit = re.match(r"([+-][\d.]+) (ms|s) a step", each.why).groups()  # type: ignore[union-attr]
            assert float(number) * (1e-3 if unit == "ms" else 1.0) == pytest.approx(
                step, abs=5e-4 if unit == "ms" else 5e-3
            )
            assert (each.verdict == "slower") == (again.step_seconds > 1.01 * best.step_seconds)
