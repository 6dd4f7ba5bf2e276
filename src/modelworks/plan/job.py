"""What is to be planned: a `Job`, and the `Limits` that a user sets to the search of its layouts.

Both check themselves: a size that no machine has, a batch that is none or a name that nobody knows is a `UserError`
when the value is made, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from modelworks.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig, UserError, nearest, show_value
from modelworks.hardware import Device
from modelworks.plan.machine import Numerics
from modelworks.plan.optimizer_bytes import check_optimizer_name
from modelworks.plan.software import MODELWORKS, Software

MOST_DEVICES = 2**20
MOST_ROWS = 2**24
# Of 82 published peaks of memory, 55 % are at most what is predicted, 85 % at most a twentieth more. The catalogue's GB
# are 6 % less than what a driver offers (an 80 GB H100 has 85 GB, 79.1 GiB): within those, 96 % stay.
HEADROOM = 0.05

# in the order in which people name them
OF_PARALLEL = (
    "tp",
    "sequence_parallel",
    "cp",
    "cp_mode",
    "pp",
    "pp_schedule",
    "pp_virtual",
    "pp_partition",
    "pp_gather",
    "ep",
    "dp_replicate",
    "dp_shard",
    "zero",
    "accumulate_reduce",
    "offload",
)
OF_TRAIN = ("micro_batch", "recompute")


@dataclass(frozen=True)
class Job:
    """A model to be trained on so many devices. global_batch: rows of a step, each of seq_len tokens.

    Raises UserError for sizes that nothing has, a sequence beyond the model's positions, and unknown names.
    """

    model: ModelConfig
    device: Device
    n_devices: int
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    software: Software = MODELWORKS

    def __post_init__(self) -> None:
        _check_whole("the number of devices", self.n_devices, MOST_DEVICES)
        _check_whole("seq_len", self.seq_len, 2**30)
        _check_whole("global_batch (rows)", self.global_batch, MOST_ROWS)
        Numerics.of(self.precision)
        check_optimizer_name(self.optimizer)
        self.run_config()

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.seq_len

    def run_config(self, parallel: ParallelConfig | None = None, **train: Any) -> RunConfig:
        """The run description that a layout of this job belongs to, for the trainer's own checks."""
        try:
            return RunConfig.model_validate(
                {
                    "model": self.model,
                    "data": {"seq_len": self.seq_len, "tokenizer": "any"},
                    "train": {"global_batch": self.global_batch, **train},
                    "parallel": parallel or ParallelConfig(),
                }
            )
        except ValidationError as error:
            raise UserError("; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())) from None


@dataclass(frozen=True)
class Limits:
    """What the user has decided. fixed: the config's own keys with their values. max_tp: the most ranks that split
    tensors. headroom: the part of a device's memory that must stay free, 0 to below 1.

    Raises UserError for a key that no layout has, or a value that the key cannot have.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    max_tp: int | None = None
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        for key, value in self.fixed.items():
            _check_key(key, value)
        if self.max_tp is not None:
            _check_whole("max_tp", self.max_tp, MOST_DEVICES)
        if isinstance(self.headroom, bool) or not 0.0 <= self.headroom < 1.0:
            raise UserError(
                f"memory headroom: got {show_value(self.headroom)}, expected a share from 0 to below 1, such as 0.1"
            )

    def allows(self, key: str, value: Any) -> bool:
        """Whether a layout may have this value of a key."""
        return key not in self.fixed or self.fixed[key] == value

    def without(self, *keys: str) -> Limits:
        """The same, with some keys left open again."""
        return Limits({key: value for key, value in self.fixed.items() if key not in keys}, self.max_tp, self.headroom)

    def fix(self, **values: Any) -> Limits:
        """The same, with some more keys decided."""
        return Limits({**self.fixed, **values}, self.max_tp, self.headroom)


def _check_whole(what: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        shown = f"{value:g}" if isinstance(value, float) else show_value(value)
        raise UserError(f"{what}: got {shown}, expected a whole number from 1 to {most:,}")


def _check_key(key: str, value: Any) -> None:
    section: type[ParallelConfig | TrainConfig] = TrainConfig if key in OF_TRAIN else ParallelConfig
    if key not in (*OF_PARALLEL, *OF_TRAIN):
        close = nearest(key, (*OF_PARALLEL, *OF_TRAIN))
        hint = f"did you mean `{close}`?" if close else "expected one of " + ", ".join((*OF_PARALLEL, *OF_TRAIN))
        raise UserError(f"a layout has no key `{key}`; {hint}")
    try:
        section.model_validate({key: value})
    except ValidationError as error:
        expected = " or ".join(dict.fromkeys(item["msg"].lower() for item in error.errors()))
        raise UserError(f"{key}: got {show_value(value)}: {expected}") from None
    if key == "micro_batch" and value == "auto":
        raise UserError("micro_batch: got auto, expected a number of rows: leave it open and the search chooses it")
