"""The checkpoint room's error: a `UserError` about files."""

from __future__ import annotations

from modelworks.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint or model file that cannot be used: says which file, what is wrong with it and what to do."""
