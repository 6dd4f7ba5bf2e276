"""What may change on resume, and what differs between two configurations."""

from __future__ import annotations

from typing import Any

import pytest

from modelworks.config import MAY_CHANGE, RunConfig, UserError, differences, parse_run_config, resume_differences
from modelworks.config.keys import key_paths

BASE = """
model: llama-tiny
data:
  sources: [{name: a, type: text, path: a}, {name: b, type: text, path: b}]
  mixture_changes: [{at: 640, weights: {a: 1, b: 0}}]
train: {duration: 100 steps}
"""


def run(*overrides: str) -> RunConfig:
    return parse_run_config(BASE, "run.yaml", overrides)


def resume(*overrides: str, step: int = 10, **more: Any) -> dict[str, str]:
    changes = resume_differences(run(), run(*overrides), step=step, **more)
    assert all(change.reason for change in changes)
    return {change.key: str(change) for change in changes}


def test_no_change() -> None:
    assert resume() == {}


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "train.duration=200 steps",
        "train.micro_batch=4",
        "train.recompute=full",
        "train.compile=true",
        "train.device=cpu",
        "train.log_every=1",
        "data.workers=3",
        "data.cache=/elsewhere",
        "checkpoint.keep_last=9",
        "evaluate.every=3 steps",
        "evaluate.prompts=[x, y]",
        "init_from=elsewhere",
    ],
)
def test_allowed(override: str) -> None:
    assert list(resume(override)) == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("seed=1", "order of samples"),
        ("model.n_layers=4", "other model"),
        ("data.seq_len=128", "samples the next steps see"),
        ("data.tokenizer.vocab_size=4096", "other tokens"),
        ("data.sources.0.weight=3", "samples the next steps see"),
        ("train.global_batch=32", "had other sizes"),
        ("train.precision=bf16", "other precision"),
        ("train.grad_clip=2", "other setting"),
        ("optimizer.lr=1", "other setting"),
        ("schedule.warmup=5%", "other schedule"),
    ],
)
def test_refused(override: str, reason: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"cannot resume at step 10 .*\n  {key}: .* -> .* - .*{reason}"):
        resume(override)


def test_every_refusal_is_listed() -> None:
    with pytest.raises(UserError) as caught:
        resume("seed=1", "optimizer.lr=1", "train.compile=true")
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:3]] == ["seed", "optimizer.lr"]


def test_a_run_cannot_end_before_it_is() -> None:
    assert resume("train.duration=10 steps", total_steps=10)
    with pytest.raises(UserError, match="10 steps are done and the new duration is 9"):
        resume("train.duration=9 steps", total_steps=9)


def test_the_mixture_may_change_only_where_nothing_is_drawn() -> None:
    later = "data.mixture_changes=[{at: 640, weights: {a: 0, b: 1}}]"
    assert set(resume(later, step=10)) == {"data.mixture_changes.0.weights.a", "data.mixture_changes.0.weights.b"}
    assert resume("data.mixture_changes=[]", step=10)
    with pytest.raises(UserError, match="the first 704 samples are drawn already"):
        resume(later, step=11)
    with pytest.raises(UserError, match="the first 704 samples are drawn already"):
        resume("data.mixture_changes=[]", step=11)
    with pytest.raises(UserError, match="drawn already"):
        resume("data.mixture_changes=[{at: 630, weights: {a: 0, b: 1}}, {at: 640, weights: {a: 1, b: 0}}]", step=10)


def test_what_may_change_names_real_keys() -> None:
    keys = {path for path, _ in key_paths()}
    assert all(pattern.removesuffix(".*") in keys for pattern in MAY_CHANGE)


def test_differences() -> None:
    found = differences(run(), run("optimizer.lr=0.5", "data.sources.1.weight=2", "evaluate.tasks=[arc_easy]"))
    assert [(item.key, item.before, item.after) for item in found] == [
        ("data.sources.1.weight", 1.0, 2.0),
        ("optimizer.lr", 3e-4, 0.5),
        ("evaluate.tasks", [], ["arc_easy"]),
    ]
    assert str(found[0]) == "data.sources.1.weight: 1.0 -> 2.0"


def test_a_key_without_effect_is_no_difference() -> None:
    wide = {"loss_scale": {"initial": 2.0}, "precision": "fp32"}
    before, after = (
        run().model_copy(update={"train": RunConfig.model_validate({"model": "llama-tiny", "train": train}).train})
        for train in ({"precision": "fp32"}, wide)
    )
    assert [item.key for item in differences(before, after)] == []
    fp16 = after.model_copy(update={"train": after.train.model_copy(update={"precision": "fp16"})})
    assert [item.key for item in differences(before, fp16)] == ["train.precision", "train.loss_scale.initial"]
