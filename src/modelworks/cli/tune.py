"""`modelworks tune`: what batch and rate a run should have. Each command has a file of its own, `tune_<command>.py`."""

from __future__ import annotations

from modelworks.cli.tune_batch import batch
from modelworks.cli.tune_lr import lr
from modelworks.cli.tune_mup import coordinates

commands = {"batch": batch, "coordinates": coordinates, "lr": lr}
