"""One way to load a model, wherever it lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.locate import Location, locate_model
from modelworks.checkpoint.places import Notify, to_stderr
from modelworks.checkpoint.read import Checkpoint, open_checkpoint
from modelworks.config import ModelConfig, parameter_shapes, router_bias_shapes
from modelworks.data import Tokenizer
from modelworks.models import Transformer, load_routing_state


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for inference. source: for people, where it came from. tokenizer: None if its files have none."""

    model: Transformer
    tokenizer: Tokenizer | None
    config: ModelConfig
    source: str

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends generation."""
        return self.tokenizer.eos_ids if self.tokenizer else ()

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template if self.tokenizer else None


def load_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    notify: Notify | None = None,
) -> LoadedModel:
    """Load a run (`my-run`, `runs/my-run@best`), a checkpoint, a Hugging Face directory or a GGUF file.

    Weights are cast to `dtype`. Raises CheckpointError for anything that is not a whole model of a known family.
    notify: told about what was skipped; by default it goes to stderr.
    """
    source = open_model(path, notify=notify)
    return LoadedModel(build_model(source, dtype=dtype, device=device), source.tokenizer, source.config, source.origin)


def open_model(path: str, *, notify: Notify | None = None) -> ModelSource:
    """The model that `path` names, its tensors still on disk: `source.load_into(parameters)` starts a run from it."""
    location = locate_model(path, notify or to_stderr)
    if location.kind == "gguf":
        from modelworks.checkpoint.formats.gguf import open_gguf

        return open_gguf(location.path)
    if location.kind == "hugging_face":
        from modelworks.checkpoint.formats.hugging_face import open_hugging_face

        return open_hugging_face(location.path)
    return _open_own(location)


def build_model(
    source: ModelSource, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Transformer:
    """The module with the source's weights, in evaluation mode. Memory: the weights once, and one tensor more."""
    with torch.device("meta"):
        model = Transformer(source.config)
    model = model.to(dtype).to_empty(device=device)
    source.load_into(dict(model.named_parameters()))
    load_routing_state(model, {name: bias.load() for name, bias in source.biases.items()})
    model.pack_storage()
    return model.eval()


def _open_own(location: Location) -> ModelSource:
    assert location.folder is not None
    checkpoint = open_checkpoint(location.folder)
    config = checkpoint.model_config
    checkpoint.expect("model", parameter_shapes(config))
    checkpoint.expect("routing", router_bias_shapes(config))
    tensors, biases = _lazy(checkpoint, "model"), _lazy(checkpoint, "routing")
    tokenizer = Tokenizer.load(checkpoint.tokenizer) if checkpoint.tokenizer else None
    return ModelSource(config, tensors, tokenizer, f"checkpoint {checkpoint.label} (step {checkpoint.step})", biases)


def _lazy(checkpoint: Checkpoint, section: str) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(dtype, shape, lambda name=name: checkpoint.tensor(section, name))  # type: ignore[misc]
        for name, (dtype, shape) in checkpoint.tensor_types(section).items()
    }
