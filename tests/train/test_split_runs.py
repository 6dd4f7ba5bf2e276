"""`train` on the ranks of a layout is the same run as in one process: losses, scores, samples, checkpoints, stops."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import split_jobs
import torch
from rich.console import Console
from run_files import assert_same_weights, newest, series, weights

from modelworks.checkpoint import load_model
from modelworks.config import RunConfig, dump_yaml, format_bytes
from modelworks.layout import Layout
from modelworks.records import read_records
from modelworks.train import derive, preparation, train
from modelworks.train.beginning import job_peak
from modelworks.train.out_of_memory import suggestions

EXPERTS = ["model.family=mixtral", "model.n_experts=4", "model.experts_per_token=2", "model.router_bias=true"]
COMMON = [
    "model.n_layers=4",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "train.micro_batch=2",
    "train.global_batch=8",
    "schedule.name=constant",
    "evaluate.prompts=['the cat']",
    "evaluate.samples=1",
]
LAYOUTS: dict[str, list[str]] = {
    "dp2-tp2": ["parallel.dp_replicate=2", "parallel.tp=2"],
    "zero3": ["parallel.dp_shard=2", "parallel.zero=3"],
    "pp2": ["parallel.pp=2"],
    "pp2-zero2-zbv": ["parallel.pp=2", "parallel.pp_schedule=zbv", "parallel.dp_shard=2", "parallel.zero=2"],
    "pp2-interleaved": ["parallel.pp=2", "parallel.pp_schedule=interleaved", "parallel.pp_virtual=2"],
    "cp2": ["parallel.cp=2"],
    "ep2": ["parallel.dp_replicate=2", "parallel.ep=2"],
}

Whole = Callable[..., Path]


def events(run_dir: Path, name: str) -> list[str]:
    return [str(record.value) for record in read_records(run_dir / "records.jsonl") if record.name == name]


def assert_close(run_dir: Path, reference: Path, tolerance: float = 1e-4) -> None:
    for name in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "val/bits_per_byte"):
        ours, theirs = series(run_dir, name), series(reference, name)
        assert [step for step, _ in ours] == [step for step, _ in theirs], name
        assert [v for _, v in ours] == pytest.approx([v for _, v in theirs], rel=tolerance), name
    first, expected = series(run_dir, "train/loss")[0][1], series(reference, "train/loss")[0][1]
    assert first == pytest.approx(expected, rel=max(1e-6, tolerance / 100))


def assert_same_bits(run_dir: Path, reference: Path) -> None:
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert series(run_dir, name) == series(reference, name)
    assert_same_weights(run_dir, reference)


@pytest.fixture(scope="module")
def whole(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """whole("key=value", …): the directory of that run in one process, made once."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = tmp_path_factory.mktemp("whole") / "run"
            train(tiny_config(*COMMON, *overrides), made[overrides], machine=split_jobs.MACHINE)
        return made[overrides]

    return get


class Split:
    """Runs a job on the workers of a layout."""

    def __init__(self, workers: Any, make: Callable[..., RunConfig]) -> None:
        self._workers, self._make = workers, make

    def __call__(self, run_dir: Path, *overrides: str, job: Any = split_jobs.run, **named: Any) -> list[Any]:
        config = self._make(*COMMON, *overrides)
        layout, heads = Layout.of(config.parallel), config.model.n_kv_heads
        results: list[Any] = self._workers.run(job, layout, dump_yaml(config), str(run_dir), n_kv_heads=heads, **named)
        return results


@pytest.fixture(scope="module")
def split(workers: Any, tiny_config: Any) -> Split:
    return Split(workers, tiny_config)


@pytest.fixture(scope="module")
def finished(split: Split, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """finished("cp2"): the directory and results of that layout's run, made once."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def get(name: str) -> tuple[Path, list[Any]]:
        if name not in made:
            run_dir = tmp_path_factory.mktemp("split") / "run"
            made[name] = run_dir, split(run_dir, *model_of(name), *LAYOUTS[name])
        return made[name]

    return get


def model_of(name: str) -> list[str]:
    return EXPERTS if name.startswith("ep") else []


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_run_is_the_run_of_one_process(name: str, finished: Any, whole: Whole) -> None:
    reference = whole(*model_of(name))
    run_dir, results = finished(name)
    assert_close(run_dir, reference)
    names = {record.name for record in read_records(reference / "records.jsonl")}
    assert names <= {record.name for record in read_records(run_dir / "records.jsonl")}
    assert events(run_dir, "sample") == events(reference, "sample")
    assert len({(result["steps"], result["val_loss"], result["checkpoint"]) for result in results}) == 1
    ours, theirs = weights(run_dir), weights(reference)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-3), name


@pytest.mark.slow
def test_on_eight_ranks(split: Split, whole: Whole, tmp_path: Path) -> None:
    eight = ["parallel.tp=2", "parallel.pp=2", "parallel.dp_replicate=2", "train.duration=2 steps"]
    split(tmp_path / "run", *eight)
    assert_close(tmp_path / "run", whole("train.duration=2 steps"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"),
    [("pp2-zero2-zbv", "cp2"), ("zero3", "dp2-tp2"), ("ep2", "")],
)
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_under_any_layout(
    name: str, other: str, split: Split, finished: Any, whole: Whole, tmp_path: Path
) -> None:
    """At step 4 the run stops, is saved, and ends in the same layout, in another, or in one process."""
    model, last = model_of(name), LAYOUTS[name]
    results = split(tmp_path / "run", *model, *last, job=split_jobs.stopped, step=3)
    assert {(result["steps"], result["stopped_by"]) for result in results} == {(4, "SIGTERM")}
    shutil.copytree(tmp_path / "run", tmp_path / "other")

    split(tmp_path / "run", *model, *last, resume=True)
    assert_same_bits(tmp_path / "run", finished(name)[0])

    split(tmp_path / "other", *model, *LAYOUTS.get(other, []), resume=True)
    assert_close(tmp_path / "other", whole(*model))
    changes = [text for text in events(tmp_path / "other", "remark") if text.startswith("changed on resume: parallel.")]
    assert any("a layout computes the same mathematics" in text for text in changes)


PRECISIONS = {
    # tolerance on losses: bf16 weights round differently in sums of another order
    "bf16": (["train.precision=bf16"], ["parallel.dp_shard=2", "parallel.zero=2", "parallel.tp=2"], 2e-2),
    "bf16-autocast": (["train.precision=bf16-autocast"], ["parallel.pp=2", "parallel.dp_replicate=2"], 2e-2),
    "fp16": (["train.precision=fp16", "train.duration=2 steps"], ["parallel.dp_replicate=2"], 2e-2),
    "recomputed-tp": (["train.recompute=full", "model.dropout=0.1"], ["parallel.tp=2"], 1e-4),
    "recomputed-pp": (["train.recompute=selective", "model.dropout=0.1"], ["parallel.pp=2"], 1e-4),
    "recomputed-zero3": (["train.recompute=full"], ["parallel.dp_shard=2", "parallel.zero=3"], 1e-4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PRECISIONS)
def test_precision_and_recomputation(case: str, split: Split, whole: Whole, tmp_path: Path) -> None:
    settings, layout, tolerance = PRECISIONS[case]
    settings = [*settings, "train.duration=4 steps"] if "train.duration=2 steps" not in settings else settings
    split(tmp_path / "run", *settings, *layout)
    assert_close(tmp_path / "run", whole(*settings), tolerance)


@pytest.mark.slow
@pytest.mark.usefixtures("compiles")
def test_blocks_are_compiled_on_every_rank(split: Split, whole: Whole, tmp_path: Path) -> None:
    small = ["model.n_layers=2", "train.duration=2 steps"]
    split(tmp_path / "run", *small, "train.compile=true", "parallel.dp_replicate=2", job=split_jobs.compiled)
    assert_close(tmp_path / "run", whole(*small), 1e-3)


@pytest.mark.slow
def test_accumulation_in_every_way(split: Split, whole: Whole, tmp_path: Path) -> None:
    """Rows of a rank that its micro-batches do not divide, reduced each time."""
    uneven = ["train.micro_batch=3", "train.duration=2 steps"]
    every = ["parallel.dp_shard=2", "parallel.zero=2", "parallel.accumulate_reduce=every"]
    split(tmp_path / "run", *uneven, *every)
    assert_close(tmp_path / "run", whole("train.duration=2 steps"))


@pytest.mark.slow
def test_balancing_biases_are_part_of_the_model(split: Split, tmp_path: Path) -> None:
    """They move, are saved from the ranks that hold them, and are what generation and scoring use."""
    run = ["train.duration=3 steps", "parallel.pp=2", "parallel.tp=2"]  # odd: equal steps up and down would cancel
    split(tmp_path / "run", *EXPERTS, *run)
    checkpoint = newest(tmp_path / "run")
    path, saved = checkpoint.path, dict(checkpoint.tensors("routing"))
    assert len(saved) == 4
    assert all(bool(bias.any()) for bias in saved.values())
    model = load_model(str(path)).model
    for name, bias in saved.items():
        layer = int(name.split(".")[1])
        assert torch.equal(model.blocks[str(layer)].feed_forward.router.bias, bias)
    gathered = split(tmp_path / "again", *EXPERTS, *run, job=split_jobs.whole_biases, checkpoint=str(path))
    assert gathered[1:] == [None] * 3
    assert {name: torch.tensor(bias) for name, bias in gathered[0].items()}.keys() == saved.keys()
    assert all(torch.equal(torch.tensor(gathered[0][name]), bias) for name, bias in saved.items())


@pytest.mark.slow
def test_a_full_disk_is_a_warning_on_every_rank(split: Split, whole: Whole, tmp_path: Path) -> None:
    results = split(tmp_path / "run", *LAYOUTS["dp2-tp2"], job=split_jobs.on_a_full_disk, saves=2)
    assert {result["last_save_failed"] for result in results} == {True}
    assert {Path(result["checkpoint"]).name for result in results} == {"step-00000004"}
    told = events(tmp_path / "run", "warning")[0]
    assert "the checkpoint could not be written (rank 3: No space left on device); the last good checkpoint is " in told
    assert_close(tmp_path / "run", whole())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "pp2"])
def test_damage_that_only_the_last_rank_reads_sends_all_back(
    name: str, split: Split, finished: Any, tmp_path: Path
) -> None:
    """To the checkpoint before it, from where the run goes on bit for bit."""
    run_dir = tmp_path / "run"
    split(run_dir, *LAYOUTS[name], job=split_jobs.stopped, step=6)
    newest = run_dir / "checkpoints" / "step-00000007"
    file = newest / "rank-00001.safetensors"  # what the last rank wrote, and in this layout it alone reads
    text = bytearray(file.read_bytes())
    text[-5] ^= 1
    file.write_bytes(text)
    split(run_dir, *LAYOUTS[name], resume=True)
    assert events(run_dir, "resume") == ["resumed at step 6"]
    assert_same_bits(run_dir, finished(name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2-tp2", "pp2"])
def test_a_loss_that_is_not_finite_is_told_alike_on_all_ranks(name: str, split: Split, tmp_path: Path) -> None:
    told = split(tmp_path / "run", *LAYOUTS[name], "train.micro_batch=1", job=split_jobs.broken, step=2)
    assert len(set(told)) == 1
    assert "step 3: the loss is nan" in told[0]
    assert "(first in samples 23 to 23)" in told[0]  # the last row of the third batch of eight
    assert "step-00000002" in told[0]


@pytest.mark.slow
def test_want_of_memory_is_explained(split: Split, tmp_path: Path) -> None:
    told = split(tmp_path / "run", *LAYOUTS["zero3"], "train.micro_batch=4", job=split_jobs.without_memory)
    assert told[0] == ""
    lines = told[1].splitlines()
    assert lines[0] == "rank 1 ran out of memory: DefaultCPUAllocator: can't allocate memory: 9 bytes"
    words = {line.split("  ")[1] for line in lines[1:7]}
    assert words == {
        "parameters (allocated)", "gradients (predicted)", "optimizer (allocated)", "activations (predicted)",
        "loss (predicted)", "total",
    }  # fmt: skip
    assert "  train.micro_batch=1: " in told[1]
    assert lines[-1] == "there is no checkpoint yet"


@pytest.mark.slow
def test_evaluation_shares_batches_that_do_not_divide(split: Split, whole: Whole, tmp_path: Path) -> None:
    """Also the one that was due where a signal stopped the run, before the first step of the resumed one."""
    odd = ["train.micro_batch=2", "evaluate.max_tokens=700", "train.duration=4 steps"]
    layout = ["parallel.dp_replicate=2", *LAYOUTS["pp2-interleaved"]]
    split(tmp_path / "run", *odd, *layout, job=split_jobs.stopped, step=3)
    assert series(tmp_path / "run", "val/loss")  # due at the end of the run in any case
    reference = whole(*odd)
    assert_close(tmp_path / "run", reference)
    longer = [*odd[:2], "train.duration=8 steps"]
    split(tmp_path / "late", *longer, *layout, job=split_jobs.stopped, step=3)
    assert series(tmp_path / "late", "val/loss") == []
    split(tmp_path / "late", *longer, *layout, resume=True)
    assert_close(tmp_path / "late", whole(*longer))


@pytest.mark.slow
def test_rows_that_sequence_parallelism_does_not_divide_are_scored_without_it(
    split: Split, whole: Whole, tmp_path: Path
) -> None:
    """seq_len 31 over two tensor ranks: refused with sequence parallelism, exact without."""
    odd = ["data.seq_len=31", "train.duration=2 steps"]
    split(tmp_path / "run", *odd, "parallel.tp=2", "parallel.sequence_parallel=false")
    assert_close(tmp_path / "run", whole(*odd))


@pytest.mark.slow
def test_init_from_starts_a_split_run(split: Split, whole: Whole, tmp_path: Path) -> None:
    start = [f"init_from={whole()}", "train.duration=1 steps", "optimizer.lr=0"]
    results = split(tmp_path / "run", *start, *LAYOUTS["dp2-tp2"])
    expected = series(whole(), "val/loss")[-1][1]
    assert results[0]["val_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_rank_0_may_work_longer_than_others_may_wait(workers: Any) -> None:
    done = workers.run(split_jobs.patient, Layout(dp_replicate=2))
    assert done == [("built", "no such file", "OSError"), ("built", "no such file", "RankLost")]


def test_the_rate_that_utilisation_is_measured_against_is_that_of_the_whole_job(
    tiny_config: Any, tiny_machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured with the threads of all ranks of a machine together, and counted once for each machine."""
    threads: list[int] = []

    def measured(**_: Any) -> Any:
        threads.append(torch.get_num_threads())
        return tiny_machine

    before = torch.get_num_threads()
    cores = tiny_machine.facts.cores
    monkeypatch.setattr(preparation, "measure_machine", measured)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        for ranks in (1, 2, 1000):
            preparation.measure(tiny_config(), Console(quiet=True), ranks_here=ranks)
        assert torch.get_num_threads() == 1  # a rank's own share again
    finally:
        torch.set_num_threads(before)
    assert threads == [1, min(2, cores), cores]

    one = derive(tiny_config(), tiny_machine)
    two = derive(tiny_config("parallel.dp_replicate=2"), tiny_machine)
    assert job_peak(one, tiny_machine, 1).flops == tiny_machine.gemm["fp32"]
    assert job_peak(two, tiny_machine, 1).flops == tiny_machine.gemm["fp32"]
    assert job_peak(two, tiny_machine, 2).flops == 2 * tiny_machine.gemm["fp32"]
    assert job_peak(two, tiny_machine, 2).source.startswith("2 machines, each: ")


def test_an_automatic_micro_batch_is_chosen_again_for_another_layout(tiny_config: Any, tiny_machine: Any) -> None:
    before = derive(tiny_config("train.global_batch=8"), tiny_machine)
    assert before.micro_batch == 8
    same = derive(tiny_config("train.global_batch=8"), tiny_machine, earlier=before.config)
    other = tiny_config("train.global_batch=8", "parallel.pp=2", "parallel.dp_replicate=2")
    assert same.micro_batch == 8
    assert derive(other, tiny_machine, earlier=before.config).micro_batch == 2  # of 4 rows, to fill two stages


def test_suggestions_need_less_memory_and_fit(tiny_config: Any, tiny_machine: Any) -> None:
    derived = derive(tiny_config("model.n_heads=4", "train.micro_batch=4"), tiny_machine)
    fitting = suggestions(derived, derived.memory.total - 1)
    assert fitting[0].startswith("train.micro_batch=1: ")
    assert fitting[0].endswith(f"instead of {format_bytes(derived.memory.total)}")
    assert any("parallel." in words and "(2 ranks)" in words for words in fitting)
    # where nothing fits, what comes nearest is better than silence
    least = suggestions(derived, 1)
    assert len(least) == 4
    assert least[0].startswith("parallel.")
