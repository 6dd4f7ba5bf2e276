"""SentencePiece vocabularies (Kudo and Richardson 2018), from a `.model` file or from the pieces a GGUF file lists.

The rules of the original are rebuilt in `tokenizers`: blanks become ▁, one ▁ goes before the text, the whole text is
one word. Of BPE the file holds pieces with scores, no merges: every way of making a piece out of two others is a
merge, and the better score goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from modelworks.config import UserError
from modelworks.data.tokenizers.tokenizer import Tokenizer, put_bos_first

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types, the same numbers in GGUF


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    type: int = NORMAL


@dataclass(frozen=True)
class Rules:
    """prefix: put a blank before the text. collapse: strip blanks at both ends and keep one of several between.
    charsmap: SentencePiece's compiled normalisation table, or b""."""

    kind: Literal["bpe", "unigram"]
    prefix: bool = True
    collapse: bool = False
    charsmap: bytes = b""


def tokenizer_from_sentencepiece(path: Path) -> Tokenizer:
    """Read a SentencePiece `.model` of type bpe or unigram. Raises UserError."""
    from sentencepiece import sentencepiece_model_pb2 as protobuf

    model = protobuf.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError, whose package carries no types
        raise UserError(f"{path}: not a SentencePiece model ({error})") from None
    if not model.pieces:
        raise UserError(f"{path}: not a SentencePiece model (no pieces)")
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    kinds: dict[int, Literal["bpe", "unigram"]] = {trainer.BPE: "bpe", trainer.UNIGRAM: "unigram"}
    if trainer.model_type not in kinds:
        raise UserError(f"{path}: SentencePiece model of type word or char, expected bpe or unigram")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise UserError(f"{path}: blanks as suffixes are not supported, expected ▁ before words")
    rules = Rules(
        kinds[trainer.model_type],
        normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
        normalizer.precompiled_charsmap,
    )
    pieces = [Piece(piece.piece, piece.score, piece.type) for piece in model.pieces]
    count = len(pieces)
    bos, eos, pad = (i if 0 <= i < count else None for i in (trainer.bos_id, trainer.eos_id, trainer.pad_id))
    if eos is None:
        raise UserError(f"{path}: the vocabulary has no end-of-sentence piece, which documents must end with")
    backend = piece_backend(pieces, rules, where=str(path))
    if bos is not None:
        put_bos_first(backend, bos)
    return Tokenizer(backend, bos_id=bos, eos_id=eos, pad_id=pad, add_bos=bos is not None)


def piece_backend(pieces: Sequence[Piece], rules: Rules, *, where: str) -> Any:
    """A `tokenizers.Tokenizer` over `pieces`, whose ids are their places."""
    unknown = next((place for place, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    byte_fallback = sum(piece.type == BYTE for piece in pieces) == 256
    if unknown is None and not byte_fallback:
        raise UserError(f"{where}: neither an unknown piece nor 256 byte pieces: some text could not be encoded")
    vocabulary = {piece.text: place for place, piece in enumerate(pieces)}
    if len(vocabulary) < len(pieces):
        raise UserError(f"{where}: {len(pieces) - len(vocabulary)} pieces are listed twice")
    model: Any
    if rules.kind == "bpe":
        model = models.BPE(
            vocabulary,
            _merges(pieces, vocabulary),
            unk_token=None if unknown is None else pieces[unknown].text,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    else:
        # a user-defined piece is taken whole whatever surrounds it: SentencePiece's own score for it says so
        best = max(piece.score for piece in pieces if piece.type == NORMAL)
        scored = [(p.text, len(p.text) * best - 0.1 if p.type == USER_DEFINED else p.score) for p in pieces]
        model = models.Unigram(scored, unknown, byte_fallback)
    backend = Backend(model)
    backend.normalizer = _normalizer(rules)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if rules.prefix else parts)
    whole = [piece for piece in pieces if piece.type == USER_DEFINED]
    if whole and rules.kind == "bpe" and rules.collapse:
        # blanks would be stripped on both sides of each
        raise UserError(f"{where}: user-defined pieces beside removal of extra blanks are not supported in type bpe")
    add_special_tokens(backend, [piece for piece in pieces if rules.kind == "bpe" or piece.type != USER_DEFINED])
    return backend


def add_special_tokens(backend: Any, pieces: Sequence[Piece]) -> None:
    """Control pieces are special; user-defined ones are matched whole in any text."""
    special = [piece.text for piece in pieces if piece.type in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    own = [piece.text for piece in pieces if piece.type == USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in own])


def _normalizer(rules: Rules) -> Any:
    steps: list[Any] = [normalizers.Precompiled(rules.charsmap)] if rules.charsmap else []
    if rules.collapse:
        steps += [
            normalizers.Replace(Regex(r"\A +"), ""),
            normalizers.Replace(Regex(r" +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if rules.prefix:
        steps.append(normalizers.Prepend("▁"))
    steps.append(normalizers.Replace(" ", "▁"))
    return normalizers.Sequence(steps)


def _merges(pieces: Sequence[Piece], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    mergeable = {piece.text for piece in pieces if piece.type in (NORMAL, USER_DEFINED, UNUSED)}
    found = []
    for place, piece in enumerate(pieces):
        if piece.type != NORMAL:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in mergeable and right in mergeable:
                found.append(((-piece.score, place, cut), (left, right)))
    return [pair for _, pair in sorted(found)]
