"""Generation token by token with a KV cache: one pass over the prompt (prefill), then one token a pass (decode)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from modelworks.config import UserError
from modelworks.models.context import CachedContext
from modelworks.models.sampling import Sampling as Sampling
from modelworks.models.sampling import choose
from modelworks.models.transformer import Transformer


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    eos_ids: Collection[int] = (),
    max_new_tokens: int | None = None,
) -> Iterator[int]:
    """Yield new tokens one at a time.

    Ends after a token of `eos_ids` (which is yielded), after `max_new_tokens`, or when the sequence fills the model's
    max_seq_len. Raises UserError at once when the prompt is empty, holds ids outside the vocabulary or is longer than
    max_seq_len, and during generation when the logits are not finite.
    """
    config = model.config
    if not prompt_ids:
        raise UserError("the prompt holds no tokens: give some text, or a token that begins a document")
    if len(prompt_ids) > config.max_seq_len:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, but the model's max_seq_len is {config.max_seq_len}; shorten it"
        )
    wrong = next((token for token in prompt_ids if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise UserError(
            f"the prompt holds token id {wrong}, but the model's vocabulary has ids 0 to {config.vocab_size - 1}; "
            "the tokeniser belongs to another model"
        )
    if max_new_tokens is not None and max_new_tokens < 0:
        raise UserError(f"max_new_tokens: got {max_new_tokens}, expected a whole number >= 0")
    room = config.max_seq_len - len(prompt_ids)
    return _tokens(model, prompt_ids, sampling, eos_ids, room if max_new_tokens is None else min(room, max_new_tokens))


def _tokens(
    model: Transformer, prompt_ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int], count: int
) -> Iterator[int]:
    context = CachedContext(model.config.n_layers)
    sequence = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.head_weight().device)
    new = sequence
    for _ in range(count):
        logits = _next_logits(model, new, context)
        token = choose(logits, sequence[0], sampling, position=sequence.shape[1])
        yield token
        if token in eos_ids:
            return
        new = sequence.new_tensor([[token]])
        sequence = torch.cat((sequence, new), dim=1)


@torch.inference_mode()  # round one pass, not round the generator: it must not leak into the caller between tokens
def _next_logits(model: Transformer, new: Tensor, context: CachedContext) -> Tensor:
    """Logits (vocab_size,) after the tokens `new` (1, T), which follow those in the context."""
    training = model.training
    if training:
        model.eval()
    start, n_new = context.length, new.shape[1]
    positions = torch.arange(start, start + n_new, device=new.device)[None]
    logits = model.logits(model(new, positions, context)[0, -1])
    if training:
        model.train()
    if not bool(logits.isfinite().all()):
        raise UserError(
            f"the model's logits after token {start + n_new} are not finite: its weights are damaged, or its dtype "
            f"({logits.dtype}) overflows; try float32"
        )
    return logits
