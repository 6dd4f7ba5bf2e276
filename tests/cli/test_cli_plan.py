"""`modelworks plan` from the command line: what it answers, what it refuses, and that none of it needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelworks.cli import main as frame
from modelworks.config import ParallelConfig, preset
from modelworks.hardware import device
from modelworks.plan import Candidate, evaluate

MODEL = ["--model", "llama-3-8b", "--hardware", "h100-sxm", "--seq-len", "8192", "--global-batch", "256"]
SMALL = ["--model", "llama-3.2-1b", "--hardware", "A100", "--seq-len", "2048", "--global-batch", "16", "--gpus", "4"]
LAYOUT = "tp=4,pp=2,dp_shard=2,zero=1,micro_batch=1,recompute=selective"
RUN = """
name: small
model: {family: llama, n_layers: 4, d_model: 64, n_heads: 8, n_kv_heads: 4, vocab_size: 512, max_seq_len: 64}
data: {seq_len: 64, tokenizer: none}
train: {global_batch: 8, duration: 100 steps, precision: fp32}
parallel: {tp: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def answered(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert frame.main(["plan", *words, "--json"]) == code
    return json.loads(capfd.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


def test_one_layout_is_what_the_library_predicts(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answered(capfd, *MODEL, "--layout", LAYOUT)
    parallel = ParallelConfig(tp=4, pp=2, dp_shard=2, zero=1)
    candidate = Candidate(preset("llama-3-8b"), parallel, device("H100"), 1, 256, 8192, recompute="selective")
    expected = evaluate(candidate)
    winner = answer["winner"]
    assert winner["step_seconds"] == expected.step_seconds
    assert winner["memory_bytes"] == expected.memory == max(sum(each.values()) for each in winner["stage_bytes"])
    assert winner["time_seconds"] == expected.parts
    assert sum(winner["time_seconds"].values()) == pytest.approx(winner["step_seconds"])
    assert winner["tokens_per_second"] * winner["step_seconds"] == pytest.approx(256 * 8192)
    assert winner["layout"] == LAYOUT
    assert winner["gpus"] == answer["job"]["gpus"] == 16
    assert answer["search"] is None
    assert answer["own"] is None


def test_a_search_ranks_layouts_that_fit_and_can_be_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answered(capfd, *SMALL, "--tokens", "1B", "--price", "2")
    layouts = answer["layouts"]
    assert 1 < len(layouts) <= 10
    assert all(each["fits"] and each["gpus"] == 4 for each in layouts)
    assert layouts[0]["step_seconds"] <= 1.011 * min(each["step_seconds"] for each in layouts)
    assert len({each["layout"] for each in layouts}) == len(layouts)
    found = answer["search"]
    assert found["evaluated"] >= found["fitting"] >= len(layouts)
    assert {"fastest", "least memory"} <= answer["goals"].keys()
    assert answer["goals"]["least memory"]["memory_bytes"] <= min(each["memory_bytes"] for each in layouts)
    again = answered(capfd, *SMALL, "--layout", layouts[0]["layout"])["winner"]
    for name in ("keys", "step_seconds", "memory_bytes"):
        assert again[name] == layouts[0][name]
    run, first, tokens = answer["run"], layouts[0], 16 * 2048
    assert run["steps"] == -(-(10**9) // tokens)
    assert run["usd"] == pytest.approx(4 * 2 * run["steps"] * first["step_seconds"] / 3600)
    assert first["usd_per_million_tokens"] == pytest.approx(run["usd"] / (run["steps"] * tokens) * 1e6)


def test_what_failures_cost_many_devices(capfd: pytest.CaptureFixture[str]) -> None:
    failures = answered(capfd, *MODEL, "--layout", LAYOUT)["reliability"]
    assert failures["goodput_low"] <= failures["goodput"] <= failures["goodput_high"] < 1
    assert failures["saved_bytes_per_gpu"] == pytest.approx(8.03e9 * 14 / 16, rel=0.15)  # of the fullest stage
    words = ["--failures", "restart_seconds=60,write_gb_s=10,device_hours=1000000"]
    better = answered(capfd, *MODEL, "--layout", LAYOUT, *words)["reliability"]
    assert better["goodput"] > failures["goodput"]
    assert better["mean_hours_between_failures"] == pytest.approx(1e6 / 16)
    assert better["write_seconds"] == pytest.approx(failures["write_seconds"] / 10)


def test_limits_hold(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--fix", "pp=2", "--zero", "0", "--recompute", "full", "--max-tp", "1"]
    answer = answered(capfd, *SMALL, *words, "--memory-headroom", "70%")
    fixed = {"pp": 2, "zero": 0, "recompute": "full"}
    assert answer["limits"] == {"fixed": fixed, "max_tp": 1, "memory_headroom": 0.7}
    for each in answer["layouts"]:
        keys = each["keys"]
        assert (keys["pp"], keys["zero"], keys["recompute"], keys["tp"]) == (2, 0, "full", 1)
        assert each["memory_bytes"] <= each["memory_limit_bytes"] == pytest.approx(24e9)


def test_nothing_fits_says_what_would(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", *SMALL, "--memory-headroom", "97%", "--html", str(page), "--json"]
    assert frame.main(words) == 1
    captured = capfd.readouterr()
    answer = json.loads(captured.out.splitlines()[-1])
    assert all(text in captured.err for text in answer["explanation"])
    assert "Nothing fits" in page.read_text(encoding="utf-8")
    assert answer["layouts"] == []
    assert answer["winner"] is None
    nothing = answer["nothing_fits"]
    assert nothing["smallest"] in {each["change"] for each in nothing["attempts"] if each["fits"]}
    for each in nothing["attempts"]:
        assert each["short_by_bytes"] == pytest.approx(max(0.0, each["memory_bytes"] - each["memory_limit_bytes"]))


def test_a_config_is_planned_on_this_machine_beside_its_own_layout(
    config: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = answered(capfd, config)
    assert answer["job"]["gpus"] == 2
    assert answer["job"]["hardware"] == "this-machine"
    assert answer["job"]["precision"] == "fp32"
    assert {"hardware", "2 devices", "a run of 100 steps"} <= {text.split(":")[0] for text in answer["assumed"]}
    assert answer["own"]["keys"]["tp"] == 2
    assert answer["own"]["step_seconds"] >= 0.99 * answer["winner"]["step_seconds"]
    assert answer["run"]["steps"] == 100
    changed = answered(capfd, config, "parallel.tp=1", "train.global_batch=4", "--global-batch", "16")
    assert changed["job"]["gpus"] == 1
    assert changed["job"]["global_batch_rows"] == 16


def test_a_layout_takes_the_place_of_the_one_in_the_config(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    keys = answered(capfd, config, "--layout", "pp=2,micro_batch=2")["winner"]["keys"]
    assert (keys["tp"], keys["pp"], keys["micro_batch"]) == (1, 2, 2)


def test_text_for_people_and_a_page(config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "deep" / "plan.html"
    assert frame.main(["plan", config, "--html", str(page)]) == 0
    text = capfd.readouterr().out
    for words in ("assumed: hardware: this machine", "yours", "the best: --layout ", "MFU", f"page: {page}"):
        assert words in text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_what_waits_on_a_host_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", *MODEL, "--layout", "dp_shard=8,zero=1,offload=cpu,micro_batch=1", "--json"]
    assert frame.main(words) in (0, 1)
    captured = capfd.readouterr()
    size = json.loads(captured.out.splitlines()[-1])["winner"]["host_memory_bytes"]
    assert f"{size / 1e9:,.1f} GB wait in each host's memory: its size is not in the catalogue" in captured.err


def test_json_keeps_people_out_of_stdout(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["plan", config, "--json"]) == 0
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert "the best" in captured.err


def test_what_does_not_fit_is_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answered(capfd, *MODEL, "--layout", "dp_replicate=2,micro_batch=1", code=1)
    assert not answer["winner"]["fits"]
    assert answer["winner"]["memory_bytes"] > answer["winner"]["memory_limit_bytes"] == pytest.approx(76e9)


def test_settings_are_proposed_for_a_model_alone(capfd: pytest.CaptureFixture[str]) -> None:
    answer = answered(capfd, "--model", "llama-3-8b", "--hyper")
    proposed = {each["name"]: each for each in answer["hyper"]["suggestions"]}
    assert proposed["tokens"]["value"] == pytest.approx(20 * 8.03e9, rel=0.01)
    assert all(each["reason"] and each["source"] for each in proposed.values())
    words = ["--hardware", "H100", "--layout", "tp=8,micro_batch=1"]
    plan = answered(capfd, "--model", "llama-3-8b", "--hyper", *words)
    assert plan["job"]["global_batch_tokens"] == plan["hyper"]["suggestions"][1]["value"]
    assert plan["run"]["tokens"] == plan["hyper"]["suggestions"][0]["value"]


def test_files_are_written_for_a_layout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--layout", LAYOUT]
    answer = answered(capfd, *words, "--emit", "megatron", "--out", str(tmp_path / "there"))
    assert answer["emitted"]["layout"] == answer["winner"]["layout"]
    assert answer["emitted"]["passed_over"] == []
    assert all(Path(path).is_file() for path in answer["emitted"]["files"])
    assert frame.main(["plan", *words, "--emit", "fsdp", "--out", str(tmp_path / "there")]) == 2
    assert "--emit: fsdp cannot run this layout" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to plan"),
        (["--model", "llama-3-8b"], "needs --hardware and --global-batch and --gpus"),
        (["--model", "llama-3-9b"], "needs --hardware"),
        (["CONFIG", "--model", "llama-3-8b"], "describes a model already"),
        (["missing.yaml"], "missing.yaml: no such file"),
        ([*MODEL, "--gpus", "1e30"], "--gpus: got 1e30, expected a whole number from 1 to 1,048,576"),
        ([*MODEL, "--gpus", "0"], "--gpus: got 0"),
        ([*MODEL, "--gpus", "-8"], "--gpus: got -8"),
        ([*MODEL, "--gpus", "8", "--hardware", "H101"], "did you mean H100-SXM-80GB?"),
        ([*MODEL, "--gpus", "8", "--model", "llama-3-80b"], "did you mean `llama-3-8b`?"),
        ([*MODEL, "--gpus", "8", "--precision", "bf17"], "--precision: got 'bf17'"),
        ([*MODEL, "--gpus", "8", "--optimizer", "adamv"], "--optimizer: no optimiser is called 'adamv'"),
        ([*MODEL, "--gpus", "8", "--seq-len", "0"], "--seq-len: got 0"),
        ([*MODEL, "--gpus", "8", "--global-batch", "4K"], "expected at least one row, which is 8,192 tokens"),
        ([*MODEL, "--gpus", "8", "--global-batch", "many"], "expected tokens, such as 4M"),
        ([*MODEL, "--gpus", "8", "--tokens", "0"], "--tokens: got 0"),
        ([*MODEL, "--gpus", "8", "--fix", "tpp=4"], "--fix: no key of a layout is called 'tpp'; did you mean tp?"),
        ([*MODEL, "--gpus", "8", "--fix", "tp=3"], "--fix: tp = 3 does not divide 8 GPUs"),
        ([*MODEL, "--gpus", "96", "--fix", "tp=3"], "expected a divisor of model.n_heads = 32"),
        ([*MODEL, "--gpus", "8", "--fix", "micro_batch=3"], "does not divide a global batch of 256 rows"),
        ([*MODEL, "--gpus", "8", "--fix", "micro_batch=auto"], "auto fixes nothing"),
        ([*MODEL, "--gpus", "8", "--fix", "ep=2"], "this model has no experts"),
        ([*MODEL, "--gpus", "8", "--fix", "tp=2", "--max-tp", "1"], "--max-tp: got 1, expected at least the tp=2"),
        ([*MODEL, "--gpus", "8", "--fix", "zero=1", "--zero", "2"], "--zero: got 2, expected what --fix says, 1"),
        ([*MODEL, "--gpus", "8", "--recompute", "ful"], "--recompute: recompute: got 'ful'"),
        ([*MODEL, "--gpus", "8", "--memory-headroom", "1.5"], "--memory-headroom: got 1.5"),
        ([*MODEL, "--gpus", "8", "--layout", "tp=4,micro_batch=1"], "for 4 GPUs, expected 8 (dp_replicate=2, or"),
        ([*MODEL, "--gpus", "8", "--layout", "tp=8"], "micro_batch is missing, expected a divisor of the 256 rows"),
        ([*MODEL, "--layout", "tp=8,micro_batch=1,dp_shard=2"], "zero: got 0, expected 1, 2 or 3 with dp_shard=2"),
        ([*MODEL, "--layout", LAYOUT, "--fix", "tp=4"], "--fix: nothing to constrain beside --layout"),
        ([*MODEL, "--layout", "tp"], "--layout: got 'tp', expected key=value"),
        ([*MODEL, "--layout", "tp=2,tp=4"], "--layout: tp is given twice"),
        ([*MODEL, "--gpus", "8", "--price", "-1"], "expected US dollars an hour of one device"),
        ([*MODEL, "--gpus", "8", "--out", "there"], "--out: nothing is written there without --emit or --calibrate"),
        ([*MODEL, "--gpus", "8", "--emit", "fsdp"], "--emit: missing --out"),
        ([*MODEL, "--gpus", "8", "--emit", "megatro", "--out", "there"], "did you mean megatron?"),
        ([*MODEL, "--gpus", "8", "--html", "."], "--html: . is a directory"),
        ([*MODEL, "--gpus", "8", "--optimizer", ""], "--optimizer: no optimiser is called ''"),
        ([*MODEL, "--gpus", "8", "--price", "nan"], "--price: got nan"),
        ([*MODEL, "--gpus", "8", "--fix", "zero=3,dp_shard=1"], "expected dp_shard above 1 beside it"),
        ([*MODEL, "--gpus", "8", "--fix", "pp_partition=[1,2]"], "pp_partition=[1, 2]"),
        (
            [*MODEL, "--gpus", "8", "--hardware", "V100", "--precision", "bf16"],
            "has no bf16 of V100-SXM2-32GB; expected fp16 or fp32",
        ),
        (
            [*MODEL, "--gpus", "16", "--failures", "restart=5"],
            "--failures: got 'restart=5'; did you mean restart_seconds?",
        ),
        ([*MODEL, "--gpus", "16", "--failures", "copy_gb_s=0"], "copy_gb_s: got 0, expected a number above 0"),
        (
            [*MODEL, "--hardware", "TPU-v5p", "--layout", LAYOUT, "--emit", "megatron", "--out", "there"],
            "not on TPU-v5p",
        ),
        (["--model", "llama-3-8b", "--hyper", "--html", "there.html"], "--html: there is nothing to draw"),
        (["--model", "llama-3-8b", "--calibrate"], "needs --global-batch and --gpus too"),
        (["--calibrate", "--gpus", "8"], "--gpus: nothing is planned by --calibrate alone"),
        (["--calibrate", "--hardware", "H100"], "--hardware: got H100, expected none with --calibrate"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], said: str, config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert frame.main(["plan", *(config if word == "CONFIG" else word for word in words)]) == 2
    error = capfd.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_page_that_cannot_be_written_is_said_before_the_search(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert frame.main(["plan", config, "--html", str(tmp_path / "file" / "plan.html")]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("error: --html: ")
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--help"], [*MODEL, "--layout", LAYOUT]], ids=["help", "layout"])
def test_no_torch(words: list[str]) -> None:
    code = f"""
import sys
from modelworks.cli.main import main
assert main(["plan", *{words!r}]) == 0
heavy = {{"torch"}} | ({{"numpy", "modelworks.plan", "modelworks.report"}} if "--help" in {words!r} else set())
sys.exit(", ".join(heavy & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if "--help" in words:
        assert "modelworks plan --model llama-3-70b" in done.stdout


def test_stages_of_a_ramp_and_states_to_go_back_to(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each stage as a run of that batch is predicted; the run's time is theirs together."""
    keys = ["train.micro_batch=1", "health.spikes=rollback"]
    flags = ["--hardware", "A100", "--layout", "dp_replicate=4,micro_batch=1"]
    ramp = "train.batch_ramp=[{batch: 4, until: 30 steps}]"
    small, full = (answered(capfd, config, *keys, f"train.global_batch={rows}", *flags)["winner"] for rows in (4, 8))
    answer = answered(capfd, config, *keys, ramp, *flags)
    assert answer["ramp"] == [
        {"rows": 4, "first_step": 0, "step_seconds": small["step_seconds"], "problem": ""},
        {"rows": 8, "first_step": 30, "step_seconds": full["step_seconds"], "problem": ""},
    ]
    assert answer["run"]["steps"] == 100
    assert answer["run"]["seconds"] == pytest.approx(30 * small["step_seconds"] + 70 * full["step_seconds"])
    # Two states, on each of four devices: parameters, first and second moment in float32.
    assert answer["rollback"] == {"states": 2, "host_memory_bytes": 2 * 4 * 12 * answer["job"]["parameters"]}
    assert answered(capfd, config, *keys, "health.rollback_from=disk", *flags)["rollback"] is None
    assert frame.main(["plan", config, *keys, ramp, *flags]) == 0
    text = capfd.readouterr().out
    assert "batch ramp: 4 rows from step 1, " in text
    assert "rollback: 2 states wait in each host's memory" in text


def test_a_stage_that_the_layout_cannot_make(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A search is for the full batch, so its best may be a layout that a smaller one does not suit. The run is then
    told as if there were no ramp."""
    ramp = "train.batch_ramp=[{batch: 2, until: 30 steps}]"
    flags = ["--hardware", "A100", "--gpus", "4", "--max-tp", "1"]
    answer = answered(capfd, config, "parallel.tp=1", ramp, *flags)
    stage, full = answer["ramp"]
    assert answer["winner"]["keys"]["dp_replicate"] * answer["winner"]["keys"]["dp_shard"] == 4
    assert (stage["step_seconds"], full["step_seconds"]) == (None, answer["winner"]["step_seconds"])
    assert answer["run"]["seconds"] == pytest.approx(answer["run"]["steps"] * full["step_seconds"])
    assert frame.main(["plan", config, "parallel.tp=1", ramp, *flags]) == 0
    assert f"a step of 2 rows is not possible: {stage['problem']}" in " ".join(capfd.readouterr().out.split())
