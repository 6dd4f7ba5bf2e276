"""Finding a model from what a user typed, and loading it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelworks.checkpoint import CheckpointError, convert, load_model, open_checkpoint, open_model, write_checkpoint
from modelworks.config import ModelConfig, RunConfig
from modelworks.models import Transformer, initialize, routing_state

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 300, "max_seq_len": 32}
CONFIG = ModelConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=300, max_seq_len=32)
RUN = RunConfig.model_validate({"model": CONFIG, "data": {"seq_len": 32, "tokenizer": {"vocab_size": 300}}})


def model_of(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    initialize(model, seed=seed)
    return model


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three checkpoints whose weights are initialised from the step; step 20 has the lowest loss."""
    monkeypatch.chdir(tmp_path)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        write_checkpoint(
            Path("runs/my-run/checkpoints"),
            step=step,
            config=RUN,
            sections={"model": dict(model_of(step).named_parameters())},
            state={},
            tokenizer=None,
            metrics={"val_loss": loss},
        )
    return tmp_path / "runs" / "my-run"


def same(path: str, step: int) -> bool:
    return torch.equal(load_model(path).model.embedding.weight, model_of(step).embedding.weight)


def test_ways_to_name_a_run(run: Path) -> None:
    for name in ("my-run", "runs/my-run", str(run), f"{run}/checkpoints", "my-run@latest", "my-run@30"):
        assert same(name, 30), name
    assert same("my-run@best", 20)
    assert same("my-run@10", 10)
    assert same("runs/my-run/checkpoints/step-00000020", 20)
    loaded = load_model("my-run")
    assert loaded.config == CONFIG
    assert "step 30" in loaded.source
    assert not loaded.model.training
    assert load_model("my-run", dtype=torch.bfloat16).model.embedding.weight.dtype == torch.bfloat16


def test_every_parameter_is_loaded(run: Path) -> None:
    expected = dict(model_of(30).named_parameters())
    found = dict(load_model("my-run").model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    fresh = model_of(0)
    open_model("my-run").load_into(dict(fresh.named_parameters()))
    assert all(torch.equal(value, expected[name]) for name, value in fresh.named_parameters())


def test_a_damaged_newest_checkpoint_is_skipped_aloud(run: Path) -> None:
    (run / "checkpoints" / "step-00000030" / "rank-00000.safetensors").write_bytes(b"")
    said: list[str] = []
    loaded = load_model("my-run", notify=said.append)
    assert "step 20" in loaded.source
    assert len(said) == 1
    assert "skipped step-00000030" in said[0]
    assert "rank-00000.safetensors: truncated" in said[0]
    with pytest.raises(CheckpointError, match="truncated"):
        load_model("my-run@30")


def test_a_directory_that_hides_a_run_is_said(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "my-run").mkdir()
    with pytest.raises(CheckpointError, match="my-run: no model here"):
        load_model("my-run", notify=said.append)
    assert said == ["`my-run` is taken as ./my-run, which is here; the run of that name is runs/my-run"]
    load_model("runs/my-run", notify=said.append)
    assert len(said) == 1


def test_what_is_no_model(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    (tmp_path / "runs" / "young" / "checkpoints").mkdir(parents=True)
    for name, message in [
        ("my-rum", r"no such model \(did you mean `my-run`\?\).*looked for"),
        ("nothing-alike", r"looked for a file or directory.*runs here: my-run"),
        ("empty", r"no model here: looked for manifest.json .* config.json"),
        ("notes.txt", "not a model file"),
        ("weights.safetensors", "give the directory"),
        ("my-run@", "names no checkpoint after the `@`; give a step, `latest` or `best`, as in `my-run@latest`"),
        ("my-run@15", r"no such step; there are latest, best, 10, 20, 30"),
        ("young", "no checkpoint yet"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            load_model(name)


def test_a_checkpoint_of_another_model(run: Path) -> None:
    other = Transformer(ModelConfig(n_layers=2, d_model=32, n_heads=2, vocab_size=300, max_seq_len=32))
    with pytest.raises(CheckpointError, match=r"another model: `embedding.weight` has shape \[300, 16\], expected"):
        open_model("my-run").load_into(dict(other.named_parameters()))


def test_a_damaged_optimizer_does_not_hide_the_model(tmp_path: Path) -> None:
    weights = dict(model_of(7).named_parameters())
    sections = {"model": weights, "optimizer": {"embedding.weight/exp_avg": torch.ones(4)}}
    directory = tmp_path / "checkpoints"
    path = write_checkpoint(directory, step=7, config=RUN, sections=sections, state={}, tokenizer=None)
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    assert same(str(tmp_path), 7)
    with pytest.raises(CheckpointError, match=r"optimizer/embedding\.weight/exp_avg"):
        open_checkpoint(path).verify()


def test_biases_of_experts_come_with_the_model(tmp_path: Path) -> None:
    config = ModelConfig(family="mixtral", **SIZES, n_experts=4, dense_layers=[0], d_expert=8, router_bias=True)
    model = Transformer(config)
    initialize(model, seed=0)
    biases = {"blocks.1.feed_forward.router.bias": torch.tensor([0.5, -0.5, 0.25, 0.0])}
    sections = {"model": dict(model.named_parameters())}
    run = RunConfig.model_validate({"model": config, "data": {"seq_len": 32, "tokenizer": {"vocab_size": 300}}})
    whole = {"config": run, "state": {}, "tokenizer": None}
    with_biases = write_checkpoint(tmp_path / "with", step=1, sections={**sections, "routing": biases}, **whole)
    without = write_checkpoint(tmp_path / "without", step=1, sections=sections, **whole)
    convert(str(with_biases), tmp_path / "converted", "modelworks")
    for path in (with_biases, tmp_path / "converted"):
        loaded = routing_state(load_model(str(path)).model)
        assert loaded.keys() == biases.keys()
        assert all(torch.equal(loaded[name], bias) for name, bias in biases.items())
    with pytest.raises(CheckpointError, match=r"`routing` .*`blocks\.1\.feed_forward\.router\.bias` is missing"):
        load_model(str(without))
