"""Which keys may change when a run goes on from a checkpoint, and what differs between two configurations.

The rule: a change is allowed when it alters neither the weights reached so far nor what the steps already done
meant. Everything else is refused by name, because the result would be a mixture of two runs that no file describes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from modelworks.config.checks import unused_keys
from modelworks.config.errors import UserError, show_value
from modelworks.config.run import RunConfig, Sections

# Key (or glob) -> why it may change.
MAY_CHANGE = {
    "name": "a label",
    "init_from": "read before the first step only",
    "train.duration": "the run ends later or earlier; the schedule from here on is that of the new length",
    "train.global_batch": "steps to come may have another size",
    "train.batch_ramp.*": "steps to come may have another size",
    "train.micro_batch": "splits the same global batch differently: the same gradients up to rounding",
    "train.recompute": "gradients are the same",
    "train.compile": "the same mathematics up to rounding",
    "train.device": "the same mathematics up to rounding",
    "train.log_every": "terminal output only",
    "parallel.*": "a layout computes the same mathematics up to rounding",
    "data.workers": "samples do not depend on who prepares them",
    "data.cache": "a place, not a content",
    "data.mixture_changes": "samples that are not drawn yet may be drawn otherwise",
    "checkpoint.*": "when and what to keep",
    "evaluate.*": "measures, and changes nothing",
    "health.*": "what is done about spikes from here on",
}

# Key (or glob) -> why it may not. What no pattern names is refused with the last reason.
_REFUSED = {
    "seed": "the order of samples would be another",
    "model.*": "the checkpoint's weights belong to the other model",
    "data.tokenizer*": "the weights were trained on the other tokens",
    "data.*": "which samples the next steps see would no longer follow from those already seen",
    "train.precision": "weights and optimiser state are kept in the other precision",
    "optimizer.*": "the optimiser's state was built under the other setting",
    "schedule.*": "the steps already done followed the other schedule",
    "*": "the steps already done were made under the other setting",
}


@dataclass(frozen=True)
class Difference:
    """One key with two values, as they are written in YAML; None where a list has no such place."""

    key: str
    before: Any
    after: Any
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.key}: {show_value(self.before)} -> {show_value(self.after)}{because}"


def differences(before: RunConfig, after: RunConfig) -> list[Difference]:
    """Every key whose value differs, in the file's order; keys without effect in both are left out."""
    old, new = (dict(_flat(config.model_dump(mode="json"), "")) for config in (before, after))
    silent = unused_keys(Sections.of(before)).keys() & unused_keys(Sections.of(after)).keys()
    keys = [key for key in {**old, **new} if not any(f"{key}.".startswith(f"{unused}.") for unused in silent)]
    return [Difference(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def resume_differences(
    saved: RunConfig, new: RunConfig, *, step: int, total_steps: int | None = None
) -> list[Difference]:
    """What changes when the run `saved` goes on as `new` after `step` optimiser steps, each with why it may.

    total_steps: the length of the new run, where it is known. Raises UserError naming every change that is refused.
    """
    allowed: list[Difference] = []
    refused: list[str] = []
    for item in differences(saved, new):
        key = "data.mixture_changes" if item.key.startswith("data.mixture_changes") else item.key
        reason = _match(key, MAY_CHANGE)
        objection = _match(key, _REFUSED) if reason is None else _objection(key, saved, new, step, total_steps)
        if objection:
            refused.append(f"{item} - {objection}")
        else:
            allowed.append(Difference(item.key, item.before, item.after, reason or ""))
    if refused:
        lines = "\n".join(f"  {line}" for line in dict.fromkeys(refused))
        raise UserError(
            f"cannot resume at step {step} with these changes:\n{lines}\n"
            "  undo them, or start another run (another `name`, with init_from for its weights)"
        )
    return allowed


def _match(key: str, table: dict[str, str]) -> str | None:
    return next((reason for pattern, reason in table.items() if fnmatchcase(key, pattern)), None)


def _objection(key: str, saved: RunConfig, new: RunConfig, step: int, total_steps: int | None) -> str | None:
    """Why a change that is allowed in general is not allowed here."""
    if key == "train.duration" and total_steps is not None and total_steps < step:
        return f"{step} steps are done and the new duration is {total_steps}"
    if key == "data.mixture_changes":
        drawn = saved.batches.first_sample(step)
        past = [[change for change in c.data.mixture_changes if change.at < drawn] for c in (saved, new)]
        if past[0] != past[1]:
            return f"the first {drawn:,} samples are drawn already: only changes from there on may differ"
    of_batch = key == "train.global_batch" or key.startswith("train.batch_ramp")
    if of_batch and saved.batches.until(step) != new.batches.until(step):
        return "steps already made had other sizes: a train.batch_ramp that keeps them may lead to another"
    return None


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key. A list is a leaf unless it holds sections."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = [(str(index), item) for index, item in enumerate(value)]
    if not items:
        yield path, value
    for key, item in items:
        yield from _flat(item, f"{path}.{key}" if path else key)
