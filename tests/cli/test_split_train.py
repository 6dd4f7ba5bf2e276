"""`modelworks train` on several processes as a user meets it: exit codes, signals, deaths, torchrun, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelworks.cli.main import main
from modelworks.config import dump_yaml
from modelworks.records import read_records
from modelworks.train import preparation

STEPS = 80  # enough that a signal and a kill come before the end
COMMAND = [sys.executable, "-m", "modelworks"]


@pytest.fixture(scope="module")
def place(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration."""
    directory = tmp_path_factory.mktemp("split-cli")
    settings = [f"train.duration={STEPS} steps", "train.log_every=10", "checkpoint.every=10 steps"]
    config = tiny_config(*settings, "evaluate.every=1000 steps", "evaluate.max_tokens=500")
    (directory / "tiny.yaml").write_text(dump_yaml(config))
    return directory


@contextmanager
def started(place: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command line with tensor parallelism; killed with its ranks where the block leaves it running."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "train", "tiny.yaml", "parallel.tp=2", *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()  # its ranks die with it
        process.communicate()


def finish(place: Path, *words: str) -> dict[str, Any]:
    with started(place, *words, "--json") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return dict(json.loads(out.strip().splitlines()[-1]))


def until_step(process: subprocess.Popen[str], number: int) -> None:
    """Read along until the step's line was printed."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {number}/"):
            return
    raise AssertionError("the run ended before that step")


def losses(run_dir: Path) -> list[tuple[int, float]]:
    return [(r.step, float(r.value)) for r in read_records(run_dir / "records.jsonl") if r.name == "train/loss"]


@pytest.fixture(scope="module")
def reference(place: Path) -> Path:
    """A run that nobody disturbed."""
    values = finish(place, "name=reference")
    assert values["steps"] == STEPS
    assert (place / values["report"]).is_file()
    run_dir = place / "runs" / "reference"
    assert not (run_dir / "ranks").exists()
    return run_dir


@pytest.mark.slow
def test_after_a_signal_and_after_a_killed_rank_the_run_goes_on_exactly(place: Path, reference: Path) -> None:
    """The signal saves and exits with 75; the rank ends the run and is named. The same run has both, one by one."""
    with started(place, "name=stopped") as process:
        until_step(process, 20)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    last = out.strip().splitlines()[-1]
    assert last.startswith("stopped by SIGTERM at step ")
    assert last.endswith("train tiny.yaml parallel.tp=2 name=stopped --resume")

    with started(place, "name=stopped", "--resume") as process:
        until_step(process, 50)
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.create_time())
        assert len(ranks) == 2
        ranks[1].kill()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 was killed (SIGKILL); it was last doing: step ")
    assert "; the last good checkpoint is runs/stopped/checkpoints/step-000000" in line
    assert line.endswith(", go on with --resume")
    assert finish(place, "name=stopped", "--resume")["steps"] == STEPS
    assert losses(place / "runs" / "stopped") == losses(reference)


def torchrun(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "modelworks", "train", "tiny.yaml", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_torchrun_starts_the_ranks(place: Path) -> None:
    done = torchrun(place, "parallel.tp=2", "name=torchrun", "train.duration=3 steps", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["steps"] == 3
    assert done.stdout.count('"steps"') == 1
    assert [step for step, _ in losses(place / "runs" / "torchrun")] == [1, 2, 3]


@pytest.mark.slow
def test_another_number_of_processes_than_the_layout_needs_is_said_once(place: Path) -> None:
    done = torchrun(place, "parallel.dp_replicate=4", "name=mismatch")
    assert done.returncode != 0
    told = "dp_replicate=4 needs 4 processes (dp_replicate * dp_shard * cp * tp * pp), and there are 2; nearest layouts"
    assert done.stderr.count(told) == 1
    assert "parallel.elastic" in done.stderr  # which would go on with fewer
    assert not (place / "runs" / "mismatch").exists()


EXPERTS = ["model.family=mixtral", "model.n_experts=4", "model.experts_per_token=2"]
IMPOSSIBLE = {
    "heads": (["parallel.tp=3"], "parallel.tp: got 3, expected a divisor of model.n_heads = 2"),
    "key heads": (
        ["model.n_heads=12", "model.n_kv_heads=6", "model.head_dim=8", "parallel.tp=4"],
        "parallel.tp: got 4, expected a divisor or a multiple of model.n_kv_heads = 6",
    ),
    "vocabulary": (
        ["model.vocab_size=3", "data.tokenizer=tokenizer.json", "model.n_heads=4", "parallel.tp=4"],
        "parallel.tp: got 4, expected at most model.vocab_size = 3",
    ),
    "batch": (
        ["train.global_batch=2", "parallel.dp_replicate=4"],
        "train.global_batch: 2 rows cannot be shared by dp_replicate * dp_shard = 4 ranks",
    ),
    "micro-batch": (
        ["train.micro_batch=3", "parallel.pp=2"],
        "train.micro_batch: got 3, expected a divisor of the 4 rows of a rank",
    ),
    "no experts": (["parallel.ep=2", "parallel.dp_replicate=2"], "parallel.ep: got 2, expected 1: this model has no"),
    "experts": ([*EXPERTS, "parallel.ep=2"], "parallel.ep: got 2, expected a divisor of dp_replicate * dp_shard"),
    "nothing to shard over": (["parallel.zero=2"], "parallel.zero: got 2, expected 0 with dp_shard=1"),
    "not sharded": (["parallel.dp_shard=2"], "parallel.zero: got 0, expected 1, 2 or 3 with dp_shard=2"),
    "length": (
        ["data.seq_len=28", "parallel.cp=4"],
        "data.seq_len: got 28, expected a multiple of 2 * cp (two pieces for each rank, for balance) = 8",
    ),
    "length with sequence parallelism": (
        ["data.seq_len=30", "model.n_heads=4", "parallel.tp=4"],
        "data.seq_len: got 30, expected a multiple of cp * tp = 4 with parallel.sequence_parallel",
    ),
    "attention dropout": (
        ["model.attention_dropout=0.1", "parallel.cp=2"],
        "model.attention_dropout: got a chance above 0, expected 0 with cp > 1",
    ),
    "schedule": (["parallel.pp_schedule=zbv"], "parallel.pp_schedule: got zbv, expected 1f1b (the default) with pp=1"),
    "weights": (["parallel.tp=2", "init_from=/nowhere"], "/nowhere: no such model"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_run_is_one_line_before_anything_starts(
    case: str, tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from modelworks.cli import train_rank

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("processes were started")

    monkeypatch.setattr(train_rank, "launch", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny_config()))
    overrides, expected = IMPOSSIBLE[case]
    assert main(["train", "tiny.yaml", *overrides]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert expected in line
    if case != "weights":
        assert "; nearest layouts that work: " in line
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_says_how_the_run_is_split(
    tiny_config: Any, tiny_machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(preparation, "measure_machine", lambda **_: tiny_machine)
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny_config("model.n_layers=4")))
    layout = ["parallel.pp=2", "parallel.tp=2", "parallel.pp_partition=[1,1,1,1]"]
    layout += ["parallel.pp_schedule=interleaved", "parallel.pp_virtual=2"]
    assert main(["train", str(tmp_path / "tiny.yaml"), *layout, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out.strip().splitlines()[-1])
    told = {decision["key"]: (decision["value"], decision["reason"]) for decision in values["decisions"]}
    assert told["layout"] == ("pp=2 tp=2", "4 ranks: pp 2 * tp 2")
    assert told["threads per rank"][0] == str(max(1, tiny_machine.facts.cores // 4))
    assert told["on ranks 0-1"][0] == "embedding, layer 0; then layer 2"
    assert told["on ranks 2-3"][0] == "layer 1; then layer 3, head"
    assert "on each; parallel.pp_partition is [1, 1, 1, 1]" in told["on ranks 0-1"][1]
    assert "in at least 2 micro-batches that fill the pipeline" in told["train.micro_batch"][1]
    assert "memory of the fullest rank" in captured.err
