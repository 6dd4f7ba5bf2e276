"""Checkpoints: written complete or not at all, read strictly; and the way to and from other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.checkpoint.commit import Identity as Identity
    from modelworks.checkpoint.conversion import convert as convert
    from modelworks.checkpoint.errors import CheckpointError as CheckpointError
    from modelworks.checkpoint.formats.source import ModelSource as ModelSource
    from modelworks.checkpoint.lazy_tensor import LazyTensor as LazyTensor
    from modelworks.checkpoint.loading import LoadedModel as LoadedModel
    from modelworks.checkpoint.loading import load_model as load_model
    from modelworks.checkpoint.loading import open_model as open_model
    from modelworks.checkpoint.owners import Owners as Owners
    from modelworks.checkpoint.owners import Shard as Shard
    from modelworks.checkpoint.owners import whole_shards as whole_shards
    from modelworks.checkpoint.read import Checkpoint as Checkpoint
    from modelworks.checkpoint.read import check_shapes as check_shapes
    from modelworks.checkpoint.read import explain as explain
    from modelworks.checkpoint.read import open_checkpoint as open_checkpoint
    from modelworks.checkpoint.retention import best_checkpoint as best_checkpoint
    from modelworks.checkpoint.retention import clean_leftovers as clean_leftovers
    from modelworks.checkpoint.retention import latest_checkpoint as latest_checkpoint
    from modelworks.checkpoint.retention import retain as retain
    from modelworks.checkpoint.save import Begun as Begun
    from modelworks.checkpoint.save import Outcome as Outcome
    from modelworks.checkpoint.save import Saver as Saver
    from modelworks.checkpoint.write import Sections as Sections
    from modelworks.checkpoint.write import write_checkpoint as write_checkpoint
    from modelworks.checkpoint.write import write_model as write_model

_OFFERS = {
    "Begun": "save",
    "Checkpoint": "read",
    "CheckpointError": "errors",
    "Identity": "commit",
    "LazyTensor": "lazy_tensor",
    "LoadedModel": "loading",
    "ModelSource": "formats.source",
    "Outcome": "save",
    "Owners": "owners",
    "Saver": "save",
    "Sections": "write",
    "Shard": "owners",
    "best_checkpoint": "retention",
    "check_shapes": "read",
    "clean_leftovers": "retention",
    "convert": "conversion",
    "explain": "read",
    "latest_checkpoint": "retention",
    "load_model": "loading",
    "open_checkpoint": "read",
    "open_model": "loading",
    "retain": "retention",
    "whole_shards": "owners",
    "write_checkpoint": "write",
    "write_model": "write",
}

__all__ = sorted(_OFFERS)  # resolved lazily, so that naming the room does not import torch

__getattr__ = lazily(__name__, _OFFERS)
