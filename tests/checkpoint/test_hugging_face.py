"""Import and export of Hugging Face directories, with transformers as the reference, both ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modelworks.checkpoint import CheckpointError, convert, load_model, open_checkpoint, write_checkpoint
from modelworks.config import ModelConfig, RunConfig, UserError
from modelworks.models import CausalContext, to_hugging_face

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96, "initializer_range": 0.3}


def published(family: str, **changes: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    names = {"gpt2": "GPT2", "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    names |= {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    config_class = getattr(transformers, f"{names[family]}Config")
    values: dict[str, Any] = dict(GPT2 if family == "gpt2" else SMALL)
    if family.startswith("qwen3"):
        values["head_dim"] = 16
    if family == "mixtral":
        values["num_local_experts"] = 4
    if family == "qwen3_moe":
        values |= {"num_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    config = config_class(**(values | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # norms and biases that matter
        if name.endswith("bias") or "norm" in name or "ln_" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.eval()


def our_logits(path: Path | str, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(str(path)).model
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.inference_mode():
        return model.logits(model(tokens, positions, CausalContext()))


def their_logits(model: transformers.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens).logits


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_both_ways(family: str, tied: bool, tmp_path: Path) -> None:
    reference = published(family, tie_word_embeddings=tied)
    theirs, own, back = tmp_path / "theirs", tmp_path / "own", tmp_path / "back"
    reference.save_pretrained(theirs, max_shard_size="8KB")
    assert len(list(theirs.glob("*.safetensors"))) > 1
    expected = their_logits(reference, tokens())
    assert expected.abs().mean() > 0.3, "outputs of order 1, so that the tolerance means something"
    torch.testing.assert_close(our_logits(theirs, tokens()), expected, rtol=0, atol=1e-4)

    done = convert(str(theirs), own, "modelworks")
    assert done.max_difference == 0.0
    assert open_checkpoint(own).model_config.family == family
    assert open_checkpoint(own).model_config.tie_embeddings == tied
    torch.testing.assert_close(our_logits(own, tokens()), expected, rtol=0, atol=1e-4)

    convert(str(own), back, "hf", max_shard_bytes=8_000)
    assert (back / "model.safetensors.index.json").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    torch.testing.assert_close(their_logits(again, tokens()), expected, rtol=0, atol=1e-4)
    original = dict(reference.named_parameters())
    for name, value in again.named_parameters():
        assert torch.equal(value, original[name]), name
    assert ("lm_head.weight" in {n for f in back.glob("*.safetensors") for n in load_file(f)}) != tied


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_are_read_too(family: str, tmp_path: Path) -> None:
    reference = published(family)
    reference.save_pretrained(tmp_path / "stacked", save_original_format=False, max_shard_size="20KB")
    assert any("experts.gate_up_proj" in n for f in (tmp_path / "stacked").glob("*.safetensors") for n in load_file(f))
    torch.testing.assert_close(
        our_logits(tmp_path / "stacked", tokens()), their_logits(reference, tokens()), rtol=0, atol=1e-4
    )


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    published("mixtral").save_pretrained(tmp_path)
    edit(tmp_path, drop=("model.layers.1.block_sparse_moe.experts.2.w3.weight",))
    with pytest.raises(
        CheckpointError, match=r"`model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight` is missing"
    ):
        load_model(str(tmp_path))
    set_config(tmp_path, num_local_experts=60_000)
    with pytest.raises(CheckpointError, match="claims 60,000 experts, the files hold"):
        load_model(str(tmp_path))


def test_what_only_training_uses_survives_and_a_router_bias_is_refused(tmp_path: Path) -> None:
    published("mixtral", router_aux_loss_coef=0.03).save_pretrained(tmp_path / "theirs")
    set_config(tmp_path / "theirs", expert_capacity=1.5, router_z_loss=0.01)
    convert(str(tmp_path / "theirs"), tmp_path / "own", "modelworks")
    model = open_checkpoint(tmp_path / "own").model_config
    assert (model.expert_capacity, model.router_z_loss, model.router_aux_loss) == (1.5, 0.01, 0.03)
    convert(str(tmp_path / "own"), tmp_path / "back", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["expert_capacity"] == 1.5
    with pytest.raises(UserError, match=r"model\.router_bias: got true, expected False"):
        to_hugging_face(model.model_copy(update={"router_bias": True}))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
    ],
    ids=["linear", "yarn", "biases", "head_dim"],
)
def test_options_survive(changes: dict[str, Any], tmp_path: Path) -> None:
    if changes.get("rope_parameters", {}).get("rope_type") == "yarn":
        changes["rope_parameters"]["original_max_position_embeddings"] = 16
    reference = published("llama", **changes)
    reference.save_pretrained(tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "own", "modelworks")
    convert(str(tmp_path / "own"), tmp_path / "back", "hf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    torch.testing.assert_close(their_logits(again, tokens()), their_logits(reference, tokens()), rtol=0, atol=1e-4)


def test_dtype(tmp_path: Path) -> None:
    published("llama").save_pretrained(tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "half", "hf", dtype=torch.bfloat16)
    assert {value.dtype for value in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(str(tmp_path / "half"), dtype=torch.bfloat16).model.embedding.weight.dtype == torch.bfloat16


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    published("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def edit(directory: Path, drop: tuple[str, ...] = (), **tensors: torch.Tensor) -> None:
    values = load_file(directory / "model.safetensors")
    kept = {name: value for name, value in (values | tensors).items() if name not in drop}
    save_file({name: value.contiguous() for name, value in kept.items()}, directory / "model.safetensors")


def set_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))


def test_a_stored_copy_of_a_tied_head(llama: Path) -> None:
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    before = our_logits(llama, tokens())
    edit(llama, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(our_logits(llama, tokens()), before)
    edit(llama, **{"lm_head.weight": embedding + 1})
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` differs"):
        load_model(str(llama))
    set_config(llama, tie_word_embeddings=False)
    assert not torch.equal(our_logits(llama, tokens()), before)


def test_known_buffers_are_left_out(llama: Path) -> None:
    before = our_logits(llama, tokens())
    edit(llama, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(our_logits(llama, tokens()), before)


def test_what_does_not_fit_is_listed(llama: Path) -> None:
    edit(
        llama,
        drop=("model.norm.weight",),
        **{"model.extra.weight": torch.ones(2), "model.layers.1.mlp.up_proj.weight": torch.ones(3, 3)},
    )
    with pytest.raises(CheckpointError) as error:
        load_model(str(llama))
    text = str(error.value)
    assert "`model.extra.weight` has no place in a model of family llama" in text
    assert "`model.layers.1.mlp.up_proj.weight` has shape [3, 3], config.json implies [48, 32]" in text
    assert "`model.norm.weight` is missing" in text


def test_a_missing_head_of_an_untied_model(llama: Path) -> None:
    set_config(llama, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"`lm_head.weight` is missing.*tie_word_embeddings: true"):
        load_model(str(llama))


def test_pickles_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*can run code"):
        load_model(str(llama))


def test_index_that_lies(llama: Path, tmp_path: Path) -> None:
    published("llama").save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    name = next(iter(original["weight_map"]))

    def with_map(**changes: str) -> None:
        index.write_text(json.dumps({"weight_map": original["weight_map"] | changes}))

    with_map(**{name: "../../secret.safetensors"})
    with pytest.raises(CheckpointError, match="not inside the directory"):
        load_model(str(tmp_path / "sharded"))
    with_map(**{name: "model-00009-of-00009.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks model-00009-of-00009.safetensors"):
        load_model(str(tmp_path / "sharded"))
    with_map(extra=original["weight_map"][name])
    with pytest.raises(CheckpointError, match="lacks tensor `extra`"):
        load_model(str(tmp_path / "sharded"))
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_model(str(tmp_path / "sharded"))


def test_corrupted_weights(llama: Path) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(str(llama))
    (llama / "model.safetensors").write_bytes(b"\xff" * 64 + data[64:])
    with pytest.raises(CheckpointError, match="header claims"):
        load_model(str(llama))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "big"},
        {"hidden_size": -1},
        {"num_hidden_layers": 10**12},
        {"model_type": "mamba", "architectures": ["Mamba"]},
    ],
)
def test_config_json_that_is_wrong(llama: Path, change: dict[str, Any]) -> None:
    set_config(llama, **change)
    with pytest.raises(UserError, match=r"config.json"):
        load_model(str(llama))


def test_destinations(llama: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError):
            convert(str(llama), precious, "hf", overwrite=overwrite)
    assert (precious / "thesis.txt").read_text() == "x"
    convert(str(llama), tmp_path / "out", "hf")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(str(llama), tmp_path / "out", "hf")
    convert(str(llama), tmp_path / "out", "modelworks", overwrite=True)
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_failed_conversion_leaves_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelworks.models import NameEntry

    (tmp_path / ".tmp-own-0badc0de").mkdir()  # left by a killed conversion to the same place: swept away
    convert(str(llama), tmp_path / "own", "modelworks")
    original = NameEntry.to_theirs

    def swapped(self: NameEntry, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        value = original(self, tensors)
        return value.flip(0) if "q_proj" in self.theirs else value

    monkeypatch.setattr(NameEntry, "to_theirs", swapped)
    with pytest.raises(CheckpointError, match="other logits"):
        convert(str(tmp_path / "own"), tmp_path / "wrong", "hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "own"]


def test_what_their_architecture_cannot_express(tmp_path: Path, llama: Path) -> None:
    from modelworks.checkpoint import write_model
    from modelworks.config import ModelConfig
    from modelworks.models import Transformer, initialize

    config = ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=16, residual=False)
    model = Transformer(config)
    initialize(model, seed=0)
    write_model(tmp_path / "own", config=config, tensors=dict(model.named_parameters()), tokenizer=None, origin="test")
    with pytest.raises(UserError, match=r"model\.residual"):
        convert(str(tmp_path / "own"), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()


def test_original_gpt2_names(tmp_path: Path) -> None:
    """The first published GPT-2 files have no `transformer.` prefix and carry causal masks."""
    reference = published("gpt2")
    reference.save_pretrained(tmp_path / "gpt2")
    values = load_file(tmp_path / "gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in values.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, tmp_path / "gpt2" / "model.safetensors")
    torch.testing.assert_close(
        our_logits(tmp_path / "gpt2", tokens()), their_logits(reference, tokens()), rtol=0, atol=1e-4
    )
    shutil.rmtree(tmp_path / "gpt2")


@pytest.mark.parametrize("to", ["hf", "modelworks"])
def test_destinations_that_are_not_for_a_model(llama: Path, tmp_path: Path, to: Any) -> None:
    """A URL, a run's checkpoint, and a directory that has more in it than a model."""
    for place in ("s3://bucket/model", Path("s3://bucket/model"), "file:///model"):
        with pytest.raises(CheckpointError, match="written to this machine's disk"):
            convert(str(llama), place, to)
    with pytest.raises(CheckpointError, match="named like a checkpoint of a run"):
        convert(str(llama), tmp_path / "step-00000001", to, overwrite=True)
    project = tmp_path / "project"
    convert(str(llama), project, "hf")
    (project / "src").mkdir()
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "config.json").write_text("{}")
    run_config = RunConfig(model=ModelConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=8192))
    saved = write_checkpoint(tmp_path, step=1, config=run_config, sections={}, state={}, tokenizer=None)
    renamed = Path(saved).rename(tmp_path / "kept")
    for directory in (project, tmp_path / "web", renamed):
        with pytest.raises(CheckpointError, match="is not a converted model, so --overwrite will not remove it"):
            convert(str(llama), directory, to, overwrite=True)
        assert directory.is_dir()
