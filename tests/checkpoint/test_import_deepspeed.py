"""Import of DeepSpeed checkpoints, written by the real package: `fixtures/make_deepspeed.py`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from modelworks.checkpoint import CheckpointError, convert, load_model, open_checkpoint, open_source
from modelworks.checkpoint.formats.hugging_face import read_config
from modelworks.cli.main import main
from modelworks.config import OptimizerConfig
from modelworks.models import CausalContext, name_map
from modelworks.optim import build_optimizer

FIXTURES = Path(__file__).parent / "fixtures"
STAGES = [0, 1, 2, 3]


def fixture(stage: int) -> Path:
    return FIXTURES / f"deepspeed-zero{stage}"


def reference(stage: int, kind: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed reconstructs, under Hugging Face's names."""
    tensors = load_file(fixture(stage) / "reference.safetensors")
    return {name.removeprefix(f"{kind}/"): value for name, value in tensors.items() if name.startswith(f"{kind}/")}


def ours(stage: int, kind: str) -> dict[str, torch.Tensor]:
    """The same under our names. The map is that of Hugging Face's files, tested against transformers."""
    theirs = reference(stage, kind)
    entries = [entry for entry in name_map(read_config(fixture(stage))) if entry.theirs in theirs]
    assert all(len(entry.ours) == 1 and not entry.transposed for entry in entries)
    return {entry.ours[0]: theirs[entry.theirs] for entry in entries}


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_those_that_deepspeed_reconstructs(stage: int, tmp_path: Path) -> None:
    done = convert(str(fixture(stage)), tmp_path / "own", "modelworks")
    assert done.max_difference == 0.0
    checkpoint = open_checkpoint(tmp_path / "own")
    found, expected = dict(checkpoint.tensors("model")), ours(stage, "weight")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.float()), name
    assert checkpoint.step == 3


@pytest.mark.parametrize("stage", STAGES)
def test_logits_are_those_of_the_model_that_was_trained(stage: int, tmp_path: Path) -> None:
    convert(str(fixture(stage)), tmp_path / "own", "modelworks")
    config = transformers.LlamaConfig.from_pretrained(fixture(stage))
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in reference(stage, "weight").items()}, strict=False)
    model.tie_weights()
    tokens = torch.arange(20)[None] * 2
    with torch.inference_mode():
        expected = model(tokens).logits
        own = load_model(str(tmp_path / "own")).model
        found = own.logits(own(tokens, torch.arange(20)[None], CausalContext()))
    assert expected.abs().mean() > 0.3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_are_those_of_the_optimizer(stage: int, tmp_path: Path) -> None:
    done = convert(str(fixture(stage)), tmp_path / "own", "modelworks")
    checkpoint = open_checkpoint(tmp_path / "own")
    found = dict(checkpoint.tensors("optimizer"))
    expected = {
        f"{name}/{kind}": tensor for kind in ("exp_avg", "exp_avg_sq") for name, tensor in ours(stage, kind).items()
    }
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert tensor.abs().sum() > 0
        assert torch.equal(found[name], tensor), name
    assert checkpoint.state["updates"] == 3
    frozen = len(checkpoint.shapes("model")) * 2 - len(found)
    assert done.remarks == ((f"{frozen // 2} parameters were frozen and have no optimiser state",) if frozen else ())


def test_our_optimizer_takes_the_moments(tmp_path: Path) -> None:
    """Of a model without frozen parameters: all of them, and nothing else."""
    convert(str(fixture(2)), tmp_path / "own", "modelworks")
    checkpoint = open_checkpoint(tmp_path / "own")
    model = load_model(str(tmp_path / "own")).model
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    optimizer.load_state(checkpoint.tensors("optimizer"), checkpoint.state["updates"])
    assert optimizer.updates == 3


def test_without_zero_it_is_weights_only(tmp_path: Path) -> None:
    done = convert(str(fixture(0)), tmp_path / "own", "modelworks")
    assert "weights only" in done.remarks[0]
    assert open_checkpoint(tmp_path / "own").sections() == ["model"]


def test_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["checkpoint", "import", str(fixture(3)), str(tmp_path / "own"), "--json"])
    captured = capsys.readouterr()
    assert code == 0
    result = json.loads(captured.out.splitlines()[-1])
    assert result["source"].startswith("DeepSpeed checkpoint")
    assert "frozen" in result["remarks"][0]


def copied(stage: int, tmp_path: Path) -> Path:
    shutil.copytree(fixture(stage), tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_rank_is_named(stage: int, tmp_path: Path) -> None:
    source = copied(stage, tmp_path)
    for path in source.rglob("*zero_pp_rank_1_*_optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it, the optimiser's files of 1 are there"):
        open_source(str(source))


def test_model_parallel_checkpoints_are_refused(tmp_path: Path) -> None:
    source = copied(0, tmp_path)
    directory = next(source.glob("global_step*"))
    shutil.copy(directory / "mp_rank_00_model_states.pt", directory / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor, pipeline or expert parallelism, which is not read"):
        open_source(str(source))


def test_a_config_is_needed_and_must_fit(tmp_path: Path) -> None:
    source = copied(2, tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"does not say what model it holds.*--model"):
        open_source(str(source))
    with pytest.raises(CheckpointError, match="no preset and no file; did you mean `llama-tiny`"):
        open_source(str(source), "llama-tinny")
    with pytest.raises(CheckpointError, match="the weights do not fit the config"):
        open_source(str(source), "llama-tiny")
    wrong = tmp_path / "other.json"
    wrong.write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(  # a head that is tied is one that equals the embedding
        open_source(str(source), str(wrong)).tensors["head.weight"].load(), ours(2, "weight")["embedding.weight"]
    )
    with pytest.raises(CheckpointError, match="says itself what model it holds"):
        open_source(str(FIXTURES / "version-1" / "step-00000003"), "llama-tiny")


def test_damage_is_noticed(tmp_path: Path) -> None:
    source = copied(1, tmp_path)
    path = next(source.rglob("*zero_pp_rank_0_*_optim_states.pt"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=path.name):
        open_source(str(source))


def test_a_hostile_latest_leads_nowhere(tmp_path: Path) -> None:
    source = copied(1, tmp_path)
    (source / "latest").write_text("../copy")
    with pytest.raises(CheckpointError):
        open_source(str(source))


def test_a_state_of_another_optimizer_is_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a momentum optimiser: the same files, with one state that is not Adam's."""
    from modelworks.checkpoint.formats import deepspeed

    original = deepspeed.read_torch_file

    def changed(path: Path) -> Any:
        value = original(path)
        if "optimizer_state_dict" in value:
            for group in value["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                group["momentum"] = group.pop("exp_avg_sq")
        return value

    monkeypatch.setattr(deepspeed, "read_torch_file", changed)
    source = open_source(str(fixture(1)))
    assert not source.optimizer
    assert "weights only" in source.remarks[0]
