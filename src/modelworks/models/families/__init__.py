"""Model families: one file each, with the map to and from Hugging Face's configs and weight names.

A family is data. All of them run on the one `Transformer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelworks.config import ModelConfig, UserError, nearest
from modelworks.models.families import gpt2, llama
from modelworks.models.families.names import NameEntry as NameEntry
from modelworks.models.families.names import entries_by_name as entries_by_name
from modelworks.models.families.published import PublishedConfig

__all__ = [
    "NameEntry",
    "canonical_name",
    "entries_by_name",
    "from_hugging_face",
    "name_map",
    "to_hugging_face",
]

_FAMILY_OF = {gpt2.ARCHITECTURE: "gpt2"} | {name: family for family, name in llama.ARCHITECTURES.items()}


def from_hugging_face(config_json: Mapping[str, Any]) -> ModelConfig:
    """The model that a `config.json` describes. Raises UserError on an architecture or option we do not compute."""
    published = PublishedConfig(config_json)
    family = _FAMILY_OF.get(published.architecture, published.architecture)
    if family not in _FAMILY_OF.values():
        close = nearest(str(published.architecture), _FAMILY_OF)
        hint = f"did you mean {close}?" if close else "known: " + ", ".join(_FAMILY_OF)
        raise UserError(f"config.json: the architecture {published.architecture!r} is not supported; {hint}")
    config = gpt2.from_hugging_face(published) if family == "gpt2" else llama.from_hugging_face(published, family)
    published.finish()
    return config


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, without dtype and token ids, which its writer adds. UserError if inexpressible."""
    return gpt2.to_hugging_face(config) if config.family == "gpt2" else llama.to_hugging_face(config)


def name_map(config: ModelConfig, *, stacked_experts: bool = False) -> list[NameEntry]:
    """Every parameter of the model exactly once, with the name it has in a Hugging Face file.

    stacked_experts: the names under which transformers computes, with all experts of a layer in one tensor; files hold
    them one by one, unless they were written otherwise on purpose.
    """
    if config.family == "gpt2":
        return gpt2.name_map(config)
    return llama.name_map(config, stacked_experts=stacked_experts)


def canonical_name(config: ModelConfig, stored: str) -> str | None:
    """A stored tensor's name as `name_map` spells it; None for tensors that are no weights of this model.

    Those are buffers that the config implies, and a stored copy of the head where it is tied to the embedding.
    """
    if config.tie_embeddings and stored == "lm_head.weight":
        return None
    return gpt2.canonical_name(stored) if config.family == "gpt2" else llama.canonical_name(stored)
