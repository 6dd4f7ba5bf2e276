"""Training a tokeniser: byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) or Unigram (Kudo 2018).

Both work on bytes written as printable characters, with all 256 in the vocabulary: any text is encoded and comes
back exactly. One special token, `<|endoftext|>`, both starts and ends a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from modelworks.config import UserError
from modelworks.config.run import TokenizerTraining
from modelworks.data.tokenizers.pieces import training_pieces
from modelworks.data.tokenizers.tokenizer import Tokenizer, put_bos_first

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], training: TokenizerTraining) -> Tokenizer:
    """Train on `texts`, which are read once. The vocabulary may come out smaller than asked where text is scarce."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer: Any
    if training.train == "bpe":
        backend = Backend(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=training.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            min_frequency=2,
            show_progress=False,
        )
    else:
        backend = Backend(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=training.vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=alphabet,
            unk_token=END_OF_TEXT,  # required by the trainer; never produced, because every byte is in the vocabulary
            show_progress=False,
        )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    try:
        backend.train_from_iterator(_pieces(texts), trainer)
    except Exception as error:  # the library raises bare Exception
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"data.tokenizer: training {training.train} with vocab_size {training.vocab_size} failed: {error}"
        ) from None
    if training.train == "unigram":
        backend = _settled(backend)
    end = backend.token_to_id(END_OF_TEXT)
    assert end is not None
    put_bos_first(backend, end)
    return Tokenizer(backend, bos_id=end, eos_id=end, add_bos=True)


def _settled(backend: Any) -> Any:
    """The same Unigram vocabulary without what the trainer leaves to chance.

    It sums over a hash table in arbitrary order, so that scores differ in the eleventh digit from run to run, and
    gives bytes that it never saw scores in arbitrary order. Scores are rounded to 0.001 nats, single bytes rarer than
    every longer piece share one score a nat below, and ids go by score, then text. Pieces that tie for the last
    places of the vocabulary, as they do in a few lines repeated many times, remain the trainer's choice.
    """
    rules = json.loads(backend.to_str())
    end, *scored = rules["model"]["vocab"]
    lowest = min((score for text, score in scored if len(text) > 1), default=0.0)
    settled = [(round(lowest - 1 if len(text) == 1 and score < lowest else score, 3), text) for text, score in scored]
    settled.sort(key=lambda entry: (-entry[0], entry[1]))
    rules["model"]["vocab"] = [end, *([text, score] for score, text in settled)]
    return Backend.from_str(json.dumps(rules))


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from training_pieces(text)
