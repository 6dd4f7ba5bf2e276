"""What a request says about single tokens, put into the logits of all rows at once: biases, penalties, bans, masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.models import penalize
from modelworks.serve.draws import forbid
from modelworks.serve.sampling_state import SamplingState


def edit(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Change logits (R, V), contiguous float32, in place. A state whose structure fails gets its `error`."""
    flat = logits.view(-1)
    size = logits.shape[-1]
    _add_biases(flat, size, states)
    _penalize(flat, size, states)
    masked, masks = _masks(size, states)
    _ban(flat, size, states, dict(zip(masked, masks, strict=True)))
    if masked:
        forbid(logits, np.array(masked), masks)


def _add_biases(flat: Tensor, size: int, states: Sequence[SamplingState]) -> None:
    biased = [(row, state) for row, state in enumerate(states) if len(state.bias)]
    if biased:
        where = _places(flat, [row * size + state.bias_ids for row, state in biased])
        flat[where] += torch.from_numpy(np.concatenate([state.bias for _, state in biased])).to(flat.device)


def _penalize(flat: Tensor, size: int, states: Sequence[SamplingState]) -> None:
    counted = [(row, state.params, state.counts) for row, state in enumerate(states) if state.counts is not None]
    if not counted:
        return
    lengths = [len(counts.ids) for _, _, counts in counted]
    where = _places(flat, [row * size + counts.ids for row, _, counts in counted])
    times = torch.from_numpy(np.concatenate([counts.times for _, _, counts in counted])).to(flat.device)

    def each(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(flat.device)

    repetition = each([params.repetition_penalty for _, params, _ in counted])
    frequency = each([params.frequency_penalty for _, params, _ in counted])
    presence = each([params.presence_penalty for _, params, _ in counted])
    every = torch.arange(len(where), device=flat.device)
    scores = penalize(flat[where], every, repetition)
    flat[where] = scores - frequency * times - presence * (times > 0)


def _masks(size: int, states: Sequence[SamplingState]) -> tuple[list[int], NDArray[np.int32]]:
    """Rows for which only some tokens are allowed, and those tokens as bits: one matrix for the batch."""
    rows = [row for row, state in enumerate(states) if state.constraint is not None or state.allowed is not None]
    masks = np.full((len(rows), -(-size // 32)), -1, np.int32)
    for mask, row in zip(masks, rows, strict=True):
        state = states[row]
        if state.constraint is not None and state.error is None:
            state.error = state.constraint.mask(mask)
        if state.allowed is not None:
            mask &= state.allowed
    return rows, masks


def _ban(flat: Tensor, size: int, states: Sequence[SamplingState], masks: dict[int, NDArray[np.int32]]) -> None:
    found = []
    for row, state in enumerate(states):
        if state.bans:
            # A structure that is whole and cannot go on has to end, however few tokens it has.
            whole = state.constraint is not None and state.only_ends(masks[row])
            may_end = whole or not state.waits_for_min_tokens
            found += [row * size + ids for ids in state.forbidden(may_end=may_end)]
    if found:
        flat[_places(flat, found)] = -math.inf


def _places(flat: Tensor, parts: list[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(flat.device)
