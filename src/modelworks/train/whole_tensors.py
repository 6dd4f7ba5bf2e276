"""Saving what many ranks hold: rank 0 writes whole tensors, the others send it their slices.

Rank 0 decides in which order tensors are written, and when it has no more use for any (also because the disk is full),
so it names each tensor before it is put together, and the end. All ranks learn how it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelworks.checkpoint import LazyTensor, Sections
from modelworks.config import parameter_shapes
from modelworks.parallel import SplitModel

_END = -1


def write_together(
    model: SplitModel,
    optimizer_state: Mapping[str, Tensor],
    routing: Mapping[str, Tensor],
    write: Callable[[Sections], Path],
) -> Path:
    """`write` on rank 0 with sections `model`, `optimizer` and, where there are biases of experts, `routing`; returns
    what it returned, or raises its OSError, on every rank.

    optimizer_state: `<parameter>/<state>` -> this rank's slice. routing: whole, on every rank.
    """
    more = {"routing": routing} if routing else {}
    if model.mesh.layout.world_size == 1:
        return write({"model": model.stored, "optimizer": optimizer_state, **more})
    entries = _entries(model, optimizer_state)
    outcome: Path | OSError | None = None
    if model.mesh.rank == 0:
        try:
            outcome = write({**_sections(model, optimizer_state, entries), **more})
        except OSError as error:
            outcome = error
        _announce(model, _END)
    else:
        while (index := _announce(model, 0)) != _END:
            _assemble(model, optimizer_state, entries[index])
    [outcome, *_] = model.mesh.group("world").gather_objects(outcome)
    if isinstance(outcome, OSError):
        raise outcome
    assert outcome is not None
    return outcome


Entry = tuple[str, str, torch.dtype]  # section, name in it, dtype


def _entries(model: SplitModel, optimizer_state: Mapping[str, Tensor]) -> list[Entry]:
    """All whole tensors, in an order that every rank knows."""
    stored = next(iter(model.stored.values()), None)
    kinds = {full.rpartition("/")[2]: tensor.dtype for full, tensor in optimizer_state.items()}
    dtype = None if stored is None else stored.dtype
    found = model.mesh.group("world").gather_objects((dtype, kinds))
    dtype = next(d for d, _ in found if d is not None)
    kinds = {kind: d for _, own in found for kind, d in own.items()}
    names = model.parameter_names
    entries: list[Entry] = [("model", name, dtype) for name in names]
    return entries + [("optimizer", f"{name}/{kind}", kinds[kind]) for name in names for kind in sorted(kinds)]


def _sections(
    model: SplitModel, state: Mapping[str, Tensor], entries: list[Entry]
) -> dict[str, dict[str, Tensor | LazyTensor]]:
    shapes = parameter_shapes(model.config.model)
    sections: dict[str, dict[str, Tensor | LazyTensor]] = {"model": {}, "optimizer": {}}

    def load(index: int) -> Tensor:
        _announce(model, index)
        tensor = _assemble(model, state, entries[index])
        assert tensor is not None
        return tensor

    for index, (section, name, dtype) in enumerate(entries):
        shape = shapes[name if section == "model" else name.rpartition("/")[0]]
        sections[section][name] = LazyTensor(dtype, shape, lambda index=index: load(index))  # type: ignore[misc]
    return sections


def _assemble(model: SplitModel, state: Mapping[str, Tensor], entry: Entry) -> Tensor | None:
    section, name, dtype = entry
    if section == "model":
        return model.assembler.whole(name, model.stored.get(name), dtype)
    return model.assembler.whole(name.rpartition("/")[0], state.get(name), dtype)


def _announce(model: SplitModel, index: int) -> int:
    """What rank 0 says, on every rank."""
    said = torch.tensor(index, device=model.mesh.device)
    return int(model.mesh.group("world").broadcast_(said))
