"""A run that is killed, stopped or interrupted goes on bit for bit as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import run_warm
from run_files import assert_same_weights, series

from modelworks.checkpoint import Checkpoint
from modelworks.config import UserError, dump_yaml, load_run_config
from modelworks.data import TrainLoader, build_dataset
from modelworks.train import loop, preparation, train
from modelworks.train.stopping import StopRequest


def killed_at(config: str, run_dir: str, number: int, machine: Any) -> None:
    """A run, in a process of its own, that is killed in the middle of a step."""
    real = loop.train_step

    def until(*arguments: Any, step: int, **rest: Any) -> Any:
        if step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, step=step, **rest)

    loop.train_step = until
    train(load_run_config(Path(config)), Path(run_dir), machine=machine)


FP16 = ["train.duration=1 steps", "train.precision=fp16"]
ABSENT = object()


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], Any]) -> None:
    """Do something just before the update of step `number`."""
    real = loop.train_step

    def step(*arguments: Any, step: int, **rest: Any) -> Any:
        if step == number:
            action()
        return real(*arguments, step=step, **rest)

    monkeypatch.setattr(loop, "train_step", step)


def assert_same_run(run_dir: Path, reference: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss"):
        assert series(run_dir, name) == series(reference, name)
    assert_same_weights(run_dir, reference)


@pytest.fixture(scope="module")
def uninterrupted(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    train(tiny_config(), run_dir, machine=tiny_machine)
    return run_dir


def test_killed_and_resumed_equals_uninterrupted(
    tiny_config: Any, tiny_machine: Any, uninterrupted: Path, tmp_path: Path
) -> None:
    config, run_dir = tiny_config(), tmp_path / "run"
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    killed = run_warm(killed_at, str(tmp_path / "config.yaml"), str(run_dir), 5, tiny_machine, where=tmp_path)
    assert killed.code == -signal.SIGKILL, killed.output
    # Five steps ran, the checkpoint is of the evaluation after the fourth.
    assert [step for step, _ in series(run_dir, "train/loss")] == [1, 2, 3, 4, 5]
    result = train(config, run_dir, resume=True, machine=tiny_machine)
    assert result.steps == 8
    assert [step for step, _ in series(run_dir, "train/loss")] == list(range(1, 9))
    assert_same_run(run_dir, uninterrupted)


def test_killed_before_the_first_checkpoint_starts_again(
    tiny_config: Any, tiny_machine: Any, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_step(patch, 1, lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny_config(), run_dir, machine=tiny_machine)
    train(tiny_config(), run_dir, resume=True, machine=tiny_machine)
    assert_same_run(run_dir, uninterrupted)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 5), (signal.SIGINT, 5), (signal.SIGTERM, 4)])
def test_a_signal_finishes_the_step_saves_and_can_be_resumed(
    number: signal.Signals, step: int, tiny_config: Any, tiny_machine: Any, uninterrupted: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, step - 1, lambda: os.kill(os.getpid(), number))
        result = train(tiny_config(), run_dir, machine=tiny_machine)
    assert (result.stopped_by, result.steps) == (number.name, step)
    assert result.checkpoint is not None
    assert result.checkpoint.endswith(f"step-0000000{step}")
    assert not (run_dir / "summary.json").exists()
    assert signal.getsignal(number) is before
    train(tiny_config(), run_dir, resume=True, machine=tiny_machine)
    assert_same_run(run_dir, uninterrupted)


def test_a_second_interrupt_stops_at_once() -> None:
    request = StopRequest()
    request(signal.SIGTERM, None)
    request(signal.SIGTERM, None)  # a scheduler may repeat itself
    assert request.signal is signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        request(signal.SIGINT, None)


def test_a_longer_duration_goes_on_and_other_changes_are_refused(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config("train.duration=4 steps"), run_dir, machine=tiny_machine)
    for change in ("optimizer.lr=0.5", "data.seq_len=16", "train.global_batch=8", "seed=1"):
        with pytest.raises(UserError, match=change.split("=")[0]):
            train(tiny_config("train.duration=6 steps", change), run_dir, resume=True, machine=tiny_machine)
    assert [step for step, _ in series(run_dir, "train/loss")] == [1, 2, 3, 4]
    result = train(tiny_config("train.duration=6 steps"), run_dir, resume=True, machine=tiny_machine)
    assert result.steps == 6
    assert [step for step, _ in series(run_dir, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert "6 steps" in (run_dir / "config.yaml").read_text()


def test_a_resumed_run_keeps_the_choices_made_for_auto(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    run_dir = tmp_path / "run"
    config = tiny_config("train.duration=2 steps", "train.precision=auto", "checkpoint.every=auto")
    train(config, run_dir, machine=tiny_machine)
    faster = replace(tiny_machine, gemm={"fp32": 1e11, "bf16": 9e11, "fp16": 1e9})
    longer = tiny_config("train.duration=3 steps", "train.precision=auto", "checkpoint.every=auto")
    assert preparation.derive(longer, faster).precision.name == "bf16-autocast"
    train(longer, run_dir, resume=True, machine=faster)
    assert "precision: fp32" in (run_dir / "config.yaml").read_text()


def test_resuming_a_finished_run_changes_nothing(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = train(tiny_config("train.duration=4 steps"), run_dir, machine=tiny_machine)
    again = train(tiny_config("train.duration=4 steps"), run_dir, resume=True, machine=tiny_machine)
    assert (again.steps, again.val_loss, again.checkpoint) == (first.steps, first.val_loss, first.checkpoint)


EXACT = {
    "bf16": ["train.precision=bf16", "train.micro_batch=1"],
    "bf16-autocast": ["train.precision=bf16-autocast"],
    # The scale doubles after every good step, so that a resumed run which forgot it would be seen.
    "fp16": ["train.precision=fp16", "train.loss_scale.initial=1024", "train.loss_scale.growth_interval=1"],
    "dropout": ["model.dropout=0.2", "model.attention_dropout=0.2"],
    "recomputed": ["train.recompute=full", "model.dropout=0.2", "train.micro_batch=2"],
}


@pytest.mark.parametrize("case", EXACT)
def test_every_kind_of_state_resumes_exactly(case: str, tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    common = [*EXACT[case], "schedule.name=constant", "evaluate.every=2 steps"]
    train(tiny_config(*common, "train.duration=4 steps"), tmp_path / "whole", machine=tiny_machine)
    train(tiny_config(*common, "train.duration=2 steps"), tmp_path / "parts", machine=tiny_machine)
    train(tiny_config(*common, "train.duration=4 steps"), tmp_path / "parts", resume=True, machine=tiny_machine)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert series(tmp_path / "parts", "train/loss_scale") == series(tmp_path / "whole", "train/loss_scale")


def test_weights_of_the_mixture_change_on_resume_and_no_sample_is_lost(
    tiny_config: Any, tiny_texts: Path, tiny_machine: Any, tmp_path: Path
) -> None:
    sources = [
        {"name": name, "type": "text", "path": f"{tiny_texts}/{part}*.txt"} for name, part in (("a", 0), ("b", 1))
    ]
    two = [f"data.sources={json.dumps(sources)}", "train.global_batch=4"]
    changed = "data.mixture_changes=" + json.dumps([{"at": 16, "weights": {"a": 1, "b": 3}}])
    run_dir = tmp_path / "run"
    train(tiny_config(*two, "train.duration=4 steps"), run_dir, machine=tiny_machine)
    too_early = changed.replace("16", "12")
    with pytest.raises(UserError, match="the first 16 samples are drawn already"):
        train(tiny_config(*two, "train.duration=8 steps", too_early), run_dir, resume=True, machine=tiny_machine)

    seen: list[tuple[int, int]] = []
    config = tiny_config(*two, "train.duration=8 steps", changed)
    train(config, run_dir, resume=True, machine=tiny_machine)
    assert series(run_dir, "data/a/samples") == [(4, 8.0), (8, 12.0)]
    assert series(run_dir, "data/b/samples") == [(4, 8.0), (8, 20.0)]
    loader = TrainLoader(build_dataset(config.data, progress=False), config.data, config.seed, 4)
    before = TrainLoader(build_dataset(config.data, progress=False), tiny_config(*two).data, config.seed, 4)
    for step in range(8):
        drawn = before.places(step) if step < 4 else loader.places(step)
        seen += zip(*(part.tolist() for part in drawn), strict=True)
    # Each source went on from where it was: its first samples, each once, in the order without any change.
    for source, count in ((0, 12), (1, 20)):
        windows = [start for which, start in seen if which == source]
        alone = [
            start for step in range(20) for which, start in zip(*before.places(step), strict=True) if which == source
        ]
        assert windows == alone[:count]


def test_texts_that_changed_are_refused(tiny_config: Any, tiny_machine: Any, tiny_texts: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    shutil.copytree(tiny_texts, texts)
    changes = ["train.duration=2 steps", f"data.sources.0.path={texts}/*.txt"]
    train(tiny_config(*changes), tmp_path / "run", machine=tiny_machine)
    (texts / "000.txt").write_text("something else entirely")
    with pytest.raises(UserError, match="the texts or the tokenizer changed since"):
        train(tiny_config(*changes), tmp_path / "run", resume=True, machine=tiny_machine)


def test_another_best_metric_is_not_compared_with_the_old(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """A perplexity is far above any loss: the old best would never be beaten, and nothing saved as best."""
    run_dir = tmp_path / "run"
    rarely = ["checkpoint.every=100 steps", "evaluate.every=2 steps", "schedule.name=constant"]
    train(tiny_config(*rarely, "train.duration=2 steps"), run_dir, machine=tiny_machine)
    other = "evaluate.best_metric=val_perplexity"
    train(tiny_config(*rarely, "train.duration=5 steps", other), run_dir, resume=True, machine=tiny_machine)
    assert (run_dir / "checkpoints" / "step-00000004").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"updates": "many"}, "`state.updates` is 'many', expected a whole number from 0 to its 1 steps"),
        ({"updates": -5}, "`state.updates` is -5"),
        ({"updates": 0.5}, "`state.updates` is 0.5"),
        ({"updates": 2}, "`state.updates` is 2"),
        ({"updates": ABSENT}, "`state.updates` is missing from its manifest"),
        ({"best": 3}, "`state.best` is 3, expected null or"),
        ({"best": {"value": math.nan, "step": 1}}, "`state.best` is"),
        ({"best": {"value": 1.5}}, "`state.best.step` is None"),
        ({"loss_scaler": {}}, "`state.loss_scaler` is {}, expected"),
    ],
)
def test_a_training_state_that_makes_no_sense_is_one_line(
    change: dict[str, Any], words: str, fp16_run: Path, tiny_config: Any, tiny_machine: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = Checkpoint.state.func  # type: ignore[attr-defined]

    def changed(checkpoint: Checkpoint) -> dict[str, Any]:
        return {key: value for key, value in {**real(checkpoint), **change}.items() if value is not ABSENT}

    monkeypatch.setattr(Checkpoint, "state", property(changed))
    with pytest.raises(UserError, match=f"its training state cannot be used here: {re.escape(words)}"):
        train(tiny_config(*FP16), fp16_run, resume=True, machine=tiny_machine)


@pytest.fixture(scope="module")
def fp16_run(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "fp16"
    train(tiny_config(*FP16), run_dir, machine=tiny_machine)
    return run_dir
