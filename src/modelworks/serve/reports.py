"""How likely tokens are by the model's own distribution, and which are most likely: compiled on a CPU, else in torch.

Natural logarithms, float32. A row's result is a function of that row alone; of equally likely tokens the lowest id
comes first. A row that holds something that is not finite has NaN throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelworks.models import highest_scores
from modelworks.serve.draws import call_on_rows, compiled_for


class Reports(NamedTuple):
    """Of each of R rows. logprobs: float32 (R,), of the chosen token. top_ids, top_logprobs: int64 and float32
    (R, count), the most likely tokens, the best first."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]


def report(
    logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int64], count: int, *, native: bool = True
) -> Reports:
    """Of each of `rows` of logits (.., V) float32. chosen: int64, one for each of `rows`."""
    count = min(count, logits.shape[-1])
    compiled = compiled_for(logits) if native else None
    if compiled is None:
        return _report_torch(logits, rows, chosen, count)
    shape = len(rows), count
    found = Reports(np.empty(len(rows), np.float32), np.empty(shape, np.int64), np.empty(shape, np.float32))
    call_on_rows(compiled.report_rows, logits, rows, chosen, count, *found)
    return found


def _report_torch(logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int64], count: int) -> Reports:
    device = logits.device
    logprobs = logits[torch.from_numpy(rows).to(device)].log_softmax(dim=-1)
    of_chosen = logprobs.gather(-1, torch.from_numpy(chosen).to(device)[:, None])[:, 0].cpu().numpy()
    if count == 0:
        return Reports(of_chosen, np.empty((len(rows), 0), np.int64), np.empty((len(rows), 0), np.float32))
    values, ids = highest_scores(logprobs, count)
    return Reports(of_chosen, ids.cpu().numpy(), values.cpu().numpy())
