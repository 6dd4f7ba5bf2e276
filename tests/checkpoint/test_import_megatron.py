"""Import of Megatron-Core's distributed checkpoints, written by the real package: `fixtures/make_megatron.py`."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelworks.checkpoint import CheckpointError, convert, load_model, open_checkpoint, open_source
from modelworks.checkpoint.formats.megatron_names import megatron_map
from modelworks.checkpoint.formats.torch_distributed import open_distributed
from modelworks.cli.main import main
from modelworks.config import ModelConfig, parameter_shapes
from modelworks.models import CausalContext, Transformer, initialize, to_hugging_face

FIXTURES = Path(__file__).parent / "fixtures"
SHAPE: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_ff": 24, "vocab_size": 49, "max_seq_len": 32}
CONFIGS = {
    "megatron-llama": ModelConfig(family="llama", n_kv_heads=2, **SHAPE),
    "megatron-qwen3": ModelConfig(
        family="qwen3", n_kv_heads=2, head_dim=8, norm_eps=1e-5, rope_theta=1e4, tie_embeddings=True, **SHAPE
    ),
    "megatron-gpt": ModelConfig(family="gpt2", feed_forward="gelu", **SHAPE),
}


@pytest.fixture
def described(tmp_path: Path) -> Any:
    """The config of a fixture as a file that --model takes."""

    def write(name: str, **changes: Any) -> str:
        config = CONFIGS[name].model_copy(update=changes)
        (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
        return str(tmp_path / "config.json")

    return write


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_megatron(name: str, tmp_path: Path, described: Any) -> None:
    reference = load_file(FIXTURES / name / "reference.safetensors")
    done = convert(str(FIXTURES / name), tmp_path / "own", "modelworks", model=described(name))
    assert done.max_difference == 0.0
    assert done.remarks == ("weights only: Megatron's optimiser state is not read",)
    assert open_checkpoint(tmp_path / "own").step == 3
    model, tokens = load_model(str(tmp_path / "own")).model, reference["tokens"]
    with torch.inference_mode():
        found = model.logits(model(tokens, torch.arange(12).expand_as(tokens), CausalContext()))
    assert reference["logits"].abs().mean() > 0.3
    torch.testing.assert_close(found, reference["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_map_gives_their_weights_back(name: str, described: Any) -> None:
    """Ours put together again are the module's own state, all of it, but for rows beyond the vocabulary."""
    config = CONFIGS[name]
    source = open_source(str(FIXTURES / name), described(name))
    own = {full: tensor.load() for full, tensor in source.tensors.items()}
    theirs = {
        full.removeprefix("weight/"): tensor
        for full, tensor in load_file(FIXTURES / name / "reference.safetensors").items()
        if full.startswith("weight/")
    }
    seen = set()
    for entry in megatron_map(config):
        full = entry.theirs if entry.layer is None else f"decoder.layers.{entry.layer}.{entry.theirs}"
        full = full.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        full = full.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        made, expected = entry.to_theirs(own, config, 56), theirs[full]
        rows = config.vocab_size if entry.arrangement == "padded" else made.shape[0]
        if entry.arrangement == "stacked":
            expected = unsharded(expected)
        assert made.shape == expected.shape
        assert torch.equal(made[:rows], expected[:rows]), full
        seen.add(full)
    assert set(theirs) - seen <= {"output_layer.weight"}


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Each of two ranks holds its half of gate above its half of up."""
    (gate_0, up_0), (gate_1, up_1) = (half.chunk(2) for half in tensor.chunk(2))
    return torch.cat([gate_0, gate_1, up_0, up_1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_map_is_its_own_inverse(name: str) -> None:
    config = CONFIGS[name]
    model = Transformer(config)
    initialize(model, seed=5)
    own = {full: tensor.detach() for full, tensor in model.named_parameters()}
    back: dict[str, torch.Tensor] = {}
    for entry in megatron_map(config):
        back |= entry.to_ours(entry.to_theirs(own, config, 64), config)
    assert {full: tuple(tensor.shape) for full, tensor in back.items()} == parameter_shapes(config)
    assert all(torch.equal(back[full], tensor) for full, tensor in own.items())


def test_command(tmp_path: Path, described: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(FIXTURES / "megatron-llama" / "iter_0000003")
    code = main(["checkpoint", "import", source, str(tmp_path / "own")])
    assert code == 2
    assert "name it with --model" in capsys.readouterr().err
    code = main(["checkpoint", "import", source, str(tmp_path / "own"), "--model", described("megatron-llama")])
    assert code == 0
    assert "weights only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_heads": 4}, "`num_query_groups` is 2, the config implies 4"),
        ({"rope_theta": 5e5}, "`rotary_base` is 10000, the config implies 500000.0"),
        ({"norm_eps": 1e-6}, "`norm_epsilon` is 1e-05, the config implies 1e-06"),
        ({"tie_embeddings": True}, "`untie_embeddings_and_output_weights` is True, the config implies False"),
        ({"vocab_size": 57}, r"`embedding.word_embeddings.weight` has shape \[56, 16\], the config implies at least"),
    ],
)
def test_another_model_is_refused(changes: dict[str, Any], message: str, described: Any) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_source(str(FIXTURES / "megatron-llama"), described("megatron-llama", **changes))


def copied(name: str, tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / name, tmp_path / "copy")
    return tmp_path / "copy" / "iter_0000003"


def test_weights_that_no_argument_describes_must_fit_by_shape(tmp_path: Path, described: Any) -> None:
    directory = copied("megatron-llama", tmp_path)
    (directory / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has shape \[32, 16\], the config implies \[48, 16\]"):
        open_source(str(directory), described("megatron-llama", n_kv_heads=4))
    with pytest.raises(CheckpointError, match=r"`decoder\.layers\.0\.self_attention\.linear_qkv\.bias` is missing"):
        open_source(str(directory), described("megatron-llama", attention_bias=True, attention_output_bias=True))


def test_other_kinds_are_refused(tmp_path: Path, described: Any) -> None:
    directory = copied("megatron-llama", tmp_path)
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="written as 'zarr'; only Megatron-Core's `torch_dist` is read"):
        open_source(str(directory), described("megatron-llama"))
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match=r"iter_0000007: no distributed checkpoint.*\.metadata is missing"):
        open_source(str(directory.parent), described("megatron-llama"))


def test_damage_is_noticed(tmp_path: Path, described: Any) -> None:
    directory = copied("megatron-gpt", tmp_path)
    path = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(path, 1000)
    source = open_source(str(directory), described("megatron-gpt"))
    with pytest.raises(CheckpointError, match=path.name):
        [tensor.load() for tensor in source.tensors.values()]
    with pytest.raises(CheckpointError, match=path.name):
        convert(str(directory), tmp_path / "own", "modelworks", model=described("megatron-gpt"))
    assert not (tmp_path / "own").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_that_leads_outside_is_refused(tmp_path: Path) -> None:
    """Written by torch itself, then changed: a file elsewhere, a chunk outside, one that is missing."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.arange(6.0).view(2, 3)}, checkpoint_id=str(tmp_path / "dcp"))
    assert open_distributed(tmp_path / "dcp")["a"].read([(0, 2), (1, 3)]).tolist() == [[1, 2], [4, 5]]
    text = (tmp_path / "dcp" / ".metadata").read_bytes()

    def changed(change: Any) -> None:
        metadata = pickle.loads(text)
        change(metadata)
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))

    def elsewhere(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../secret.distcp"

    def outside(metadata: Any) -> None:
        metadata.state_dict_metadata["a"].chunks[0].offsets = torch.Size([1, 0])

    def less(metadata: Any) -> None:
        metadata.state_dict_metadata["a"].size = torch.Size([3, 3])

    def twice(metadata: Any) -> None:
        metadata.state_dict_metadata["a"].chunks *= 2

    for change, message in (
        (elsewhere, "not inside the directory"),
        (outside, "has a chunk"),
        (less, "do not cover it exactly once"),
        (twice, "do not cover it exactly once"),
    ):
        changed(change)
        with pytest.raises(CheckpointError, match=message):
            open_distributed(tmp_path / "dcp")
