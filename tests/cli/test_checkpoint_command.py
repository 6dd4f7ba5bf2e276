"""`modelworks checkpoint ls | show | verify | prune | export`; `import` is tested with its formats."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworks.checkpoint import explain_unfinished, open_checkpoint, open_storage, write_checkpoint
from modelworks.checkpoint.checksums import digest
from modelworks.checkpoint.storage import open_folder
from modelworks.cli.main import main
from modelworks.config import dump_yaml
from modelworks.models import Transformer, initialize

LOSSES = {100: 3.0, 200: 2.0, 300: 2.5}


@pytest.fixture
def config(tiny_config: Callable[..., Any]) -> Any:
    return tiny_config("checkpoint.keep_every=200 steps", "evaluate.best_metric=val/loss")


def write(directory: Path | str, config: Any, step: int) -> None:
    model = Transformer(config.model)
    initialize(model, seed=step)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    moments = {f"{name}/exp_avg": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    write_checkpoint(
        directory,
        step=step,
        config=config,
        sections={"model": tensors, "optimizer": moments},
        state={"updates": step},
        tokenizer=None,
        metrics={"val/loss": LOSSES.get(step, 9.0)},
    )


@pytest.fixture
def run(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/tiny with three checkpoints; the second is the best and a milestone."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "tiny"
    (directory / "checkpoints").mkdir(parents=True)
    (directory / "config.yaml").write_text(dump_yaml(config))
    for step in LOSSES:
        write(directory / "checkpoints", config, step)
    return directory


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    def run_command(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def result(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*"))


def half_written(run: Path) -> Path:
    """Step 400 as two of four ranks left it: one finished, one in the middle."""
    directory = run / "checkpoints" / ".tmp-step-00000400-0123abcd"
    directory.mkdir()
    (directory / "rank-00000.safetensors").write_bytes(b"x" * 100)
    (directory / "rank-00000.json").write_text("{}")
    (directory / "rank-00002.safetensors").write_bytes(b"x" * 50)
    return directory


@pytest.mark.parametrize("place", ["tiny", "runs/tiny", "runs/tiny/checkpoints"])
def test_ls(place: str, run: Path, call: Any) -> None:
    code, out, _ = call("ls", place)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows[1:4]] == ["100", "200", "300"]
    assert "best, milestone" in out.splitlines()[2]
    assert "latest" in out.splitlines()[3]
    assert "val/loss 2.0000" in out.splitlines()[2]
    assert "3 complete of 3" in out
    _, out, _ = call("ls", place, "--json")
    listed = result(out)["checkpoints"]
    assert [entry["marks"] for entry in listed] == [[], ["best", "milestone"], ["latest"]]
    assert [entry["metrics"]["val/loss"] for entry in listed] == [3.0, 2.0, 2.5]
    for entry in listed:
        files = Path(entry["path"]).rglob("*")
        assert entry["bytes"] == sum(path.stat().st_size for path in files if path.is_file())


def test_ls_says_what_is_not_complete(run: Path, call: Any) -> None:
    half_written(run)
    (run / "checkpoints" / "step-00000300" / "manifest.json").unlink()
    _, out, _ = call("ls", "tiny", "--json")
    listed = result(out)["checkpoints"]
    assert [(entry["step"], entry["state"]) for entry in listed] == [
        (100, "complete"),
        (200, "complete"),
        (300, "incomplete"),
        (400, "incomplete"),
    ]
    assert listed[1]["marks"] == ["latest", "best", "milestone"]
    assert "manifest.json" in listed[2]["problem"]
    assert "rank 0 finished writing" in listed[3]["problem"]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_urls(scheme: str, config: Any, tmp_path: Path, call: Any) -> None:
    url = f"memory://{tmp_path.name}/ls" if scheme == "memory" else f"file://{tmp_path}/ls"
    for step in (5, 6):
        write(url, config, step)
    code, out, _ = call("ls", url, "--json")
    assert code == 0
    assert [entry["step"] for entry in result(out)["checkpoints"]] == [5, 6]
    assert call("verify", url)[0] == 0
    assert call("verify", f"{url}/step-00000005")[0] == 0
    code, out, _ = call("show", f"{url}@5", "--json")
    assert code == 0
    assert result(out)["step"] == 5
    assert call("prune", url, "--keep-last", "1")[0] == 0
    assert open_storage(url).checkpoints() == ["step-00000006"]


def test_a_run_that_saves_elsewhere(run: Path, config: Any, tmp_path: Path, tiny_config: Any, call: Any) -> None:
    elsewhere = tiny_config(f"checkpoint.storage={tmp_path}/elsewhere")
    (run / "config.yaml").write_text(dump_yaml(elsewhere))
    write(tmp_path / "elsewhere", elsewhere, 7)
    _, out, _ = call("ls", "tiny", "--json")
    assert [entry["step"] for entry in result(out)["checkpoints"]] == [7]


def test_show(run: Path, config: Any, call: Any) -> None:
    code, out, _ = call("show", "tiny@200")
    assert code == 0
    for words in ("step         200", "one process", "val/loss 2.0000", "float32", "llama", "tiny"):
        assert words in out
    _, out, _ = call("show", "tiny@200", "--tensors", "--json")
    shown = result(out)
    shapes = open_checkpoint(run / "checkpoints" / "step-00000200").shapes("model")
    assert shown["sections"]["model"]["tensors"] == len(shapes)
    assert shown["sections"]["model"]["bytes"] == 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    assert shown["layout"]["world_size"] == 1
    _, out, _ = call("show", "tiny", "--tensors")
    assert "300" in out
    for name in shapes:
        assert f"model/{name}" in out


def test_show_against(run: Path, tmp_path: Path, tiny_config: Any, call: Any) -> None:
    other = tiny_config("optimizer.lr=3e-3", "checkpoint.keep_every=200 steps", "evaluate.best_metric=val/loss")
    write(tmp_path / "other", other, 300)
    _, out, _ = call("show", "tiny", "--against", tmp_path / "other" / "step-00000300", "--json")
    assert result(out)["differences"] == [{"key": "optimizer.lr", "this": 0.01, "other": 0.003}]
    _, out, _ = call("show", "tiny@100", "--against", "tiny")
    assert "the configuration is that of tiny" in out


def test_show_explains_a_half_written_one(run: Path, call: Any) -> None:
    directory = half_written(run)
    _, by_step, _ = call("show", "tiny@400", "--json")
    code, out, _ = call("show", directory, "--json")
    assert code == 0
    assert result(by_step)["reasons"] == result(out)["reasons"]
    reasons = result(out)["reasons"]
    assert "rank 0 finished writing (the part file is there)" in reasons
    assert "rank 2 began and did not finish (shard files, but no part file)" in reasons
    assert reasons[-1].startswith("manifest.json is missing")
    assert result(out)["complete"] is False


def test_ranks_that_wrote_nothing_are_named(run: Path) -> None:
    folder = open_folder(half_written(run))
    assert "ranks 1, 3 of 4 wrote nothing" in list(explain_unfinished(folder, 4))
    for rank in (1, 2, 3):
        (run / "checkpoints" / ".tmp-step-00000400-0123abcd" / f"rank-0000{rank}.json").write_text("{}")
    assert list(explain_unfinished(folder, 4))[1:] == [
        "ranks 0, 1, 2, 3 finished writing (the part file is there)",
        "manifest.json is missing, which rank 0 was about to write",
    ]


def test_verify(run: Path, call: Any) -> None:
    code, out, _ = call("verify", "tiny", "--json")
    assert code == 0
    assert result(out)["bytes"] > 0
    directory = run / "checkpoints" / "step-00000200"
    path = next(directory.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    code, out, err = call("verify", "tiny@200", "--json")
    assert code == 1
    assert f"{path.relative_to(Path.cwd())}: the checksum of tensor `optimizer/" in err
    assert result(out)["exit_code"] == 1
    code, out, err = call("verify", "tiny", "--all")
    assert code == 1
    assert out.count("whole") == 2
    assert str(path.relative_to(Path.cwd())) in err
    assert call("verify", "tiny")[0] == 0, "the newest is whole"


def test_verify_of_truncated_and_missing_files(run: Path, call: Any) -> None:
    path = next((run / "checkpoints" / "step-00000300").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = call("verify", "tiny@300")
    assert code == 1
    assert path.name in err
    path.unlink()
    code, _, err = call("verify", "tiny@300")
    assert code == 1
    assert path.name in err
    code, out, err = call("verify", "tiny")
    assert code == 1, "the newest is not complete, and the one before it does not hide that"
    assert "step-00000200: whole" in out
    assert path.name in err


def test_prune(run: Path, call: Any) -> None:
    directory = run / "checkpoints"
    code, out, _ = call("prune", "tiny", "--keep-last", "1", "--best", "val/loss", "--dry-run")
    assert code == 0
    assert "would remove step-00000100" in out
    assert steps(directory) == [100, 200, 300]
    code, out, _ = call("prune", "tiny", "--keep-last", "1", "--best", "val/loss", "--json")
    assert result(out)["removed"] == ["step-00000100"]
    assert steps(directory) == [200, 300]
    call("prune", "tiny", "--keep-every", "200")
    assert steps(directory) == [200, 300]
    code, _, err = call("prune", "tiny")
    assert code == 2
    assert "say what to keep" in err
    assert steps(directory) == [200, 300]
    for _ in range(2):
        call("prune", "tiny", "--keep-last", "1")
        assert steps(directory) == [300], "never below one"


def test_prune_beside_a_run(run: Path, call: Any) -> None:
    """The run removes by its own rules; only looking is allowed."""
    with open_storage(run / "checkpoints").hold():
        code, _, err = call("prune", "tiny", "--keep-last", "1")
        assert code == 2
        assert f"is in use by another run, or by `checkpoint prune` (process {os.getpid()} on " in err
        assert call("prune", "tiny", "--keep-last", "1", "--dry-run")[0] == 0
    assert steps(run / "checkpoints") == [100, 200, 300]


def test_prune_by_the_highest_value(run: Path, call: Any) -> None:
    call("prune", "tiny", "--best", "val/loss", "--highest")
    assert steps(run / "checkpoints") == [100, 300]


def test_prune_counts_complete_ones_only(run: Path, call: Any) -> None:
    """With the newest damaged, the newest that is complete stays."""
    (run / "checkpoints" / "step-00000300" / "manifest.json").unlink()
    half_written(run)
    call("prune", "tiny", "--keep-last", "1")
    assert steps(run / "checkpoints") == [200, 300]
    assert (run / "checkpoints" / ".tmp-step-00000400-0123abcd").is_dir()


def test_export(run: Path, tmp_path: Path, call: Any) -> None:
    code, out, _ = call("export", "tiny@best", tmp_path / "out", "--max-shard-size", "8KiB")
    assert code == 0
    assert "largest difference 0.0e+00" in out
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "tinny"], "did you mean `tiny`?"),
        (["ls", "runs/tiny/config.yaml"], "is a file"),
        (["ls", "s4://bucket/x"], "no storage is known by the scheme `s4`"),
        (["show", "tiny@150"], "no such step; there are latest, best, 100, 200, 300"),
        (["verify", "tiny@150"], "no such step"),
        (["show", "runs"], "no checkpoint is here"),
        (["ls", "runs"], "no checkpoint is here"),
        (["ls", "memory://nothing"], "no checkpoint is here"),
        (["prune", "runs", "--keep-last", "1"], "no checkpoint is here"),
        (["show", "tiny@"], "names no checkpoint after the `@`"),
        (["ls", "runs/tiny/checkpoints/step-00000100"], "is one checkpoint itself; `modelworks checkpoint show"),
        (["prune", "tiny", "--best", "val/los"], "did you mean `val/loss`?"),
        (["prune", "tiny", "--keep-last", "0"], "--keep-last"),
        (["show", "tiny", "--against", "tinny"], "did you mean `tiny`?"),
        (["export", "tiny", "out", "--max-shard-size", "many"], "--max-shard-size"),
        (["import", "tiny", "out", "--model", "llama-tiny"], "says itself what model it holds"),
        (["lst"], "lst"),
    ],
)
def test_mistakes(arguments: list[str], message: str, run: Path, call: Any) -> None:
    code, out, err = call(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err
    assert len(err.strip().splitlines()) == 1


def test_no_checkpoint_yet(run: Path, tmp_path: Path, call: Any) -> None:
    """A run that has saved nothing is no mistake."""
    shutil.rmtree(run / "checkpoints")
    fresh = tmp_path / "fresh"
    with open_storage(fresh).hold():
        pass
    for place in ("tiny", fresh):
        code, out, _ = call("ls", place)
        assert code == 0
        assert "no checkpoint in" in out
        assert call("prune", place, "--keep-last", "1")[0] == 0
    code, _, err = call("verify", "tiny")
    assert code == 2
    assert "no checkpoint is here" in err


@pytest.mark.parametrize("selector", ["\u00b2", "9" * 200, "\u0661\u0660\u0660"])
def test_a_selector_that_is_no_step(run: Path, call: Any, selector: str) -> None:
    code, out, _ = call("show", f"tiny@{selector}", "--json")
    assert code == 2
    assert "no such step; there are latest, best, 100, 200, 300" in result(out)["error"]


def test_show_of_a_configuration_without_a_name(run: Path, call: Any) -> None:
    path = run / "checkpoints" / "step-00000300"
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["config"]["name"]
    text = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.checksum").write_text(f"{digest(text)}\n")
    code, out, _ = call("show", path)
    assert code == 0
    assert "without a name" in out
