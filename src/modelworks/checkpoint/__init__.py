"""Checkpoints: written complete or not at all, read strictly; and the way to and from other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelworks.lazy_names import lazily

if TYPE_CHECKING:
    from modelworks.checkpoint.commit import Identity as Identity
    from modelworks.checkpoint.conversion import convert as convert
    from modelworks.checkpoint.errors import CheckpointError as CheckpointError
    from modelworks.checkpoint.errors import CorruptedCheckpoint as CorruptedCheckpoint
    from modelworks.checkpoint.formats.source import ModelSource as ModelSource
    from modelworks.checkpoint.generation_defaults import generation_defaults as generation_defaults
    from modelworks.checkpoint.import_sources import describe_model as describe_model
    from modelworks.checkpoint.import_sources import open_source as open_source
    from modelworks.checkpoint.lazy_tensor import LazyTensor as LazyTensor
    from modelworks.checkpoint.listing import Listed as Listed
    from modelworks.checkpoint.listing import explain_unfinished as explain_unfinished
    from modelworks.checkpoint.listing import list_checkpoints as list_checkpoints
    from modelworks.checkpoint.listing import names_manifest as names_manifest
    from modelworks.checkpoint.loading import LoadedModel as LoadedModel
    from modelworks.checkpoint.loading import load_model as load_model
    from modelworks.checkpoint.loading import open_model as open_model
    from modelworks.checkpoint.local_storage import LocalStorage as LocalStorage
    from modelworks.checkpoint.lock_file import InUse as InUse
    from modelworks.checkpoint.lock_file import LockFile as LockFile
    from modelworks.checkpoint.manifest import MANIFEST as MANIFEST
    from modelworks.checkpoint.names import step_number as step_number
    from modelworks.checkpoint.owners import Owners as Owners
    from modelworks.checkpoint.owners import Shard as Shard
    from modelworks.checkpoint.owners import whole_shards as whole_shards
    from modelworks.checkpoint.places import Place as Place
    from modelworks.checkpoint.places import configured_storage as configured_storage
    from modelworks.checkpoint.places import find_folder as find_folder
    from modelworks.checkpoint.places import find_storage as find_storage
    from modelworks.checkpoint.places import names_in as names_in
    from modelworks.checkpoint.read import Checkpoint as Checkpoint
    from modelworks.checkpoint.read import check_shapes as check_shapes
    from modelworks.checkpoint.read import open_checkpoint as open_checkpoint
    from modelworks.checkpoint.retention import Retention as Retention
    from modelworks.checkpoint.retention import best_checkpoint as best_checkpoint
    from modelworks.checkpoint.retention import complete_checkpoints as complete_checkpoints
    from modelworks.checkpoint.save import Begun as Begun
    from modelworks.checkpoint.save import Outcome as Outcome
    from modelworks.checkpoint.save import Saver as Saver
    from modelworks.checkpoint.storage import Folder as Folder
    from modelworks.checkpoint.storage import Storage as Storage
    from modelworks.checkpoint.storage import open_storage as open_storage
    from modelworks.checkpoint.write import Sections as Sections
    from modelworks.checkpoint.write import write_checkpoint as write_checkpoint
    from modelworks.checkpoint.write import write_model as write_model

_OFFERS = {
    "Begun": "save",
    "Checkpoint": "read",
    "CheckpointError": "errors",
    "CorruptedCheckpoint": "errors",
    "Folder": "storage",
    "Identity": "commit",
    "InUse": "lock_file",
    "LazyTensor": "lazy_tensor",
    "Listed": "listing",
    "LoadedModel": "loading",
    "LocalStorage": "local_storage",
    "LockFile": "lock_file",
    "MANIFEST": "manifest",
    "ModelSource": "formats.source",
    "Outcome": "save",
    "Owners": "owners",
    "Place": "places",
    "Retention": "retention",
    "Saver": "save",
    "Sections": "write",
    "Shard": "owners",
    "Storage": "storage",
    "best_checkpoint": "retention",
    "check_shapes": "read",
    "complete_checkpoints": "retention",
    "configured_storage": "places",
    "convert": "conversion",
    "describe_model": "import_sources",
    "explain_unfinished": "listing",
    "find_folder": "places",
    "find_storage": "places",
    "generation_defaults": "generation_defaults",
    "list_checkpoints": "listing",
    "load_model": "loading",
    "names_in": "places",
    "names_manifest": "listing",
    "open_checkpoint": "read",
    "open_model": "loading",
    "open_source": "import_sources",
    "open_storage": "storage",
    "step_number": "names",
    "whole_shards": "owners",
    "write_checkpoint": "write",
    "write_model": "write",
}

__all__ = sorted(_OFFERS)  # resolved lazily, so that naming the room does not import torch

__getattr__ = lazily(__name__, _OFFERS)
