"""Text that the model writes during training: numbers say how good it is, samples say at what."""

from __future__ import annotations

from collections.abc import Iterator

from modelworks.data import Dataset, Tokenizer
from modelworks.models import Sampling, Transformer, generate

NEW_TOKENS = 64
PROMPT_CHARACTERS = 60
# Each sample's numbers come from (seed, place), so the same weights write the same samples.
TEMPERATURE, TOP_P = 0.8, 0.95


def choose_prompts(written: list[str], dataset: Dataset, count: int) -> list[str]:
    """`count` prompts: those written, in turn, or the beginnings of validation documents."""
    if count and written:
        return [written[index % len(written)] for index in range(count)]
    return [_beginning(text) for text in dataset.validation_texts(count)] if count else []


def sample_texts(
    model: Transformer, tokenizer: Tokenizer, prompts: list[str], *, seed: int
) -> Iterator[tuple[str, str]]:
    """(prompt, continuation) for each prompt. The model is used as it is and left in training mode if it was."""
    for index, prompt in enumerate(prompts):
        # An empty prompt is the beginning of a document.
        ids = tokenizer.encode_prompt(prompt) or [tokenizer.start_id]
        ids = ids[-(model.config.max_seq_len - 1) :]
        sampling = Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=seed + index)
        written = list(generate(model, ids, sampling, tokenizer.eos_ids, NEW_TOKENS))
        yield prompt, tokenizer.decode(written)


def _beginning(text: str) -> str:
    """The first words of a document, cut at white space so that no token is torn."""
    if len(text) <= PROMPT_CHARACTERS:
        return text
    head = text[:PROMPT_CHARACTERS]
    return head.rsplit(None, 1)[0] if len(head.split()) > 1 else head
