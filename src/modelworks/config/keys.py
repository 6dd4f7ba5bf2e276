"""The keys of a run description, and the nearest right one for a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modelworks.config.describe import section_fields, sections_in
from modelworks.config.errors import Problem, nearest
from modelworks.config.run import RunConfig

# What other tools call our keys. The last part of an unknown key is looked up here before any guess is made.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch",
    "gradient_accumulation_steps": "train.micro_batch",
    "max_steps": "train.duration",
    "steps": "train.duration",
    "epochs": "train.duration",
    "num_train_epochs": "train.duration",
    "warmup_steps": "schedule.warmup",
    "warmup_ratio": "schedule.warmup",
    "lr_scheduler": "schedule.name",
    "max_grad_norm": "train.grad_clip",
    "dtype": "train.precision",
    "context_length": "data.seq_len",
    "hidden_size": "model.d_model",
    "n_embd": "model.d_model",
    "num_hidden_layers": "model.n_layers",
    "n_layer": "model.n_layers",
    "num_attention_heads": "model.n_heads",
    "n_head": "model.n_heads",
    "num_key_value_heads": "model.n_kv_heads",
    "intermediate_size": "model.d_ff",
    "max_position_embeddings": "model.max_seq_len",
    "tie_word_embeddings": "model.tie_embeddings",
    "num_experts": "model.n_experts",
    "num_local_experts": "model.n_experts",
    "num_experts_per_tok": "model.experts_per_token",
    "top_k": "model.experts_per_token",
    "moe_intermediate_size": "model.d_expert",
    "capacity_factor": "model.expert_capacity",
    "router_aux_loss_coef": "model.router_aux_loss",
    "norm_topk_prob": "model.router_normalize",
}


def key_paths(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that can be written, as a dotted path (`data.sources.*.name` inside a list), with its field."""
    for key, field in section_fields(section).items():
        path = f"{prefix}{key}"
        yield path, field
        for inner in sections_in(field.annotation):
            in_list = inner in _listed(field.annotation)
            yield from key_paths(inner, f"{path}.*." if in_list else f"{path}.")


def unknown_key(path: str, value: Any) -> Problem:
    """The problem of a key that does not exist, with the nearest that does: another tool's name for it, a slip of the
    finger in the same section, the same name in another section, or anything alike; of a list's items, whose keys are
    few, just these."""
    parent, _, name = path.rpartition(".")
    inside = f"{parent}." if parent else ""
    keys = list(section_fields(_section_at(path)))
    everywhere = [key for key, _ in key_paths()]
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == name and "*" not in key]
    if name in _OTHER_NAMES:
        suggestion: str | None = _OTHER_NAMES[name]
    elif slip := get_close_matches(name, keys, n=1, cutoff=0.85):
        suggestion = f"{inside}{slip[0]}"
    elif elsewhere:
        suggestion = "` or `".join(elsewhere[:3])
    else:
        close, in_list = nearest(name, keys), parent.rpartition(".")[2].isdigit()
        suggestion = f"{inside}{close}" if close else None if in_list else _near_anywhere(name, everywhere)
    expected = f"a key of `{parent}`" if parent else "a top-level key"
    return Problem(path, value, expected if suggestion else f"{expected}: {', '.join(keys)}", suggestion)


def _section_at(path: str) -> type[BaseModel]:
    """The section that holds the key at `path`."""
    section: type[BaseModel] = RunConfig
    for part, behind in pairwise(path.split(".")):
        if part.isdigit():
            continue
        field = section_fields(section).get(part)
        inner = list(sections_in(field.annotation)) if field else []
        if field and behind.isdigit():
            inner = [each for each in inner if each in _listed(field.annotation)]
        if inner:
            section = inner[0]
    return section


def _listed(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a type may hold as items of a list."""
    lists = (part for part in _parts(annotation) if get_origin(part) is list)
    return [section for part in lists for section in sections_in(part)]


def _near_anywhere(name: str, paths: list[str]) -> str | None:
    by_name = {path.rpartition(".")[2]: path for path in paths if "*" not in path}
    close = nearest(name, by_name)
    return by_name[close] if close else None


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)
