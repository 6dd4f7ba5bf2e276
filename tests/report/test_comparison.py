import pytest
from page_checks import chart, check_page
from synthetic import write_run

from modelworks.report import write_comparison
from modelworks.report.comparison import config_differences
from modelworks.report.run_data import read_run


def test_runs_side_by_side(tmp_path):
    one = write_run(
        tmp_path / "one", losses=[3.0] * 40, validate_every=10, config={"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}}
    )
    two = write_run(
        tmp_path / "two", losses=[2.0] * 60, validate_every=10, config={"optimizer": {"lr": 0.2, "betas": [0.9, 0.95]}}
    )
    out = write_comparison([one, two], tmp_path / "pages" / "out.html")
    page = check_page(out)
    curves = chart(page, "Training loss, smoothed")["curves"]
    assert [curve["label"] for curve in curves] == ["one", "two"]
    assert [curve["colour"] for curve in curves] == [0, 1]
    assert "optimizer.lr" in page.text
    assert "optimizer.betas" not in page.text
    assert "★ 2.000" in page.text


def test_differences_cover_keys_that_one_run_lacks(tmp_path):
    runs = [
        read_run(write_run(tmp_path / name, losses=[1.0], config=config))
        for name, config in (("a", {"x": {"y": 1, "z": None}}), ("b", {"x": {"y": 1}}))
    ]
    assert config_differences(runs) == [("x.z", ["null", "–"])]


def test_same_names_are_told_apart_and_an_empty_run_does_not_hurt(tmp_path):
    one = write_run(tmp_path / "first" / "run", losses=[1.0, 2.0])
    two = tmp_path / "second" / "run"
    two.mkdir(parents=True)
    page = check_page(write_comparison([one, two], tmp_path / "out.html"))
    assert "first/run" in page.text
    assert "second/run" in page.text


def test_many_runs_have_distinct_looks(tmp_path):
    runs = [write_run(tmp_path / f"run{i}", losses=[1.0 + i, 1.0]) for i in range(12)]
    curves = chart(check_page(write_comparison(runs, tmp_path / "out.html")), "Training loss, smoothed")["curves"]
    looks = {(curve["colour"], curve["dashed"]) for curve in curves}
    assert len(looks) == 12


def test_no_such_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run"):
        write_comparison([tmp_path / "nowhere"], tmp_path / "out.html")


def test_a_page_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    one = write_run(tmp_path / "one", losses=[1.0])
    (tmp_path / "out.html").mkdir()
    with pytest.raises(OSError, match=r"out\.html'$") as caught:
        write_comparison([one, one], tmp_path / "out.html")
    assert caught.value.filename == str(tmp_path / "out.html")
    assert not list(tmp_path.glob(".*"))
