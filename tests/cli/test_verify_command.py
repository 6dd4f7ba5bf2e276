"""`modelworks verify`: exit codes, what it prints, and failures of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelworks.cli import main as frame
from modelworks.train.micro_batches import MicroBatches

RUN = """
model: {family: llama, n_layers: 4, d_model: 64, n_heads: 8, n_kv_heads: 4, vocab_size: 512, max_seq_len: 64}
data: {seq_len: 64, tokenizer: none}
train: {global_batch: 8}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the last micro-batch is lost."""
    forward = MicroBatches.forward

    def dropping(self: Any, stage: int, part: Any, index: int, inputs: Any) -> Any:
        outputs, objective = forward(self, stage, part, index, inputs)
        return outputs, objective * 0 if objective is not None and index == len(self) - 1 else objective

    monkeypatch.setattr(MicroBatches, "forward", dropping)


def last_line(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capfd.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_equal(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["verify", config, "parallel.tp=2", "--steps", "2", "--json"]) == 0
    answer = last_line(capfd)
    assert answer["verdict"] == "equal"
    assert answer["suspects"] == []
    assert set(answer["max_relative_error"]) >= {"loss", "gradient", "norm", "update"}
    assert answer["bounds"].keys() == answer["max_relative_error"].keys()
    assert all(0 <= error <= answer["bounds"][name] == 1e-10 for name, error in answer["max_relative_error"].items())
    assert answer["worst_parameter"] in {"embedding.weight", "head.weight", "final_norm.weight"} or answer[
        "worst_parameter"
    ].startswith("blocks.")
    assert answer["ranks"] == 2
    assert answer["steps"] == 2
    # Sequence parallelism of two layers, three micro-batches: two entries into each layer and one into the head.
    gathers = next(row for row in answer["collectives"] if (row["axis"], row["kind"]) == ("tp", "all_gather"))
    assert gathers["calls"] >= 3 * (2 * 2 + 1)
    assert not [row for row in answer["collectives"] if row["kind"] == "broadcast"]
    assert answer["memory"]["parameters"] > 0


def test_different(config: str, faulty: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["verify", config, "--steps", "1"]) == 1
    text = capfd.readouterr().out
    assert "DIFFERENT: 1 rank and one process" in text
    assert "rows 2 are there 0 times: micro-batch 2 of every rank" in text
    assert frame.main(["verify", config, "--steps", "1", "--json"]) == 1
    answer = last_line(capfd)
    assert answer["verdict"] == "different"
    assert answer["max_relative_error"]["gradient"] > 1e-3
    assert answer["max_relative_error"]["loss"] <= answer["bounds"]["loss"]


def test_an_impossible_layout_is_the_users_to_fix(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["verify", config, "parallel.tp=3"]) == 2
    error = capfd.readouterr().err
    assert "parallel.tp: got 3, expected a divisor of model.n_heads = 8" in error
    assert "nearest layouts that work" in error


def test_an_unknown_precision_is_refused(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["verify", config, "--precision", "fp8"]) == 2
    assert "expected float64 or bf16" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"), [("raising", "rank 1 failed: RuntimeError: this rank is broken"), ("hanging", "rank 1")]
)
def test_a_broken_rank_is_a_failure_that_names_it(
    how: str, message: str, config: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import modelworks.verify.verdict as verdict

    launch = verdict.launch
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(verdict, "launch", lambda _, *more, **rest: launch(f"broken_ranks:{how}", *more, **rest))
    assert frame.main(["verify", config, "parallel.tp=2", "parallel.timeout=8", "--json"]) == 1
    out, err = capfd.readouterr()
    assert message in err
    answer = json.loads(out.splitlines()[-1])
    assert answer["exit_code"] == 1
    assert message in answer["error"]
