"""Models to and from Hugging Face directories: `config.json`, safetensors (sharded with an index), tokeniser files.

The idea: the family's name map is data used in both directions; this file only moves bytes by it.

The invariant: reading fills every parameter exactly once and uses every stored tensor; what is left out on purpose
(buffers that the config implies, a second copy of a tied head) is known by name and, for the head, compared.
Pickled weights (`pytorch_model.bin`) are refused: loading a pickle runs whatever code it holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.safetensors_files import (
    ShardedSafetensors,
    plan_shards,
    read_json,
    shard_names,
    volume_bytes,
    write_safetensors,
)
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.checkpoint.local_storage import LocalWritable
from modelworks.config import ModelConfig, UserError, parameter_shapes
from modelworks.data import Tokenizer
from modelworks.models import (
    NameEntry,
    canonical_name,
    entries_by_name,
    from_hugging_face,
    name_map,
    to_hugging_face,
)

HEAD = "lm_head.weight"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_TOKENIZERS = ("tokenizer.json", "*.model")
_SHOWN = 5


def open_hugging_face(directory: Path) -> ModelSource:
    """The model of a directory, its tensors still on disk. Raises CheckpointError naming what does not fit."""
    config = read_config(directory)
    _refuse_pickles(directory)
    files = ShardedSafetensors(directory)
    stored = {name: _stored(files, name) for name in files.names}
    tensors = by_our_names(str(directory), "config.json", config, stored)
    return ModelSource(config, tensors, load_tokenizer(directory), f"Hugging Face directory {directory}")


def by_our_names(
    where: str, described_by: str, config: ModelConfig, stored: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Tensors under Hugging Face's names -> the parameters of `config`, each filled exactly once.

    where, described_by: for messages, what holds the tensors and what gave the config. Raises CheckpointError naming
    the tensors that do not fit.
    """
    if config.n_layers > len(stored):  # or listing its tensors would never end
        raise CheckpointError(
            f"{where}: {described_by} claims {config.n_layers:,} layers, the files hold {len(stored):,} tensors"
        )
    # All experts of a layer in one tensor, or each one's matrices apart, as most files have them.
    stacked = any(name.endswith(".experts.gate_up_proj") for name in stored)
    if not stacked and config.n_experts > len(stored):
        raise CheckpointError(
            f"{where}: {described_by} claims {config.n_experts:,} experts, the files hold {len(stored):,} tensors"
        )
    entries = name_map(config, stacked_experts=stacked)
    place = _match(where, described_by, config, stored, entries)
    _check_tied_head(where, described_by, config, stored, place)
    shapes = parameter_shapes(config)
    return {name: _part(stored, place, filling, name, shapes) for name, filling in entries_by_name(entries).items()}


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokeniser whose files lie in the directory, if any do."""
    found = any(any(directory.glob(pattern)) for pattern in _TOKENIZERS)
    return Tokenizer.load(directory) if found else None


def export_hugging_face(source: ModelSource, directory: Path, *, max_shard_bytes: int) -> None:
    """Write a directory that transformers reads. Tensors stream through one at a time. Raises UserError, OSError."""
    config, tokenizer = source.config, source.tokenizer
    described = to_hugging_face(config)  # raises for what their architecture cannot express, before anything is written
    tensors = _remembering(source.tensors)
    theirs = {entry.theirs: _whole(tensors, entry) for entry in name_map(config)}
    directory.mkdir()
    shards = plan_shards({name: volume_bytes(t.shape, t.dtype) for name, t in theirs.items()}, max_shard_bytes)
    files = shard_names("model", len(shards))
    for file, names in zip(files, shards, strict=True):
        with LocalWritable(directory).create(file) as opened:
            write_safetensors(opened, [(name, theirs[name]) for name in names], metadata={"format": "pt"})
    if len(files) > 1:
        total = sum(volume_bytes(tensor.shape, tensor.dtype) for tensor in theirs.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index)
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        tokenizer.save(directory)
        ends = list(tokenizer.eos_ids)
        known = {"bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
        ids = {key: value for key, value in known.items() if value is not None}
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        _write_json(directory / "generation_config.json", ids)
    dtype = str(source.tensors["embedding.weight"].dtype).removeprefix("torch.")
    _write_json(directory / "config.json", {**described, "dtype": dtype, **ids})


def read_config(directory: Path, name: str = "config.json") -> ModelConfig:
    """The model that a directory's `config.json` describes. Raises CheckpointError for one that we do not compute."""
    try:
        return from_hugging_face(read_json(directory / name))
    except CheckpointError:
        raise
    except UserError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{directory}: {name} gives {key} = {first['input']!r}: {first['msg']}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{directory}: {name} holds a value of the wrong kind ({error})") from None


def _refuse_pickles(directory: Path) -> None:
    if any(directory.glob("*.safetensors*")):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory}: has only pickled weights ({pickles[0]}), which can run code when loaded and are not read; "
            "fetch the model's safetensors, or convert where you trust the file: "
            "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )


def _match(
    where: str, described_by: str, config: ModelConfig, stored: Mapping[str, LazyTensor], expected: Sequence[NameEntry]
) -> dict[str, str]:
    """Their name as the map spells it -> the name in the file. Every one exactly once, of the right shape."""
    entries = {entry.theirs: entry for entry in expected}
    shapes = parameter_shapes(config)
    place: dict[str, str] = {}
    problems = []
    for name, tensor in stored.items():
        canonical = canonical_name(config, name)
        if canonical is None:
            continue
        if canonical not in entries:
            problems.append(f"`{name}` has no place in a model of family {config.family}")
        elif canonical in place:
            problems.append(f"`{name}` and `{place[canonical]}` are the same tensor")
        elif tuple(tensor.shape) != (wanted := entries[canonical].their_shape(shapes)):
            problems.append(f"`{name}` has shape {list(tensor.shape)}, {described_by} implies {list(wanted)}")
        place.setdefault(canonical, name)
    problems += [f"`{name}` is missing" for name in entries if name not in place]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        key = "tie_word_embeddings" if described_by == "config.json" else "tie_embeddings"
        hint = f"; if the head is tied, {described_by} needs `{key}: true`" if HEAD not in place else ""
        hint = "" if config.tie_embeddings else hint
        raise CheckpointError(
            f"{where}: the weights do not fit {described_by}: {'; '.join(problems[:_SHOWN])}{more}{hint}"
        )
    return place


def _check_tied_head(
    where: str, described_by: str, config: ModelConfig, stored: Mapping[str, LazyTensor], place: Mapping[str, str]
) -> None:
    """A head stored although the config ties it must be the embedding; otherwise one of the two is wrong."""
    if not config.tie_embeddings or HEAD not in stored:
        return
    embedding = next(entry.theirs for entry in name_map(config) if entry.ours == ("embedding.weight",))
    head, tied = stored[HEAD], stored[place[embedding]]
    same = tuple(head.shape) == tuple(tied.shape) and bool((head.load() == tied.load()).all())
    if not same:
        key = "tie_word_embeddings" if described_by == "config.json" else "tie_embeddings"
        raise CheckpointError(
            f"{where}: {described_by} ties the head to the embedding, but `{HEAD}` differs from `{place[embedding]}`; "
            f"set `{key}: false` there if the head is its own"
        )


def _stored(files: ShardedSafetensors, name: str) -> LazyTensor:
    info = files.info(name)
    return LazyTensor(info.dtype, info.shape, lambda: files.read(name))


def _part(
    stored: Mapping[str, LazyTensor],
    place: Mapping[str, str],
    entries: Sequence[NameEntry],
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> LazyTensor:
    """Our tensor `name`, from the entries that fill it: one, or one for each expert."""
    first = entries[0]
    dtype = stored[place[first.theirs]].dtype

    def part(entry: NameEntry) -> torch.Tensor:
        return entry.to_ours(stored[place[entry.theirs]].load(), shapes)[name].to(dtype)

    def load() -> torch.Tensor:
        if first.expert is None:
            return part(first)
        whole = torch.empty(shapes[name], dtype=dtype)
        for expert, entry in enumerate(entries):
            whole[expert] = part(entry)
        return whole

    return LazyTensor(dtype, shapes[name], load)


def _remembering(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors, of which the one loaded last is kept: the experts of a layer are written one after the other."""
    last: dict[str, torch.Tensor] = {}

    def remembered(name: str, tensor: LazyTensor) -> LazyTensor:
        def load() -> torch.Tensor:
            if name not in last:
                last.clear()
                last[name] = tensor.load()
            return last[name]

        return LazyTensor(tensor.dtype, tensor.shape, load)

    return {name: remembered(name, tensor) for name, tensor in tensors.items()}


def _whole(tensors: Mapping[str, LazyTensor], entry: NameEntry) -> LazyTensor:
    dtype = tensors[entry.ours[0]].dtype

    def load() -> torch.Tensor:
        return entry.to_theirs({name: tensors[name].load().to(dtype) for name in entry.ours})

    return LazyTensor(dtype, entry.their_shape({name: tensors[name].shape for name in entry.ours}), load)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
