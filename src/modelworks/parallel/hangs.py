"""Who keeps everybody waiting: from what each rank last said of itself to one sentence.

The question starts at a rank that has waited too long and follows the waiting: of those who have not come to the
operation, the ones that wait for nobody are the cause; if all of them wait too, the search goes on at one of them. A
search that returns to where it was has found ranks that wait for each other. Imports no torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from modelworks.parallel.labels import Labels, Operation

_MOST_NAMED = 8


@dataclass(frozen=True)
class State:
    """What a rank says of itself. beat: counts its reports; a rank that reports no more is gone or stopped.

    begun: number, name and step of the last operation of each group, by `group_key`. ended: how it ended, or None.
    """

    rank: int
    beat: int
    step: int | None
    doing: str
    waiting: Operation | None = None
    begun: dict[str, tuple[int, str]] = field(default_factory=dict)
    ended: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> State:
        values: dict[str, Any] = json.loads(text)
        if values["waiting"]:
            more = {name: tuple(values["waiting"][name]) for name in ("ranks", "awaits")}
            values["waiting"] = Operation(**{**values["waiting"], **more})
        values["begun"] = {key: (number, name) for key, (number, name) in values["begun"].items()}
        return State(**values)


def state_of(labels: Labels, rank: int, beat: int, ended: str | None = None) -> State:
    waited = labels.waited()
    return State(
        rank,
        beat,
        labels.current_step,
        labels.text,
        waited[0] if waited else None,
        {group_key(ranks): (last.number, last.name) for ranks, last in labels.begun.copy().items()},
        ended,
    )


def group_key(ranks: Sequence[int]) -> str:
    """A short name for a group of ranks, which may be thousands."""
    return f"{len(ranks)}-{zlib.crc32(repr(tuple(ranks)).encode()):08x}"


def explain_hang(asking: int, states: Mapping[int, State], silent: Collection[int] = ()) -> str | None:
    """Why rank `asking` waits; None where it does not. silent: ranks that report no more.

    states: of every rank that has reported at all.
    """
    path = [asking]
    while True:
        state = states[path[-1]]
        operation = state.waiting
        if operation is None:
            return None
        different = _different(operation, state, states)
        if different:
            return different
        missing = _missing(operation, state.rank, states)
        if not missing:
            return (
                f"all ranks entered {_at(operation)} and it does not end: "
                f"the network between {ranks_text(operation.ranks)} fails, or the backend does"
            )
        causes = [rank for rank in missing if rank in silent or rank not in states or states[rank].waiting is None]
        if causes:
            return f"{_absence(operation, state.rank, causes)}; {_last(causes, states, silent)}"
        if missing[0] in path:
            return _circle(path[path.index(missing[0]) :], states)
        path.append(missing[0])


def ranks_text(ranks: Sequence[int]) -> str:
    """rank 3; ranks 3, 7; ranks 0, 1, 2, … (64 of them)"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_NAMED]))
    return f"ranks {shown}, … ({len(ranks)} of them)" if len(ranks) > _MOST_NAMED else f"ranks {shown}"


def _missing(operation: Operation, own: int, states: Mapping[int, State]) -> list[int]:
    if operation.awaits:
        return list(operation.awaits)
    key = group_key(operation.ranks)
    return [
        rank
        for rank in operation.ranks
        if rank != own and (rank not in states or states[rank].begun.get(key, (0, ""))[0] < operation.number)
    ]


def _different(operation: Operation, own: State, states: Mapping[int, State]) -> str | None:
    """Where ranks of one group are in different operations at the same place of their order."""
    if operation.awaits:
        return None
    key = group_key(operation.ranks)
    names: dict[str, list[int]] = {operation.name: [own.rank]}
    for rank in operation.ranks:
        number, name = states[rank].begun.get(key, (0, "")) if rank in states else (0, "")
        if rank != own.rank and number == operation.number:
            names.setdefault(name, []).append(rank)
    if len(names) == 1:
        return None
    told = "; ".join(f"{ranks_text(sorted(ranks))} in {name}" for name, ranks in names.items())
    return f"ranks do different things at operation #{operation.number} of {ranks_text(operation.ranks)}: {told}"


def _absence(operation: Operation, own: int, causes: list[int]) -> str:
    if operation.awaits:
        return f"{ranks_text(causes)} never answered {_at(operation)} of rank {own}"
    return f"{ranks_text(causes)} never entered {_at(operation)}"


def _last(ranks: list[int], states: Mapping[int, State], silent: Collection[int]) -> str:
    """What the ranks were last in, those alike together."""
    told: dict[str, list[int]] = {}
    for rank in ranks:
        told.setdefault(_words(states.get(rank), rank in silent), []).append(rank)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{ranks_text(those)}: {words}" for words, those in told.items())


def _words(state: State | None, silent: bool) -> str:
    if state is None:
        return "never reported"
    where = "" if state.step is None else f" (step {state.step})"
    last = f"last in {state.doing}{where}"
    if state.ended is not None:
        return f"ended ({state.ended}), {last}"
    return f"reports no more, {last}" if silent else last


def _circle(path: list[int], states: Mapping[int, State]) -> str:
    parts = []
    for rank, other in zip(path, [*path[1:], path[0]], strict=True):
        operation = states[rank].waiting
        assert operation is not None
        parts.append(f"rank {rank} in {_at(operation)} for rank {other}")
    return "ranks wait for each other: " + ", ".join(parts)


def _at(operation: Operation) -> str:
    return str(operation) if operation.step is None else f"{operation} of step {operation.step}"
