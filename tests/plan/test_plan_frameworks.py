"""Which framework: what is ruled out is never advised, every job gets one answer where any is possible."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworks.hardware import Vendor
from modelworks.plan.frameworks import FRAMEWORKS, JobFacts, Task, frameworks_for

AXES = ("tp", "pp", "cp", "ep")
FACTS = st.builds(
    JobFacts,
    task=st.sampled_from(get_args(Task)),
    parameters=st.floats(1e6, 1e13),
    n_devices=st.integers(1, 2**20),
    vendor=st.sampled_from(get_args(Vendor)),
    axes=st.frozensets(st.sampled_from(AXES)),
    experts=st.booleans(),
    offload=st.sampled_from(["none", "cpu", "nvme"]),
)


@given(FACTS)
def test_advice_keeps_to_the_facts(facts: JobFacts) -> None:
    advice = frameworks_for(facts)
    assert sorted(each.framework for each in advice) == sorted(each.name for each in FRAMEWORKS)
    by_name = {each.name: each for each in FRAMEWORKS}
    for each in advice:
        framework = by_name[each.framework]
        can = (
            facts.task in framework.tasks
            and facts.vendor in framework.vendors
            and facts.axes <= set(framework.axes.split())
            and facts.offload in framework.offload
        )
        assert (each.fit != "not for this") == can
        assert each.reason
        assert each.source
    fits = [each.fit for each in advice]
    assert fits.count("first choice") == any(fit != "not for this" for fit in fits)
    assert fits == sorted(fits, key=("first choice", "possible", "not for this").index)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (JobFacts("pretraining", 8e9, 8), "FSDP"),
        (JobFacts("pretraining", 70e9, 128, axes=frozenset({"tp"})), "torchtitan"),
        (JobFacts("pretraining", 70e9, 1024, axes=frozenset({"tp", "pp"})), "Megatron"),
        (JobFacts("pretraining", 47e9, 64, axes=frozenset({"ep"}), experts=True), "Megatron"),
        (JobFacts("pretraining", 47e9, 64, "amd", axes=frozenset({"ep"}), experts=True), "torchtitan"),
        (JobFacts("pretraining", 70e9, 512, "google"), "MaxText"),
        (JobFacts("pretraining", 1e12, 64, offload="nvme"), "DeepSpeed"),
        (JobFacts("pretraining", 15e6, 1, "cpu"), "Modelworks"),
        (JobFacts("fine-tuning", 8e9, 1), "LLaMA-Factory"),
        (JobFacts("reinforcement learning", 7e9, 8), "OpenRLHF"),
        (JobFacts("reinforcement learning", 671e9, 256, axes=frozenset({"ep", "pp"}), experts=True), "veRL"),
    ],
)
def test_known_jobs(facts: JobFacts, expected: str) -> None:
    assert frameworks_for(facts)[0].framework == expected


def test_we_say_what_never_ran() -> None:
    ours = next(each for each in frameworks_for(JobFacts("pretraining", 8e9, 8)) if each.framework == "Modelworks")
    assert ours.fit == "possible"
    assert "never run on CUDA" in ours.reason
