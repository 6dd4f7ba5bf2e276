"""What the server's front needs to know of the model: plain values and the tokeniser, no weights and no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelworks.data import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """name: under which requests ask for it. vocab_size: of the model, so token ids are below it. max_model_len: tokens
    of prompt and completion together. defaults: sampling parameters for requests that name none, as the model's authors
    recommend them (generation_config.json). facts: sentences for the operator, how memory was divided among them.
    created: seconds since the epoch."""

    name: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    defaults: Mapping[str, float] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
