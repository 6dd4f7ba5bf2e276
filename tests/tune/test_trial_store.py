"""The store of trials: what a kill may do to it, and whose outcomes it gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworks.config import UserError, dump_yaml
from modelworks.tune import Outcome, Trial, TrialStore

FACTS = {"config": "x", "dataset": "abc"}
OUTCOMES = [
    Outcome(Trial(1e-3, 0), "finished", 3.25, 3.5, 40, 1.5, "", ((20, 4.0), (40, 3.5))),
    Outcome(Trial(1e-2, 0), "diverged", None, None, 7, 0.5, "the loss rose from 3 to 5"),
    Outcome(Trial(1e-3, 2**62), "finished", 3.125, 3.0, 40, 1.5),
]


def filled(directory: Path) -> TrialStore:
    store = TrialStore(directory)
    store.claim(FACTS)
    for outcome in OUTCOMES:
        store.add(outcome)
    return store


def test_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with TrialStore(tmp_path) as store:
        store.claim(FACTS)
        assert list(store.outcomes.values()) == OUTCOMES


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 10**4))
def test_a_file_cut_anywhere_keeps_its_whole_lines(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("store")
    filled(directory).close()
    content = (directory / "trials.jsonl").read_bytes()
    kept = content[: cut % (len(content) + 1)]
    (directory / "trials.jsonl").write_bytes(kept)
    with TrialStore(directory) as store:
        store.claim(FACTS)
        assert list(store.outcomes.values()) == OUTCOMES[: max(0, kept.count(b"\n") - 1)]
        for outcome in OUTCOMES:
            store.add(outcome)
    rows = [json.loads(line) for line in (directory / "trials.jsonl").read_bytes().splitlines()]
    assert [row["rate"] for row in rows[-3:]] == [outcome.trial.rate for outcome in OUTCOMES]


def test_a_damaged_line_costs_its_own_trial(tmp_path: Path) -> None:
    filled(tmp_path).close()
    lines = (tmp_path / "trials.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"loss": 3.25', b'"loss": null')  # no outcome: it finished without a loss
    lines.insert(3, b"\xff\x00 nonsense\n")
    (tmp_path / "trials.jsonl").write_bytes(b"".join(lines))
    with TrialStore(tmp_path) as store:
        assert list(store.outcomes.values()) == OUTCOMES[1:]


def test_two_searches_at_once_are_refused(tmp_path: Path) -> None:
    with filled(tmp_path), pytest.raises(UserError, match=r"in use by another search \(process \d+ on .*--out"):
        TrialStore(tmp_path)
    TrialStore(tmp_path).close()


def test_trials_of_something_else_are_refused_by_name(tmp_path: Path, tiny_config: Callable[..., Any]) -> None:
    def facts(*overrides: str) -> dict[str, str]:
        return {"config": dump_yaml(tiny_config(*overrides)), "dataset": "abc"}

    with TrialStore(tmp_path) as store:
        store.claim(facts())
        store.add(OUTCOMES[0])
        store.claim(facts())
        with pytest.raises(
            UserError, match=r"something else \(train.global_batch: 4 -> 8\); start over with --overwrite"
        ):
            store.claim(facts("train.global_batch=8"))
        with pytest.raises(UserError, match=r"\(dataset: abc -> other\)"):
            store.claim({**facts(), "dataset": "other"})
    with TrialStore(tmp_path, overwrite=True) as store:
        store.claim(facts("train.global_batch=8"))
        assert not store.outcomes


@pytest.mark.parametrize("first", [b"{}\n", b"not json\n", b'{"format": 99, "digest": "", "facts": {"config": ""}}\n'])
def test_another_file_is_not_taken_for_a_store(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "trials.jsonl").write_bytes(first)
    with pytest.raises(UserError, match="no store of trials that this version reads"):
        TrialStore(tmp_path)
    assert (tmp_path / "trials.jsonl").read_bytes() == first


def test_a_place_that_cannot_be_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="trials cannot be kept here"):
        TrialStore(tmp_path / "file" / "inside")
