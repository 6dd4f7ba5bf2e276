"""The checkpoint room's errors: `UserError`s about files."""

from __future__ import annotations

from modelworks.config.errors import UserError

ADVICE = "use another checkpoint, or copy this one again from where it is whole"


class CheckpointError(UserError):
    """A checkpoint or model file that cannot be used: says which file, what is wrong with it and what to do."""


class CorruptedCheckpoint(CheckpointError):
    """The bytes are not those that were written: changed, truncated, missing or swapped. Names file and tensor.

    An older checkpoint of the same run may be whole, so that whoever resumes can fall back to it.
    """
