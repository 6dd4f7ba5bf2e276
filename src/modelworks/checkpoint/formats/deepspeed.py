"""Models from DeepSpeed's checkpoints, ZeRO stages 0 to 3: weights in float32, and Adam's state where it maps exactly.

The layout: `global_step1000/` with files of torch.save. Of stages 1 to 3 each rank's `…_optim_states.pt` holds its
part of *flat groups*: all parameters of a group end to end, in float32, and the optimiser's state in the same order.

    stages 1, 2   a group is cut into one run of elements a rank: a parameter may lie across ranks
    stage 3       every parameter is cut into one run a rank, the last one padded, and a rank's runs lie end to end

`mp_rank_00_model_states.pt` (`zero_pp_rank_0_…` of stage 3) gives names, shapes and order. Names are those of the model
that was trained, which must be Hugging Face's. Only what is asked for is read, by ranges of the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworks.checkpoint.errors import CheckpointError
from modelworks.checkpoint.formats.hugging_face import by_our_names, load_tokenizer
from modelworks.checkpoint.formats.restricted_pickle import Inert
from modelworks.checkpoint.formats.source import ModelSource
from modelworks.checkpoint.formats.stored_tensor import StoredTensor
from modelworks.checkpoint.formats.torch_files import read_torch_file
from modelworks.checkpoint.lazy_tensor import LazyTensor
from modelworks.config import ModelConfig
from modelworks.models import canonical_name, name_map

LATEST = "latest"
MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = "optimizer_state_dict"
_MODEL, _OPTIMIZER = "*_model_states.pt", "*_optim_states.pt"
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")
_WRAPPERS = ("module.", "_orig_mod.")


def find_deepspeed(path: Path) -> Path | None:
    """The directory of the checkpoint that a path names: itself, or the one that its `latest` names; else None."""
    if any(path.glob(_MODEL)):
        return path
    if not (path / LATEST).is_file():
        return None
    with (path / LATEST).open("rb") as file:
        tag = file.read(256).decode("utf-8", "replace").strip()
    if not tag or Path(tag).name != tag or tag in (".", ".."):
        return None
    return path / tag if any((path / tag).glob(_MODEL)) else None


def open_deepspeed(directory: Path, config: ModelConfig) -> ModelSource:
    """The model, its tensors still on disk. Raises CheckpointError naming what does not fit the config."""
    try:
        return _open(directory, config)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{directory}: not as DeepSpeed writes checkpoints ({error!r})") from None


def _open(directory: Path, config: ModelConfig) -> ModelSource:
    saved = _Saved(directory)
    weights = {**saved.trained(saved.groups), **saved.frozen()} if saved.stage else saved.module()
    tensors = by_our_names(str(directory), "the config", config, saved.with_aliases(weights))
    moments, remark = _moments(saved, config, weights)
    places = (directory, directory.parent)
    return ModelSource(
        config,
        tensors,
        next((found for place in places if (found := load_tokenizer(place)) is not None), None),
        f"DeepSpeed checkpoint {directory}",
        optimizer=moments,
        updates=saved.updates() if moments else 0,
        step=saved.step,
        remarks=(remark,) if remark else (),
    )


def _moments(
    saved: _Saved, config: ModelConfig, weights: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], str]:
    """Adam's state under our names, and what a user should know about it."""
    if not saved.stage:
        return {}, "weights only: the optimiser's state of a run without ZeRO is not read"
    found: dict[str, LazyTensor] = {}
    frozen = {canonical_name(config, name) for name in saved.frozen()}
    without = {ours for entry in name_map(config) if entry.theirs in frozen for ours in entry.ours}
    for kind in MOMENTS:
        groups = saved.state(kind)
        if groups is None:
            return {}, f"weights only: the optimiser kept something else than `{MOMENTS[0]}` and `{MOMENTS[1]}`"
        # The map wants every parameter: frozen ones stand in for the state that they lack, and are dropped again.
        state = saved.with_aliases({**weights, **saved.trained(groups)})
        for name, tensor in by_our_names(str(saved.directory), "the config", config, state).items():
            if name not in without:
                found[f"{name}/{kind}"] = tensor
    return found, f"{len(without)} parameters were frozen and have no optimiser state" if without else ""


class _Saved:
    """What the files of one checkpoint say. stage: of ZeRO. step: optimiser steps. groups: rank -> flat groups."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        models = _by_rank(directory, _MODEL)
        self._models = [read_torch_file(path) for path in models]
        self._model = self._models[0]
        self._optimizers = [read_torch_file(path)[_STATE] for path in _by_rank(directory, _OPTIMIZER)]
        step = self._model["global_steps"]
        self.step = step if type(step) is int and step >= 0 else 0
        self.stage, self.groups = 0, []
        if self._optimizers:
            stage = self._optimizers[0]["zero_stage"]
            self.stage = int(stage.arguments[0] if isinstance(stage, Inert) else stage)
            key = "single_partition_of_fp32_groups" if self.stage < 3 else "fp32_flat_groups"
            self.groups = [_flat_groups(saved[key]) for saved in self._optimizers]
            count = self._optimizers[0]["partition_count"]
            count = max(count) if isinstance(count, list) else count
            if count != len(self._optimizers):
                raise CheckpointError(
                    f"{directory}: {count} ranks wrote it, the optimiser's files of {len(self._optimizers)} are there"
                )

    def module(self) -> dict[str, LazyTensor]:
        """The weights of a run without ZeRO, as they were computed with."""
        buffers = set(self._model.get("buffer_names") or ())
        state = {name: tensor for name, tensor in self._model["module"].items() if name not in buffers}
        return {_bare(name): LazyTensor(tensor.dtype, tensor.shape, tensor.read) for name, tensor in state.items()}

    def trained(self, groups: list[list[StoredTensor]]) -> dict[str, LazyTensor]:
        """Their name -> tensor, for every parameter that was trained. groups: of the weights, or of a state."""
        return self._by_parameter(groups) if self.stage == 3 else self._by_group(groups)

    def frozen(self) -> dict[str, LazyTensor]:
        """Parameters that were not trained, in float32. Stage 1 does not list them: they are those of the model that no
        group holds."""
        found = {}
        if self.stage < 3:
            grouped = {name for shapes in self._model["param_shapes"] for name in shapes}
            shared = set(self._model.get("shared_params") or ())
            buffers = set(self._model.get("buffer_names") or ())
            for name, tensor in self._model["module"].items():
                if name not in grouped | shared | buffers:
                    found[_bare(name)] = _joined([_Run([tensor], 0, tensor.numel)], tensor.shape)
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            fragments = [saved["frozen_param_fragments"][name] for saved in self._models]
            runs = [_Run([fragment], 0, fragment.numel) for fragment in fragments]
            found[_bare(name)] = _joined(runs if self.stage == 3 else runs[:1], shape)
        return found

    def with_aliases(self, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """The tensors and, under its other name, each that the model holds twice (a tied head)."""
        aliases = {_bare(alias): _bare(name) for alias, name in (self._model.get("shared_params") or {}).items()}
        return {**tensors, **{alias: tensors[name] for alias, name in aliases.items() if name in tensors}}

    def state(self, kind: str) -> list[list[StoredTensor]] | None:
        """rank -> flat groups of `exp_avg` or `exp_avg_sq`; None unless that is all that the optimiser keeps."""
        found = []
        for saved, weights in zip(self._optimizers, self.groups, strict=True):
            state = self._of_groups(saved)
            if state is None or set(state) != set(range(len(weights))):
                return None
            groups = [state[index] for index in range(len(weights))]
            if any(set(group) - {"step"} != set(MOMENTS) for group in groups):
                return None
            moments = [group[kind] for group in groups]
            # Of stages 1 and 2 the padding at the end of the last ranks' parts is kept here and not in the weights.
            for moment, weight in zip(moments, weights, strict=True):
                if moment.numel < weight.numel or (self.stage == 3 and moment.numel != weight.numel):
                    return None
            found.append(moments)
        return found

    def updates(self) -> int:
        """Updates that the optimiser has made."""
        state = self._of_groups(self._optimizers[0]) or {}
        step = state[0].get("step", self.step)
        return int(step.read()) if isinstance(step, StoredTensor) else int(step)

    def _of_groups(self, saved: Mapping[str, Any]) -> dict[int, dict[str, Any]] | None:
        base = saved.get("base_optimizer_state" if self.stage < 3 else _STATE)
        state = base.get("state") if isinstance(base, dict) else None
        return state if isinstance(state, dict) and state else None

    def _by_group(self, groups: list[list[StoredTensor]]) -> dict[str, LazyTensor]:
        found = {}
        paddings = self._optimizers[0].get("param_alignment_paddings") or [None] * len(self._model["param_shapes"])
        for index, shapes in enumerate(self._model["param_shapes"]):
            parts, start = [rank[index] for rank in groups], 0
            for place, (name, shape) in enumerate(shapes.items()):
                count = math.prod(shape)
                found[_bare(name)] = _joined([_Run(parts, start, count)], shape)
                start += count + (paddings[index][place] if paddings[index] else 0)
            held, unit = sum(part.numel for part in parts), 2 * len(parts)  # parts are padded to such a unit
            if not -(-start // unit) <= -(-held // unit):
                raise self._too_short(held, start)
        return found

    def _by_parameter(self, groups: list[list[StoredTensor]]) -> dict[str, LazyTensor]:
        found, start = {}, 0
        for name, shape in (item for shapes in self._model["param_shapes"] for item in shapes.items()):
            count = -(-math.prod(shape) // len(groups))
            found[_bare(name)] = _joined([_Run(parts, start, count) for parts in groups], shape)
            start += count
        held = sum(part.numel for part in groups[0])
        if held != start:
            raise self._too_short(held, start)
        return found

    def _too_short(self, held: int, needed: int) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: its flat groups hold {held:,} elements, the shapes of its parameters imply {needed:,}"
        )


@dataclass(frozen=True)
class _Run:
    """`count` elements from `start` of what several stored tensors hold end to end."""

    parts: Sequence[StoredTensor]
    start: int
    count: int

    def read_into(self, out: Tensor) -> int:
        """Fill `out`, which may be shorter, from its start; returns how many elements are there."""
        filled = 0
        ends = accumulate(part.numel for part in self.parts)
        for part, end in zip(self.parts, ends, strict=True):
            begin = end - part.numel
            low, high = max(self.start, begin), min(self.start + min(self.count, len(out)), end)
            if low < high:
                out[low - self.start : high - self.start] = part.flat(low - begin, high - low)
                filled += high - low
        return filled


def _joined(runs: Sequence[_Run], shape: Sequence[int]) -> LazyTensor:
    """A float32 tensor of that shape from runs end to end, padding after the last dropped."""

    def load() -> Tensor:
        whole, filled = torch.empty(math.prod(shape), dtype=torch.float32), 0
        for run in runs:
            filled += run.read_into(whole[filled:])
        if filled != len(whole):
            raise CheckpointError(f"{runs[0].parts[0].path}: its flat groups are shorter than its parameters are")
        return whole.view(tuple(shape))

    return LazyTensor(torch.float32, tuple(shape), load)


def _flat_groups(value: Any) -> list[StoredTensor]:
    groups = list(value)
    if not all(isinstance(group, StoredTensor) and len(group.shape) == 1 for group in groups):
        raise TypeError("flat groups that are not flat tensors")
    return groups


def _by_rank(directory: Path, pattern: str) -> list[Path]:
    """Files in the order of their data-parallel ranks. Raises CheckpointError for those of model parallelism."""
    ranks = {}
    for path in directory.glob(pattern):
        match = _RANK.search(path.name)
        rank, model_rank = (int(match[1]), int(match[2])) if match else (0, 0)
        if model_rank or (not match and path.name != "mp_rank_00_model_states.pt"):
            raise CheckpointError(
                f"{path}: is of a run with tensor, pipeline or expert parallelism, which is not read; save it with "
                "DeepSpeed as one model, or export it to Hugging Face"
            )
        ranks[rank] = path
    if sorted(ranks) != list(range(len(ranks))):
        missing = next(rank for rank in range(max(ranks)) if rank not in ranks)
        raise CheckpointError(f"{directory}: the file of rank {missing} ({pattern}) is missing")
    return [ranks[rank] for rank in sorted(ranks)]


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
