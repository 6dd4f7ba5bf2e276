"""Memory that ran out: what this rank held of it, by category, and which nearby settings need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import islice
from types import TracebackType

import psutil
import torch

from modelworks.config import RunConfig, format_bytes
from modelworks.layout import Layout, describe, neighbours
from modelworks.parallel import Mesh, explain_out_of_memory, is_out_of_memory
from modelworks.train.derivation import MEMORY_SHARE, Derived
from modelworks.train.loop import TrainingFailed
from modelworks.train.memory import MemoryPrediction, predict_memory
from modelworks.train.rank_memory import predict_rank_memory
from modelworks.train.state import TrainState

_NEIGHBOURS = 8  # layouts of each world size that are looked at, each of which takes a moment to predict
_MOST = 4  # suggestions


class OutOfMemory:
    """A context in which want of memory ends in a `TrainingFailed` that explains it.

    state: to be set once it is there. kept: says which checkpoint is left.
    """

    def __init__(self, derived: Derived, mesh: Mesh, ranks_here: int) -> None:
        self._derived, self._mesh, self._ranks_here = derived, mesh, ranks_here
        self.state: TrainState | None = None
        self.kept: Callable[[], str] | None = None

    def __enter__(self) -> OutOfMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not is_out_of_memory(error):
            return
        fitting = suggestions(self._derived, self._capacity())
        text = explain_out_of_memory(error, self._mesh.rank, self._categories(), fitting)
        raise TrainingFailed(text if self.kept is None else f"{text}\n{self.kept()}") from error

    def _categories(self) -> dict[str, int]:
        """What is allocated where it can be seen, what was predicted where it cannot: those tensors are gone."""
        derived, state = self._derived, self.state
        prediction = predict_rank_memory(
            derived.config, precision=derived.precision.name, micro_batch=derived.micro_batch, rank=self._mesh.rank
        )
        categories = {f"{name} (predicted)": size for name, size in asdict(prediction).items()}
        if state is None:
            return categories
        allocated = {**state.model.gradients.bytes(), "optimizer": state.optimizer.state_bytes()}
        for name, size in allocated.items():
            predicted = categories.pop(f"{name} (predicted)")
            # gradients that were freed on the way here count as what they would have been
            full = name == "gradients" and size < predicted
            categories[f"{name} ({'predicted' if full else 'allocated'})"] = predicted if full else size
        return categories

    def _capacity(self) -> int:
        """Bytes that one rank may have in all."""
        if self._derived.device.type == "cuda":
            return int(MEMORY_SHARE * torch.cuda.mem_get_info()[1])
        mine = psutil.Process().memory_info().rss
        return int(MEMORY_SHARE * (mine + psutil.virtual_memory().available // self._ranks_here))


def suggestions(derived: Derived, capacity: int) -> list[str]:
    """Settings near those of the run that need less memory on each rank: those that fit into `capacity` bytes, the
    nearest first; where none does, those that need least."""
    config, precision = derived.config, derived.precision.name

    @cache
    def whole(recompute: str, micro_batch: int) -> MemoryPrediction:
        train = config.train.model_copy(update={"recompute": recompute})
        return predict_memory(
            config.model,
            train,
            precision=precision,
            micro_batch=micro_batch,
            seq_len=config.data.seq_len,
            optimizer=config.optimizer,
        )

    def need(changed: RunConfig, micro_batch: int) -> int:
        one = whole(changed.train.recompute, micro_batch)
        return predict_rank_memory(changed, precision=precision, micro_batch=micro_batch, whole=one).total

    now = need(config, derived.micro_batch)
    found = [(words, need(changed, rows)) for words, changed, rows in _candidates(config, derived.micro_batch)]
    less = [(words, size) for words, size in found if size < now]
    fitting = [(words, size) for words, size in less if size <= capacity]
    chosen = fitting or sorted(less, key=lambda item: item[1])
    return [f"{words}: {format_bytes(size)} instead of {format_bytes(now)}" for words, size in chosen[:_MOST]]


def _candidates(config: RunConfig, micro_batch: int) -> Iterator[tuple[str, RunConfig, int]]:
    """What to set, the run that it gives, the rows of its micro-batch: cheap changes first, then more ranks."""
    train, world = config.train, Layout.of(config.parallel).world_size
    if micro_batch > 1:
        yield "train.micro_batch=1", config, 1
    if train.recompute != "full":
        full = config.model_copy(update={"train": train.model_copy(update={"recompute": "full"})})
        yield "train.recompute=full", full, micro_batch
    for size in (world, 2 * world, 4 * world):
        for parallel in islice(neighbours(config, size), _NEIGHBOURS):
            levels = [level for level in (1, 2, 3) if level >= parallel.zero] if parallel.dp_shard > 1 else [0]
            for zero in levels:
                changed = parallel.model_copy(update={"zero": zero})
                if changed != config.parallel:
                    more = "" if size == world else f" ({size} ranks)"
                    yield (
                        f"{_keys(describe(changed))}{more}",
                        config.model_copy(update={"parallel": changed}),
                        micro_batch,
                    )


def _keys(layout: str) -> str:
    return " ".join(f"parallel.{part}" for part in layout.split()) if "=" in layout else layout
