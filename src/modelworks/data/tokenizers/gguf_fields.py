"""A tokeniser from a GGUF file's metadata, which lists tokens, their types, and merges or scores.

The rule that splits text into words before merging is only named there (`tokenizer.ggml.pre`). The rules below are
those of the models' own published tokenisers; a name that is not known is refused, because a wrong rule gives
plausible, wrong ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from modelworks.config import UserError, nearest
from modelworks.data.tokenizers.sentencepiece_model import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    Rules,
    add_special_tokens,
    piece_backend,
)
from modelworks.data.tokenizers.tokenizer import Tokenizer, put_bos_first

_PREFIX = "tokenizer.ggml."
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_NUMBERS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_NUMBERS

# Names of rules, by rule: GPT-2's, GPT-2's after splitting off every digit, Llama 3's, Qwen 2's.
_GPT2_NAMES = ("default", "gpt-2", "phi-2", "olmo", "mpt")
_DIGITS_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen", "megrez")
_KNOWN = (*_GPT2_NAMES, *_DIGITS_NAMES, *_LLAMA3_NAMES, *_QWEN2_NAMES)

# Control tokens that end a turn or a text, whatever the file calls its EOS; generation stops at each.
_ENDS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>"}


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Build from metadata: plain values by full key. Raises UserError for what is missing or not known."""
    kind = _field(fields, "model")
    texts: list[str] = _field(fields, "tokens")
    types = fields.get(_PREFIX + "token_type") or [1] * len(texts)
    scores = fields.get(_PREFIX + "scores") or [0.0] * len(texts)
    if not len(types) == len(scores) == len(texts):
        raise UserError("GGUF: tokenizer.ggml.tokens, .token_type and .scores differ in length")
    pieces = [Piece(text, float(score), int(type_)) for text, score, type_ in zip(texts, scores, types, strict=True)]
    if kind == "gpt2":
        backend = _byte_level(pieces, _field(fields, "merges"), str(fields.get(_PREFIX + "pre", "default")))
    elif kind == "llama":
        prefix = bool(fields.get(_PREFIX + "add_space_prefix", True))
        backend = piece_backend(pieces, Rules("bpe", prefix=prefix), where="GGUF tokenizer")
    else:
        raise UserError(f"GGUF: tokenizer.ggml.model is `{kind}`, expected gpt2 or llama")
    eos_id = int(_field(fields, "eos_token_id"))
    ends = [place for place, piece in enumerate(pieces) if piece.type == CONTROL and piece.text in _ENDS]
    turn_end = fields.get(_PREFIX + "eot_token_id")
    bos_id, pad_id = fields.get(_PREFIX + "bos_token_id"), fields.get(_PREFIX + "padding_token_id")
    add_bos = bos_id is not None and bool(fields.get(_PREFIX + "add_bos_token", kind == "llama"))
    if add_bos:
        put_bos_first(backend, int(bos_id))  # type: ignore[arg-type]
    return Tokenizer(
        backend,
        bos_id=None if bos_id is None else int(bos_id),
        eos_id=eos_id,
        eos_ids=[*([] if turn_end is None else [int(turn_end)]), *ends],
        pad_id=None if pad_id is None else int(pad_id),
        add_bos=add_bos,
        chat_template=fields.get("tokenizer.chat_template"),
    )


def _byte_level(pieces: list[Piece], merges: list[str], rule: str) -> Any:
    if rule not in _KNOWN:
        near = nearest(rule, _KNOWN)
        hint = f" (did you mean `{near}`?)" if near else ""
        raise UserError(f"GGUF: tokenizer.ggml.pre `{rule}` is not known, expected one of {', '.join(_KNOWN)}{hint}")
    vocabulary = {piece.text: place for place, piece in enumerate(pieces)}
    broken = next((merge for merge in merges if merge.count(" ") != 1), None)
    if broken is not None:
        raise UserError(f"GGUF: tokenizer.ggml.merges holds `{broken}`, expected two tokens")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=rule in _LLAMA3_NAMES))
    except Exception as error:  # the library raises no narrower kind; e.g. a merge of tokens that are not there
        raise UserError(f"GGUF: tokenizer.ggml.tokens and merges do not belong together ({error})") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule in _GPT2_NAMES + _DIGITS_NAMES)
    if rule in _GPT2_NAMES:
        backend.pre_tokenizer = byte_level
    elif rule in _DIGITS_NAMES:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        split = pre_tokenizers.Split(Regex(_LLAMA3 if rule in _LLAMA3_NAMES else _QWEN2), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if rule in _QWEN2_NAMES:
            backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    # GGUF marks `<|endoftext|>` of some files as unknown: it is a name like the control tokens
    add_special_tokens(backend, [p for p in pieces if p.type in (CONTROL, UNKNOWN, USER_DEFINED)])
    return backend


def _field(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(_PREFIX + name)
    if value is None:
        raise UserError(f"GGUF: no `{_PREFIX}{name}` in the metadata, so the file carries no usable tokenizer")
    return value
