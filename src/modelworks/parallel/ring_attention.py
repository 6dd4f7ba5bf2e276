"""Ring attention: keys and values travel round the ranks that share a row (Liu, Zaharia, Abbeel 2023).

A row's columns are cut into 2 N equal pieces, and rank p of N keeps the pieces p and 2 N - 1 - p (zig-zag). In turn r
it holds the keys of rank s = p - r (mod N); a causal query sees

    r = 0   its own two pieces, causally                  s > p   both of s's pieces, from the later own piece
    s < p   s's earlier piece, from both own pieces

which is two pieces' worth of work for every rank in every turn: nobody waits for a rank with a longer past.
The exchange of the next turn's keys is started before this turn's part is computed, and parts are merged by their
log-sum-exp. In the backward pass keys and values travel once more, and the gradients of a block travel one turn
behind it, growing on the way, until the last rank to see the block sends them home.

Bytes that a rank sends for one layer, with KV those of its keys and values together (grouped heads as they are) and W
those of as many elements in the wide dtype (float32; float64 for float64), counted as `send` on the axis `cp`:

    forward (N - 1) KV        backward (N - 1) KV + (N - 1) W

The owner's part of a block's gradients stays at home, which saves the N-th trip. Recomputing a block sends its
forward bytes again. Windows and documents leave out work, not messages. Invariant: every rank sends and receives in
the same order, whatever it computes between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelworks.parallel.attention_parts import merge_, partial_attention, partial_attention_gradients, wide
from modelworks.parallel.collectives import Group


@dataclass(frozen=True)
class Block:
    """Queries of this rank that see some keys of the travelling block: local columns of each.

    causal: query i sees the keys 0..i of as many. visible: makes the mask (1 or B, queries, keys); None: all are.
    """

    queries: slice
    keys: slice
    causal: bool = False
    visible: Callable[[], Tensor] | None = None

    def mask(self) -> Tensor | None:
        return None if self.visible is None else self.visible()


def plan_turns(
    piece: int, size: int, place: int, window: int | None, document_ids: Tensor | None, device: torch.device
) -> list[list[Block]]:
    """For each turn of a ring of `size` ranks, what rank `place` computes.

    piece: columns of a piece. document_ids: of whole rows, (B, 2 · size · piece), in order; None for one a row.
    """
    if window is not None and window >= 2 * size * piece:
        window = None
    own = _pieces(place, size)
    turns = []
    for turn in range(size):
        source = (place - turn) % size
        if window is None and document_ids is None:
            turns.append([_unmasked(place, source, piece)])
            continue
        theirs = _pieces(source, size)
        pairs = [(i, j) for i in (0, 1) for j in (0, 1) if theirs[j] <= own[i]]
        blocks = []
        for i, j in pairs:
            queries, keys = (
                range(own[i] * piece, (own[i] + 1) * piece),
                range(theirs[j] * piece, (theirs[j] + 1) * piece),
            )
            block = _masked(queries, keys, i * piece, j * piece, window, document_ids, device)
            if block is not None:
                blocks.append(block)
        turns.append(blocks)
    return turns


def ring_attention(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, group: Group, turns: Sequence[Sequence[Block]]
) -> Tensor:
    """Softmax attention scaled by 1/sqrt(K) of this rank's queries to the keys of all ranks: (B, T, H, K).

    All tensors hold this rank's columns and are of one dtype; `turns` is from `plan_turns`.
    """
    if not q_BTHK.dtype == k_BTGK.dtype == v_BTGK.dtype:
        raise TypeError(
            f"queries, keys and values must be of one dtype: {q_BTHK.dtype}, {k_BTGK.dtype}, {v_BTGK.dtype}"
        )
    return _RingAttention.apply(q_BTHK, k_BTGK, v_BTGK, group, turns)  # type: ignore[no-any-return, no-untyped-call]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, group: Group, turns: Sequence[Sequence[Block]]
    ) -> Tensor:
        out_BTHK = torch.zeros(q_BTHK.shape, dtype=wide(q_BTHK.dtype), device=q_BTHK.device)
        lse_BTH = torch.full_like(out_BTHK[..., 0], -torch.inf)
        for blocks, (k, v) in zip(turns, _travelling(k_BTGK, v_BTGK, group), strict=True):
            for block in blocks:
                queries, keys = block.queries, block.keys
                part = partial_attention(q_BTHK[:, queries], k[:, keys], v[:, keys], block.mask(), block.causal)
                merge_(out_BTHK[:, queries], lse_BTH[:, queries], *part)
        out_BTHK = out_BTHK.to(q_BTHK.dtype)
        ctx.save_for_backward(q_BTHK, k_BTGK, v_BTGK, out_BTHK, lse_BTH)
        ctx.group, ctx.turns = group, turns
        return out_BTHK

    @staticmethod
    def backward(ctx: Any, gradient_BTHK: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BTHK, k_BTGK, v_BTGK, out_BTHK, lse_BTH = ctx.saved_tensors
        group: Group = ctx.group
        q_gradient = torch.zeros(q_BTHK.shape, dtype=lse_BTH.dtype, device=q_BTHK.device)
        at_home: Tensor | None = None
        behind: Callable[[], Tensor] | None = None
        for turn, (k, v) in enumerate(_travelling(k_BTGK, v_BTGK, group)):
            # This rank's part of the gradients of the block's keys and values.
            gradients = torch.zeros((2, *k.shape), dtype=lse_BTH.dtype, device=k.device)
            for block in ctx.turns[turn]:
                queries, keys = block.queries, block.keys
                saved = (q_BTHK[:, queries], k[:, keys], v[:, keys], out_BTHK[:, queries], lse_BTH[:, queries])
                part = partial_attention_gradients(gradient_BTHK[:, queries], *saved, block.mask(), block.causal)
                for total, addend in zip((q_gradient[:, queries], *gradients[:, :, keys]), part, strict=True):
                    total += addend
            if at_home is None:
                at_home = gradients
                continue
            if behind is not None:
                gradients += behind()  # what the ranks before found for this block
            behind = _start_passing_on(gradients, group)
        assert at_home is not None
        if behind is not None:
            at_home += behind()
        k_gradient, v_gradient = at_home.to(k_BTGK.dtype)
        return q_gradient.to(q_BTHK.dtype), k_gradient, v_gradient, None, None


def _travelling(k_BTGK: Tensor, v_BTGK: Tensor, group: Group) -> Iterator[Tensor]:
    """In each turn the keys and values (2, B, T, G, K) that are here, while the next ones are on their way."""
    here = torch.stack((k_BTGK, v_BTGK))
    for _ in range(group.size - 1):
        arrived = _start_passing_on(here, group)
        yield here
        here = arrived()
    yield here


def _start_passing_on(x: Tensor, group: Group) -> Callable[[], Tensor]:
    """Send x to the next rank of the ring; call what is returned for what the rank before has sent.

    What is returned holds x, which must neither change nor be freed until it is called.
    """
    incoming = torch.empty_like(x)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    works = group.exchange([(x, after)], [(incoming, before)])

    return partial(_arrived, works, x, incoming)


def _arrived(works: Sequence[Any], _: Tensor, incoming: Tensor) -> Tensor:
    for work in works:
        work.wait()
    return incoming


def _pieces(place: int, size: int) -> tuple[int, int]:
    """The pieces that a rank keeps, in the order of its columns."""
    return place, 2 * size - 1 - place


def _unmasked(place: int, source: int, piece: int) -> Block:
    """The picture at the top of this file."""
    both = slice(0, 2 * piece)
    if source == place:
        return Block(both, both, causal=True)
    return Block(both, slice(0, piece)) if source < place else Block(slice(piece, 2 * piece), both)


def _masked(
    queries: range,
    keys: range,
    first_query: int,
    first_key: int,
    window: int | None,
    document_ids: Tensor | None,
    device: torch.device,
) -> Block | None:
    """The part of a pair of pieces that holds all that is visible in it; None if nothing is.

    queries, keys: columns of the row; the local columns of the same start at first_query and first_key.
    """
    visible = _visible(queries, keys, window, document_ids, device)
    if not bool(visible.any()):
        return None
    first, last = _extent(visible.any(0).any(1))
    first_seen, last_seen = _extent(visible.any(0).any(0))
    box = visible[:, first:last, first_seen:last_seen]
    local = slice(first_query + first, first_query + last), slice(first_key + first_seen, first_key + last_seen)
    if bool(box.all()):
        return Block(*local)
    if queries == keys and bool((box == torch.ones_like(box).tril_()).all()):
        return Block(*local, causal=True)
    # Made again in each layer: it costs little beside the products, and masks of all blocks would fill the memory.
    again = partial(_visible, queries[first:last], keys[first_seen:last_seen], window, document_ids, device)
    return Block(*local, visible=again)


def _visible(
    queries: range, keys: range, window: int | None, document_ids: Tensor | None, device: torch.device
) -> Tensor:
    """Bool (1 or B, queries, keys) for columns of a row: not ahead, within the window, of the same document."""
    query = torch.arange(queries.start, queries.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    visible = (key <= query)[None]
    if window is not None:
        visible = visible & (key > query - window)
    if document_ids is not None:
        own, theirs = document_ids[:, queries.start : queries.stop], document_ids[:, keys.start : keys.stop]
        visible = visible & (own[:, :, None] == theirs[:, None, :])
    return visible


def _extent(present: Tensor) -> tuple[int, int]:
    """First and end of what is True."""
    places = present.nonzero()
    return int(places[0]), int(places[-1]) + 1
