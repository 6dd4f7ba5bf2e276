import json
import math
import re

import pytest
from page_checks import chart, check_page
from synthetic import START, baselines, write_run

from modelworks.records import Record, RecordWriter
from modelworks.report import write_report


def test_a_whole_run(tmp_path):
    run = write_run(
        tmp_path / "night",
        losses=[5.0 / math.sqrt(step) for step in range(1, 201)],
        validate_every=50,
        events=[
            (0, "decision", {"key": "train.precision", "value": "bf16-autocast", "reason": "bf16 measured 2.0× fp32"}),
            (0, "environment", {"cpu": "Some CPU", "cores": 2}),
            (100, "sample", {"prompt": "def main(", "text": "self):\n    early"}),
            (200, "sample", {"prompt": "def main(", "text": "argv):\n    late"}),
            (150, "warning", "the disk is nearly full"),
            (200, "checkpoint", {"path": "checkpoints/step-00000200"}),
        ],
        more=[
            *baselines(2.0, 1.9),
            Record(0, "predicted/parameters", 1000.0, "parameters", "predicted", time=START),
            Record(0, "model/parameters", 1000.0, "parameters", time=START),
            Record(0, "predicted/memory_total", 2.0 * 1024**2, "bytes", "predicted", time=START),
            Record(200, "memory/training_peak", 1.0 * 1024**2, "bytes", time=START + 200),
            Record(200, "eval/arc_easy/acc", 0.431, time=START + 200),
            Record(0, "predicted/flops_per_token", 9.8e7, "FLOP/token", "predicted", time=START),
            Record(0, "machine/peak_flops", 4.05e11, "FLOP/s", time=START),
        ],
        summary={"seconds": 3725, "tokens": 204_800, "mfu": 0.42, "tokens_per_second": 1234.0},
    )
    path = write_report(run)
    assert path == run / "report.html"
    page = check_page(path)
    for text in (
        "night", "finished", "1 h 2 min", "42.0\u00a0%", "98\u00a0MFLOP/token", "405\u00a0GFLOP/s", "train.precision",
        "bf16 measured 2.0× fp32", "the disk is nearly full", "Some CPU", "arc_easy", "0.431", "0.500", "early", "late",
    ):  # fmt: skip
        assert text in page.text, text
    assert page.text.index("late") < page.text.index("early")  # the newest sample first
    loss = chart(page, "Loss")
    assert [curve["role"] for curve in loss["curves"]] == ["faint", "line", "points"]
    assert chart(page, "Validation against compressors")["references"] == [
        {"label": "bz2", "value": 2.0},
        {"label": "xz", "value": 1.9},
    ]
    assert loss["curves"][0]["value"][0] == 5.0
    assert loss["curves"][0]["step"][-1] == 200


@pytest.mark.parametrize(
    ("bits", "sentence"),
    [
        (1.0, "better than the compressors do: 50\u00a0% fewer bits than bz2 and 44\u00a0% fewer bits than xz"),
        (1.9, "better than bz2, but not yet better than the other"),
        (2.5, "does not beat the compressors"),
    ],
)
def test_the_verdict_is_honest(tmp_path, bits, sentence):
    run = write_run(tmp_path, losses=[2 * bits * math.log(2)] * 3, validate_every=1, more=baselines(2.0, 1.8))
    assert sentence in check_page(write_report(run)).text


def test_nothing_a_run_says_becomes_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)></pre>&amp;\u2028\ud800'\""
    run = write_run(
        tmp_path / "a<b>&c",
        losses=[1.0, 2.0, 3.0],
        events=[
            (1, "sample", {"prompt": evil, "text": evil}),
            (1, "decision", {"key": evil, "value": evil, "reason": evil}),
            (1, "warning", evil.encode(errors="replace").decode()),
            (1, "environment", {evil: evil}),
        ],
        more=[Record(step, "<i>odd</i></script>", 1.0, "<u>", time=START) for step in range(4)],
        config={"evil": evil},
    )
    page = check_page(write_report(run))
    assert not {"img", "i", "u"} & set(page.tags)
    assert page.tags.count("script") == len(page.charts) + 1
    assert "alert(1)" in page.text  # shown, not run
    assert chart(page, "<i>odd</i></script>")["unit"] == "<u>"


def test_values_that_are_not_finite_are_gaps(tmp_path):
    losses = [3.0] * 10 + [float("nan"), float("inf")] + [2.0] * 30
    page = check_page(write_report(write_run(tmp_path, losses=losses, validate_every=11)))
    raw = chart(page, "Loss")["curves"][0]
    assert [step for step, value in zip(raw["step"], raw["value"], strict=True) if value is None] == [11, 12]
    assert "2 not finite, first at step 11" in page.text
    assert all(value in (2.0, 3.0) or 2.0 < value < 3.0 for value in raw["value"] if value is not None)


def test_a_run_that_has_not_begun(tmp_path):
    page = check_page(write_report(tmp_path))
    assert "not started" in page.text
    assert "No step has been recorded yet" in page.text


def test_one_record_and_no_validation(tmp_path):
    page = check_page(write_report(write_run(tmp_path / "one", losses=[4.25])))
    assert "4.250" in page.text
    assert "not finished" in page.text
    assert "bits per byte" not in page.text
    assert chart(page, "Loss")["curves"][0]["value"] == [4.25]


def test_a_killed_run_with_a_torn_line_and_broken_files(tmp_path):
    run = write_run(tmp_path / "killed", losses=[3.0, 2.0])
    with (run / "records.jsonl").open("a") as file:
        file.write('{"step": 3, "name": "train/lo')
    (run / "summary.json").write_text("{")
    (run / "config.yaml").write_text("a: [")
    page = check_page(write_report(run))
    assert "a: [" in page.text
    assert chart(page, "Loss")["curves"][0]["step"] == [1, 2]


def test_a_step_that_was_made_again_counts_once(tmp_path):
    again = [Record(2, "train/loss", 9.0, "nats/token", time=START + 50)]
    run = write_run(tmp_path / "again", losses=[3.0, 2.0, 1.0])
    writer = RecordWriter(run / "records.jsonl")
    writer.write(*again)
    writer.close()
    curve = chart(check_page(write_report(run)), "Loss")["curves"][0]
    assert curve["step"] == [1, 2, 3]
    assert curve["value"] == [3.0, 9.0, 1.0]


def test_no_such_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run"):
        write_report(tmp_path / "nowhere")


@pytest.mark.slow
def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path):
    losses = [2.0 + 0.1 * math.sin(step) for step in range(100_000)]
    losses[77_777] = 50.0
    path = write_report(
        write_run(
            tmp_path,
            losses=losses,
            validate_every=100,
            events=[(step, "sample", {"prompt": "x", "text": "y" * 20_000}) for step in range(0, 100_000, 1000)],
        )
    )
    assert path.stat().st_size < 2 * 10**6
    raw = chart(check_page(path), "Loss")["curves"][0]
    assert 50.0 in raw["value"]


def test_the_page_follows_the_reader_s_colour_scheme_and_screen(tmp_path):
    source = write_report(write_run(tmp_path, losses=[1.0, 2.0])).read_text()
    assert "prefers-color-scheme: dark" in source
    assert 'name="viewport"' in source
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'", source)


def test_config_of_another_shape_is_shown_as_it_is(tmp_path):
    run = write_run(tmp_path, losses=[1.0])
    (run / "config.yaml").write_text("- just\n- a list\n")
    (run / "summary.json").write_text(json.dumps([1]))
    assert "- just" in check_page(write_report(run)).text
