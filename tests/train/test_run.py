"""A whole small run: what it leaves behind, what it refuses, and what it survives."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_files import newest

from modelworks.checkpoint import best_checkpoint, open_model, open_storage
from modelworks.checkpoint.faults import at_each_point
from modelworks.config import UserError, load_run_config, training_flops_per_token
from modelworks.data import build_dataset
from modelworks.records import Record, read_records
from modelworks.train import TrainingFailed, assembly, hooks, job, loop, preparation, train
from modelworks.train.recording import RunLog
from modelworks.train.run_directory import clear, cut_records, locked


def records(run_dir: Path) -> list[Record]:
    return list(read_records(run_dir / "records.jsonl"))


def values(run_dir: Path, name: str) -> list[float]:
    return [float(record.value) for record in records(run_dir) if record.name == name]


@pytest.fixture(scope="module")
def finished(tiny_config: Any, tiny_machine: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    config = tiny_config("evaluate.samples=1", "evaluate.prompts=['the cat']", "train.micro_batch=2")
    return run_dir, train(config, run_dir, machine=tiny_machine)


def test_it_learns_and_says_so(finished: tuple[Path, Any]) -> None:
    run_dir, result = finished
    losses = values(run_dir, "train/loss")
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(304), abs=0.5)
    assert losses[-1] < losses[0] - 0.3
    assert result.train_loss == losses[-1]
    assert result.steps == 8
    assert result.tokens == 8 * 4 * 32
    assert result.val_loss == values(run_dir, "val/loss")[-1]
    assert set(result.baselines) == {"bz2", "xz"}


def test_every_step_is_recorded(finished: tuple[Path, Any], tiny_config: Any) -> None:
    run_dir, _ = finished
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu"):
        assert len(values(run_dir, f"train/{name}")) == 8
    flops = training_flops_per_token(tiny_config().model, 32).training
    for speed, mfu in zip(values(run_dir, "train/tokens_per_second"), values(run_dir, "train/mfu"), strict=True):
        assert mfu == pytest.approx(speed * flops / 1e11)
    resident, peak = values(run_dir, "memory/resident"), values(run_dir, "memory/peak")
    assert all(0 < now <= most for now, most in zip(resident, peak, strict=True))


def test_what_is_known_beforehand_is_recorded(finished: tuple[Path, Any]) -> None:
    run_dir, _ = finished
    (predicted,) = values(run_dir, "predicted/parameters")
    assert [predicted] == values(run_dir, "model/parameters")
    assert values(run_dir, "baseline/bz2_bits_per_byte")
    parts = [value for part in ("parameters", "gradients", "optimizer", "activations", "loss")
             for value in values(run_dir, f"predicted/memory_{part}")]  # fmt: skip
    assert values(run_dir, "predicted/memory_total") == [sum(parts)]
    decisions = {json.loads(str(r.value))["key"] for r in records(run_dir) if r.name == "decision"}
    assert {"total steps", "warmup steps", "accumulation", "MFU denominator"} <= decisions


def test_evaluation_gives_bits_per_byte_and_samples(finished: tuple[Path, Any]) -> None:
    run_dir, _ = finished
    found = {record.name: record for record in records(run_dir)}
    assert [r.step for r in records(run_dir) if r.name == "val/loss"] == [4, 8]
    assert float(found["val/perplexity"].value) == pytest.approx(math.exp(float(found["val/loss"].value)))
    sample = json.loads(str(found["sample"].value))
    assert sample["prompt"] == "the cat"
    assert values(run_dir, "data/words/samples") == [16, 32]


def test_the_resolved_configuration_reruns_the_run(
    finished: tuple[Path, Any], tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir, _ = finished
    config = load_run_config(run_dir / "config.yaml")
    assert config.train.micro_batch == 2
    train(config, tmp_path / "again", machine=tiny_machine)
    assert values(tmp_path / "again", "train/loss") == values(run_dir, "train/loss")


def test_tensorboard_events_hold_the_losses(finished: tuple[Path, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, _ = finished
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(values(run_dir, "train/loss"))


def test_evaluating_disturbs_nothing(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(tiny_config("evaluate.every=1 steps", "evaluate.samples=2"), tmp_path / "often", machine=tiny_machine)
    train(tiny_config("evaluate.every=100 steps"), tmp_path / "rarely", machine=tiny_machine)
    assert values(tmp_path / "often", "train/loss") == values(tmp_path / "rarely", "train/loss")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_best_checkpoint_is_kept_and_is_the_one_evaluated(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelworks.train import hooks
    from modelworks.train.evaluation.validation import TextScore

    scripted = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(hooks, "score_split", lambda *a, **k: TextScore(next(scripted), 10, 10))
    config = tiny_config("evaluate.every=2 steps", "checkpoint.keep_last=1", "checkpoint.every=1 steps")
    train(config, tmp_path / "run", machine=tiny_machine)
    directory = tmp_path / "run" / "checkpoints"
    assert best_checkpoint(open_storage(directory), "val_loss", "min") == "step-00000004"
    best = directory / "step-00000004"
    assert open_model(f"{tmp_path / 'run'}@best").origin == f"checkpoint {best} (step 4)"
    assert {path.name for path in directory.glob("step-*")} == {"step-00000004", "step-00000008"}


def test_an_existing_run_is_not_touched_without_being_told(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any
) -> None:
    run_dir, _ = finished
    before = (run_dir / "records.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"already holds a run; go on with --resume, start over with --overwrite"):
        train(tiny_config(), run_dir, machine=tiny_machine)
    with pytest.raises(UserError, match="exclude each other"):
        train(tiny_config(), run_dir, resume=True, overwrite=True, machine=tiny_machine)
    assert (run_dir / "records.jsonl").read_bytes() == before


def test_overwrite_starts_over_and_leaves_other_files(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """Checkpoints may lie on another disk, through a link: there they are replaced, and the link stays."""
    run_dir = tmp_path / "run"
    (tmp_path / "large-disk").mkdir()
    run_dir.mkdir()
    (run_dir / "checkpoints").symlink_to(tmp_path / "large-disk")
    train(tiny_config("train.duration=3 steps"), run_dir, machine=tiny_machine)
    (run_dir / "notes.txt").write_text("mine")
    train(tiny_config("train.duration=2 steps"), run_dir, overwrite=True, machine=tiny_machine)
    assert len(values(run_dir, "train/loss")) == 2
    assert [path.name for path in (tmp_path / "large-disk").glob("step-*")] == ["step-00000002"]
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_overwrite_removes_nothing_before_the_new_run_is_sure(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(tiny_config("train.duration=1 steps"), run_dir, machine=tiny_machine)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != "lock"}
    for mistake in ("data.sources.0.path=/nowhere/*.txt", "evaluate.best_metric=beauty", "init_from=nothing"):
        with pytest.raises(UserError):
            train(tiny_config(mistake), run_dir, overwrite=True, machine=tiny_machine)
    assert {path: path.read_bytes() for path in before} == before


def test_overwrite_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "large-disk"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").symlink_to(elsewhere)
    clear(tmp_path / "run")
    assert not (tmp_path / "run" / "profile").is_symlink()
    assert (elsewhere / "precious").exists()


def test_a_place_where_no_run_can_be_kept_is_refused(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a run cannot be kept here"):
        train(tiny_config(), tmp_path / "file" / "run", machine=tiny_machine)


def test_steps_to_keep_are_saved_even_between_checkpoints(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    config = tiny_config("checkpoint.every=4 steps", "checkpoint.keep_every=3 steps", "checkpoint.keep_last=1",
                         "evaluate.every=100 steps")  # fmt: skip
    train(config, tmp_path / "run", machine=tiny_machine)
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {"step-00000003", "step-00000006", "step-00000008"}


def test_a_run_directory_in_use_is_refused(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    holder = re.escape(f"(process {os.getpid()} on {socket.gethostname()})")
    with locked(tmp_path / "run"), pytest.raises(UserError, match=f"in use by another run {holder}"):
        train(tiny_config(), tmp_path / "run", machine=tiny_machine)


def test_records_after_the_checkpoint_and_a_torn_line_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rows = [
        f'{{"step": {step}, "name": "a", "value": 1, "unit": "", "kind": "measured", "time": 0}}\n'
        for step in (1, 2, 3)
    ]
    path.write_text("".join(rows) + '{"step": 1, "na')
    assert cut_records(path, 2) == 2
    assert path.read_text() == "".join(rows[:2])
    assert cut_records(path, 2) == 0


def test_a_tokenizer_larger_than_the_model_is_refused(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    config = tiny_config()
    smaller = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 200})})
    with pytest.raises(UserError, match=r"model\.vocab_size is 200.*tokenizer has"):
        train(smaller, tmp_path / "run", machine=tiny_machine)


def test_an_unknown_best_metric_is_refused_before_training(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluate\.best_metric: got `val_acc`.*val_loss"):
        train(tiny_config("evaluate.best_metric=val_acc"), tmp_path / "run", machine=tiny_machine)


def test_what_is_only_named_is_looked_for_before_the_data_are_built(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "build_dataset", lambda *_, **__: pytest.fail("the data were built"))
    for override in ("init_from=/nowhere", "evaluate.best_metric=val_acc", "evaluate.tasks=[arc_eazy]"):
        with pytest.raises(UserError, match=r"/nowhere|best_metric|arc_easy|lm_eval|harness"):
            train(tiny_config(override), tmp_path / "run", machine=tiny_machine)


def test_fp16_that_overflows_at_every_scale_is_a_failure_that_says_so(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    config = tiny_config(
        "train.precision=fp16", "train.loss_scale.initial=1e-4", "optimizer.lr=1e38", "train.grad_clip=null"
    )
    with pytest.raises(
        TrainingFailed, match=r"step \d+: gradients overflow fp16 .* optimizer\.lr.*there is no checkpoint yet"
    ):
        train(config, tmp_path / "run", machine=tiny_machine)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_state_before_it(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def damaged(model: Any, optimizer: Any, batch: Any, *rest: Any, step: int, **named: Any) -> Any:
        if step == 4:
            batch.loss_weights[3, 5] = math.nan
        return real(model, optimizer, batch, *rest, step=step, **named)

    monkeypatch.setattr(loop, "train_step", damaged)
    run_dir = tmp_path / "run"
    with pytest.raises(TrainingFailed, match=r"step 5: the loss is nan.*step-00000004"):
        train(tiny_config("train.micro_batch=2"), run_dir, machine=tiny_machine)
    assert any(r.name == "warning" and "step 5" in str(r.value) for r in records(run_dir))
    assert all(tensor.isfinite().all() for _, tensor in newest(run_dir).tensors("model"))


def test_weights_that_are_not_finite_never_become_the_newest_checkpoint(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.train_step

    def exploding(model: Any, *rest: Any, step: int, **named: Any) -> Any:
        result = real(model, *rest, step=step, **named)
        if step == 4:
            model.parts[0].final_norm.weight.data[0] = math.inf
        return result

    monkeypatch.setattr(loop, "train_step", exploding)
    run_dir = tmp_path / "run"
    with pytest.raises(TrainingFailed, match=r"step 6: .*the last good checkpoint is step-00000004"):
        train(tiny_config(), run_dir, machine=tiny_machine)
    assert any("final_norm.weight" in str(r.value) for r in records(run_dir) if r.name == "warning")
    assert newest(run_dir).step == 4


def test_a_failing_save_is_a_warning_and_the_last_good_one_stays(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    files = 0

    def full(point: str) -> None:
        nonlocal files
        files += point == "before a shard file"
        if files > 2 and point == "between two tensors":
            raise OSError(errno.ENOSPC, "No space left on device")

    with at_each_point(full):
        result = train(tiny_config(), tmp_path / "run", machine=tiny_machine)
    assert result.steps == 8
    assert result.last_save_failed
    assert str(result.checkpoint).endswith("step-00000004")
    warnings = [str(r.value) for r in records(tmp_path / "run") if r.name == "warning"]
    assert "step 6: the checkpoint could not be written (No space left on device)" in warnings[0]
    assert "the last good checkpoint is step-00000004" in warnings[0]
    assert [text.partition(":")[0] for text in warnings] == ["step 6", "step 8"]  # the last one is not tried twice


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_really_full_does_not_end_training(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with largest_file(6000):  # no checkpoint fits, and the records do not fit either
        result = train(tiny_config(), tmp_path / "run", machine=tiny_machine)
    assert (result.steps, result.checkpoint, result.last_save_failed) == (8, None, True)
    assert result.train_loss == finished[1].train_loss or math.isfinite(result.train_loss or math.nan)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "Traceback" not in capfd.readouterr().err  # of TensorBoard's, say
    # Whole rows only, up to where the space ended.
    for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines():
        json.loads(line)


def test_tensorboard_may_fail_and_the_records_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path, first_step=0)
    log.figure(1, "train/loss", 3.0)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._board, "add_scalar", full)
    for step in (2, 3):
        log.figure(step, "train/loss", 2.0)
    log.close()
    assert values(tmp_path, "train/loss") == [3.0, 2.0, 2.0]
    assert capsys.readouterr().err.count("TensorBoard events cannot be written") == 1


def test_init_from_starts_with_the_weights_of_a_run(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    run_dir, result = finished
    config = tiny_config(f"init_from={run_dir}", "train.duration=1 steps", "optimizer.lr=0")
    again = train(config, tmp_path / "run", machine=tiny_machine)
    assert again.val_loss == pytest.approx(result.val_loss, rel=1e-6)


def test_settings_that_shapes_do_not_show_are_remarked(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    config = tiny_config(f"init_from={finished[0]}", "train.duration=1 steps", "model.rope_theta=5000")
    train(config, tmp_path / "run", machine=tiny_machine)
    remarks = [str(r.value) for r in records(tmp_path / "run") if r.name == "remark"]
    assert "init_from: model.rope_theta is 5000.0 here and was 10000.0 there" in remarks


def test_a_tokenizer_that_loses_text_is_remarked(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    """Bits per byte count the bytes of a text that such a tokeniser has made simpler."""
    from tokenizers import normalizers

    tokenizer = build_dataset(tiny_config().data, progress=False).tokenizer
    tokenizer.save(tmp_path / "plain")
    tokenizer.backend.normalizer = normalizers.Replace("cat", "c")
    tokenizer.save(tmp_path / "lossy")
    found = {}
    for name in ("plain", "lossy"):
        config = tiny_config(f"data.tokenizer={tmp_path / name}", "train.duration=1 steps")
        train(config, tmp_path / f"run-{name}", machine=tiny_machine)
        found[name] = [
            r for r in records(tmp_path / f"run-{name}") if r.name == "remark" and "bits per byte" in str(r.value)
        ]
    assert (len(found["plain"]), len(found["lossy"])) == (0, 1)


def test_init_from_another_shape_names_the_tensors(
    finished: tuple[Path, Any], tiny_config: Any, tiny_machine: Any, tmp_path: Path
) -> None:
    config = tiny_config(f"init_from={finished[0]}", "model.d_ff=48")
    with pytest.raises(UserError, match=r"feed_forward\.(gate|up|down)\.weight"):
        train(config, tmp_path / "run", machine=tiny_machine)


def test_profile_writes_a_trace_and_a_table(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    train(tiny_config("train.duration=6 steps"), tmp_path / "run", profile=True, machine=tiny_machine)
    assert "aten::" in (tmp_path / "run" / "profile" / "operations.txt").read_text()
    assert json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiles")
@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own doings
def test_compiled_blocks_train_to_the_same_losses(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    train(tiny_config(), tmp_path / "plain", machine=tiny_machine)
    train(tiny_config("train.compile=true"), tmp_path / "compiled", machine=tiny_machine)
    assert values(tmp_path / "compiled", "train/loss") == pytest.approx(
        values(tmp_path / "plain", "train/loss"), abs=1e-3
    )


def test_resuming_a_run_that_was_at_its_end_loses_nothing(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    config = tiny_config("train.duration=3 steps", "evaluate.samples=1")
    first = train(config, tmp_path / "run", machine=tiny_machine)
    again = train(config, tmp_path / "run", resume=True, machine=tiny_machine)
    assert first.train_loss is not None
    assert again == replace(first, baselines=again.baselines)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["train_loss"] == first.train_loss


def test_damaged_lines_of_the_records_are_left_out(tiny_config: Any, tiny_machine: Any, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with_damage = b'{"step": 1, "name": "a"}\n\xff\x00garbage\n{}\n[]\n3\n'
    good = b'{"step": 2, "name": "a", "value": 1.0, "unit": "", "kind": "measured", "time": 0}\n'
    path.write_bytes(with_damage + good)
    assert [record.step for record in read_records(path)] == [2]
    cut_records(path, 2)
    assert path.read_bytes() == b'{"step": 1, "name": "a"}\n' + good


def test_samples_and_questions_that_fail_do_not_end_training(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise UserError("the model's logits are not finite")

    monkeypatch.setattr(hooks, "sample_texts", fails)
    monkeypatch.setattr(assembly, "_questions", lambda *_: fails)
    result = train(tiny_config("train.duration=2 steps", "evaluate.samples=1"), tmp_path / "run", machine=tiny_machine)
    assert result.steps == 2
    assert result.checkpoint is not None
    warnings = [str(r.value) for r in read_records(tmp_path / "run" / "records.jsonl") if r.name == "warning"]
    assert [text.partition(":")[0] for text in warnings] == ["no samples", "evaluate.tasks"]


def test_a_summary_that_cannot_be_written_is_a_warning(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(run_dir: Path, _: Any) -> None:
        (run_dir / "summary.json").with_name("none").joinpath("x").write_text("")

    monkeypatch.setattr(job.run_directory, "write_summary", full)
    said = Console(file=io.StringIO(), width=200)
    result = train(tiny_config("train.duration=1 steps"), tmp_path / "run", machine=tiny_machine, console=said)
    assert result.checkpoint is not None
    assert "cannot be written (No such file or directory)" in said.file.getvalue()  # type: ignore[attr-defined]
