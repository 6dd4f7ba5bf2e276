"""Steps computed by several ranks together: rank 0 is an executor like any other, the others follow it.

    rank 0      header (what to do, sizes) and batch, broadcast      its share      logits of all shares, gathered
    others      receive both                                          their share    send their logits to rank 0

Within a step the ranks meet twice a layer, where their partial sums of attention and feed-forward are added up
(`parallel.tensor`). Only rank 0 samples. Followers wait for the next header however long it takes, since a server may
have nothing to do for days; a rank that dies breaks a connection, which ends the step with an error on all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelworks.config import ModelConfig
from modelworks.parallel import Group
from modelworks.serve.batch import RaggedBatch
from modelworks.serve.executor import ExecutorBroken
from modelworks.serve.tensor_parallel.shares import vocabulary_shares
from modelworks.serve.torch_executor import TorchExecutor

_LEAVE, _RUN, _COPY = range(3)
_HEADER = 5  # command, tokens (or pairs of blocks), sequences, width of the tables, wanted logits


class ParallelExecutor:
    """Rank 0's side; see `modelworks.serve.executor.Executor`.

    own: this rank's share. group: all ranks. why_lost: asked when a step fails: which rank has ended and how, if one
    has. at_close: called once the others were told to leave.
    """

    def __init__(
        self,
        config: ModelConfig,
        own: TorchExecutor,
        group: Group,
        *,
        why_lost: Callable[[], str | None] = lambda: None,
        at_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.n_blocks, self.block_size = config, own.n_blocks, own.block_size
        self.name = f"torch on {group.size} ranks"
        self.kv_dtype, self.bytes_per_block = own.kv_dtype, own.bytes_per_block
        self._own, self._group, self._why_lost, self._at_close = own, group, why_lost, at_close
        self._rows = vocabulary_shares(config.vocab_size, group.size)
        self._broken: str | None = None
        self._closed = False

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            self._together(lambda: self._copy(pairs))

    def run(self, batch: RaggedBatch) -> Tensor:
        return self._together(lambda: self._run(batch))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._broken is None:
            self._announce(_LEAVE)
        self._own.close()
        self._at_close()

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        places = torch.tensor(pairs, dtype=torch.int64)
        self._announce(_COPY, len(pairs))
        self._group.broadcast_(places.flatten().to(self._own.device))
        self._own.copy_blocks(pairs)
        return places

    def _run(self, batch: RaggedBatch) -> Tensor:
        wanted = batch.wanted.shape[0]
        self._announce(_RUN, batch.n_tokens, batch.n_sequences, batch.tables.shape[1], wanted)
        self._group.broadcast_(_packed(batch).to(self._own.device))
        parts = [self._own.run(batch)]
        for place in range(1, self._group.size):
            part = torch.empty((wanted, self._rows[place]), dtype=torch.float32, device=self._own.device)
            if wanted:
                self._group.receive(part, place).wait()
            parts.append(part.cpu())
        return torch.cat(parts, dim=1)

    def _announce(self, command: int, *sizes: int) -> None:
        header = torch.tensor([command, *sizes, *[0] * (_HEADER - 1 - len(sizes))], device=self._own.device)
        self._group.broadcast_(header)

    def _together(self, work: Callable[[], Tensor]) -> Tensor:
        """A step that fails on any rank leaves the others in the middle of it: there is no next one."""
        if self._broken is not None:
            raise ExecutorBroken(self._broken)
        try:
            return work()
        except BaseException as error:
            lost = self._why_lost()
            self._broken = f"the ranks can no longer work together: {lost or f'{type(error).__name__}: {error}'}"
            if lost is None:
                raise
            raise ExecutorBroken(self._broken) from error


def follow(own: TorchExecutor, group: Group) -> None:
    """What every rank but the first does, until rank 0 closes its executor."""
    while True:
        header = torch.empty(_HEADER, dtype=torch.int64, device=own.device)
        command, *sizes = group.broadcast_(header).tolist()
        if command == _LEAVE:
            own.close()
            return
        if command == _COPY:
            places = group.broadcast_(torch.empty(2 * sizes[0], dtype=torch.int64, device=own.device))
            own.copy_blocks([(source, target) for source, target in places.view(-1, 2).tolist()])
            continue
        payload = torch.empty(_payload(*sizes), dtype=torch.int64, device=own.device)
        logits = own.run(_unpacked(group.broadcast_(payload).cpu(), *sizes))
        if sizes[-1]:
            group.send(logits.to(own.device).contiguous(), 0).wait()


def _payload(tokens: int, sequences: int, width: int, wanted: int) -> int:
    return 3 * tokens + sequences + 1 + sequences + sequences * width + wanted


def _packed(batch: RaggedBatch) -> Tensor:
    parts = (batch.tokens, batch.positions, batch.slots, batch.starts, batch.lengths, batch.tables, batch.wanted)
    return torch.cat([part.flatten().to(torch.int64) for part in parts])


def _unpacked(payload: Tensor, tokens: int, sequences: int, width: int, wanted: int) -> RaggedBatch:
    sizes = [tokens, tokens, tokens, sequences + 1, sequences, sequences * width, wanted]
    named, positions, slots, starts, lengths, tables, logits = torch.split(payload, sizes)
    return RaggedBatch(
        named, positions, slots, starts.int(), lengths.int(), tables.int().view(sequences, width), logits
    )
