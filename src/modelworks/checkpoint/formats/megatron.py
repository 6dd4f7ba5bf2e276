"""Models from Megatron-Core's distributed checkpoints (`torch_dist`): weights alone.

The layout: `iter_0001000/` with `.metadata` and `.distcp` files of torch.distributed, `metadata.json` that says so,
and `common.pt` with Megatron-LM's arguments. Tensors are global, whatever tensor, pipeline and data parallelism wrote
them: of layer 3, either a tensor of its own (`decoder.layers.3.…`) or row 3 of one for all layers (`decoder.layers.…`).

The arguments are not trusted to describe the model, but those that say that the weights mean something else than the
given config are an error, since shapes alone would not show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.megatron_names import LAYERS, MegatronEntry, megatron_map
from modelworks.checkpoint.formats.restricted_pickle import Inert
from modelworks.checkpoint.formats.safetensors_files import read_json
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.formats.torch_distributed import METADATA, DistributedTensor, open_distributed
from modelworks.checkpoint.formats.torch_files import read_torch_file
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.config import ModelConfig, UserError, parameter_shapes

LATEST = "latest_checkpointed_iteration.txt"
_WRAPPERS = ("module.", "model.")
# What a checkpoint holds besides weights: optimiser state, random state, and state of modules that is no weight.
_NOT_WEIGHTS = re.compile(r"^(optimizer|rng_state|rerun_state_machine|opt_param_scheduler|num_floating)|_extra_state")
_SHOWN = 5


def find_megatron(path: Path) -> Path | None:
    """The directory of the checkpoint that a path names: itself, or the newest of the run; None if it is neither."""
    if (path / METADATA).is_file():
        return path
    if not (path / LATEST).is_file():
        return None
    with (path / LATEST).open("rb") as file:
        text = file.read(64).decode("ascii", "replace").strip()
    directory = path / (f"iter_{int(text):07d}" if text.isdigit() else "release")
    if not (directory / METADATA).is_file():
        raise CheckpointError(
            f"{directory}: no distributed checkpoint of Megatron-Core ({METADATA} is missing); only `--ckpt-format "
            "torch_dist` is read"
        )
    return directory


def open_megatron(directory: Path, config: ModelConfig) -> ModelSource:
    """The model, its tensors still on disk. Raises CheckpointError naming what does not fit the config."""
    _check_backend(directory)
    common = _common(directory)
    _check_arguments(directory, common, config)
    stored = {_bare(name): tensor for name, tensor in open_distributed(directory).items()}
    weights = {name: tensor for name, tensor in stored.items() if not _NOT_WEIGHTS.search(name)}
    shapes = parameter_shapes(config)
    try:
        entries = megatron_map(config)
    except UserError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    used: set[str] = set()
    problems: list[str] = []
    tensors: dict[str, LazyTensor] = {}
    for entry in entries:
        found = _find(weights, entry, config)
        if found is None:
            problems.append(f"`{_full(entry)}` is missing")
            continue
        used |= {tensor.name for tensor in found.tensors}
        problem = found.problem(entry.their_shape(config, shapes), padded=entry.arrangement == "padded")
        if problem:
            problems.append(problem)
        for name in entry.full_names:
            tensors[name] = LazyTensor(found.dtype, shapes[name], _loader(found, entry, name, config))
    tied_copy = "output_layer.weight" if config.tie_embeddings else None
    problems += [
        f"`{name}` has no place in the model"
        for name, tensor in weights.items()
        if tensor.name not in used and name != tied_copy
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{directory}: the weights do not fit the config: {'; '.join(problems[:_SHOWN])}{more}")
    step = common.get("iteration")
    return ModelSource(
        config,
        {name: tensors[name] for name in shapes},
        None,
        f"Megatron-Core checkpoint {directory}",
        step=step if type(step) is int and step >= 0 else 0,
        remarks=("weights only: Megatron's optimiser state is not read",),
    )


class _Found:
    """One of their tensors for one layer: on its own, a row of one for all layers, or gate and up apart."""

    def __init__(self, tensors: list[DistributedTensor], row: int | None) -> None:
        self.tensors, self.row = tensors, row
        self.dtype = tensors[0].dtype

    def shape(self) -> tuple[int, ...]:
        own = [tensor.shape if self.row is None else tensor.shape[1:] for tensor in self.tensors]
        return (sum(shape[0] for shape in own), *own[0][1:]) if own[0] else ()

    def problem(self, wanted: tuple[int, ...], *, padded: bool) -> str | None:
        shape = self.shape()
        fits = shape[1:] == wanted[1:] and len(shape) == len(wanted) and (shape[0] >= wanted[0] if padded else True)
        if fits and (padded or shape == wanted):
            return None
        least = "at least " if padded else ""
        return f"`{self.tensors[0].name}` has shape {list(shape)}, the config implies {least}{list(wanted)}"

    def read(self, rows: int | None = None) -> Tensor:
        """rows: only the first of them."""
        parts = []
        for tensor in self.tensors:
            bounds = [(0, size) for size in tensor.shape]
            if self.row is not None:
                bounds[0] = (self.row, self.row + 1)
            elif rows is not None:
                bounds[0] = (0, rows)
            part = tensor.read(bounds)
            parts.append(part if self.row is None else part[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _loader(found: _Found, entry: MegatronEntry, name: str, config: ModelConfig) -> Any:
    rows = config.vocab_size if entry.arrangement == "padded" else None
    return lambda: entry.to_ours(found.read(rows), config)[name].contiguous()


def _find(weights: Mapping[str, DistributedTensor], entry: MegatronEntry, config: ModelConfig) -> _Found | None:
    """Where an entry's tensor lies, in any of the forms that releases of Megatron-Core have written."""
    places: list[tuple[str, int | None]] = [(entry.theirs, None)]
    if entry.layer is not None:
        places = [(f"{LAYERS}{entry.layer}.{entry.theirs}", None), (f"{LAYERS}{entry.theirs}", entry.layer)]
    for name, row in places:
        names = [name]
        if name not in weights and entry.arrangement == "stacked":
            names = [f"{name}_w", f"{name}_v"]
        if all(own in weights for own in names):
            found = [weights[own] for own in names]
            if row is None or all(tensor.shape[:1] == (config.n_layers,) for tensor in found):
                return _Found(found, row)
    return None


def _full(entry: MegatronEntry) -> str:
    return entry.theirs if entry.layer is None else f"{LAYERS}{entry.layer}.{entry.theirs}"


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def _check_backend(directory: Path) -> None:
    path = directory / "metadata.json"
    backend = read_json(path).get("sharded_backend") if path.is_file() else "torch_dist"
    if backend != "torch_dist":
        raise CheckpointError(
            f"{directory}: is written as {backend!r}; only Megatron-Core's `torch_dist` is read (save once more with "
            "`--ckpt-format torch_dist`)"
        )


def _common(directory: Path) -> dict[str, Any]:
    path = directory / "common.pt"
    value = read_torch_file(path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _check_arguments(directory: Path, common: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise CheckpointError where Megatron-LM's arguments contradict the config."""
    arguments = common.get("args")
    values = arguments.fields() if isinstance(arguments, Inert) else {}
    grouped = values.get("group_query_attention")
    expected = {
        "num_layers": config.n_layers,
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_query_groups": config.n_kv_heads if grouped else values.get("num_query_groups"),
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.d_ff,
        "normalization": {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[config.norm],
        "norm_epsilon": config.norm_eps,
        "position_embedding_type": {"rope": "rope", "learned": "learned_absolute", "none": "none"}[config.positions],
        "rotary_base": config.rope_theta if config.positions == "rope" else values.get("rotary_base"),
        "rotary_percent": 1.0 if config.positions == "rope" else values.get("rotary_percent"),
        "rotary_interleaved": False,
        "apply_layernorm_1p": False,
        "swiglu": config.feed_forward == "swiglu",
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "qk_layernorm": config.qk_norm,
    }
    for key, wanted in expected.items():
        if key in values and values[key] is not None and values[key] != wanted:
            raise CheckpointError(
                f"{directory}: its common.pt says `{key}` is {values[key]!r}, the config implies {wanted!r}"
            )
