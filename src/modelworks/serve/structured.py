"""Output that must have a form: which tokens may come next, from llguidance (an Earley parser over a lazy lexer).

A structure is compiled once, tried for its first token, and kept; a request's `Constraint` is a copy of what is kept.
The library compiles without holding Python's lock, so that others can compute meanwhile (`serve.preparation`).
Whoever writes a structure may be hostile, so everything about it is limited: its length, the work of compiling it and
of each token (counted, not timed), how long white space of JSON may be, how many are kept. It reads no file and no
address. What is wrong with it is said when it is compiled; what goes wrong later ends the one sequence.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from modelworks.config import UserError
from modelworks.data import Tokenizer
from modelworks.serve.params import Structure

_KEPT = 64  # structures compiled (or refused) last
_LONGEST_COMPILE = 2.0  # seconds of the processor, after which a structure is refused, however far it came
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # between JSON's tokens: enough for lines indented by 31
_TEXT_AHEAD = 128  # characters of forced text that are tokenised at a time: the next token comes from their beginning
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=400_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,  # about 2 kB each
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Compiler:
    """Structures into constraints over one vocabulary. Threads may share it.

    vocab_size: of the logits, which may have more places than the tokeniser has tokens; those are never allowed.
    end_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        if not end_ids:
            raise UserError("structure: the model has no end token, which would have to follow a finished output")
        vocabulary = _Vocabulary(tokenizer, vocab_size)
        vocabulary("a")  # makes the tokeniser's rules for plain text now, not in the middle of a step
        self._vocabulary = llguidance.LLTokenizer(vocabulary, n_vocab=vocab_size, eos_token=sorted(end_ids))  # type: ignore[arg-type]  # by its protocol
        self._kept: OrderedDict[Structure, llguidance.LLMatcher | str] = OrderedDict()  # a matcher, or what is wrong
        self._lock = threading.Lock()

    def constraint(self, structure: Structure) -> Constraint:
        """At the beginning of an output. Raises UserError where the structure is wrong, unsupported or too costly."""
        found = self.kept(structure)
        return self._keep(structure, self._compile(structure)) if found is None else found

    def kept(self, structure: Structure) -> Constraint | None:
        """The same, where that takes no compiling; else None. Never waits."""
        with self._lock:
            found = self._kept.get(structure)
            if found is not None:
                self._kept.move_to_end(structure)
        return None if found is None else _copied(structure, found)

    def _keep(self, structure: Structure, found: llguidance.LLMatcher | str) -> Constraint:
        with self._lock:
            self._kept[structure] = found
            self._kept.move_to_end(structure)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return _copied(structure, found)

    def _compile(self, structure: Structure) -> llguidance.LLMatcher | str:
        started = time.thread_time()  # of this thread alone: what else the machine does refuses nothing
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _grammar(structure), log_level=0, limits=_LIMITS)
            if not matcher.is_error():
                matcher = _tried(matcher)
        except ValueError as error:
            return _one_line(str(error))
        if matcher.is_error():
            return _one_line(matcher.get_error())
        seconds = time.thread_time() - started
        return matcher if seconds <= _LONGEST_COMPILE else f"it took {seconds:.1f} s to compile; make it smaller"


class Constraint:
    """Where the output of one sequence is in its structure."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, row: NDArray[np.int32]) -> str | None:
        """Write which tokens may come next into `row`, 32 a word, the lowest bit first. What went wrong, or None."""
        assert row.flags["C_CONTIGUOUS"]
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return self._error()

    def accept(self, token: int) -> str | None:
        """`token` is the next one. What went wrong, or None."""
        return None if self._matcher.consume_token(token) else self._error()

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        if not self._matcher.rollback(count):
            raise ValueError(f"{count} tokens cannot be taken back: {self._error()}")

    def fork(self) -> Constraint:
        """The same place in the same structure, going on by itself."""
        return Constraint(self._matcher.deep_copy())

    @property
    def finished(self) -> bool:
        """Whether the output is whole and nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def is_whole(self) -> bool:
        """Whether the output could end here."""
        return self._matcher.is_accepting()

    def _error(self) -> str | None:
        if not self._matcher.is_error():
            return None
        return f"structure: it is too costly or cannot go on: {_one_line(self._matcher.get_error())}"


class _Vocabulary:
    """A tokeniser as llguidance asks for it: bytes of all tokens, and a call that tokenises text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)

    def __call__(self, text: str | bytes) -> Sequence[int]:
        """Of long text only the beginning: it is asked for again after each token of it. As text that goes on: no blank
        is put before it, which the structure would not allow."""
        known = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode_continuation(known[:_TEXT_AHEAD])


def _copied(structure: Structure, found: llguidance.LLMatcher | str) -> Constraint:
    if isinstance(found, str):
        raise UserError(f"structure: the {structure.kind} cannot be used: {found}")
    return Constraint(found.deep_copy())


def _tried(matcher: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """The matcher, or one in error: most of the work is left for the first tokens, so a copy takes two steps here."""
    copy = matcher.deep_copy()
    for _ in range(2):
        allowed = np.frombuffer(copy.compute_bitmask(), np.uint8)
        if copy.is_error() or not allowed.any() or copy.is_stopped():
            break
        copy.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
    return copy if copy.is_error() else matcher


def _grammar(structure: Structure) -> str:
    matcher = llguidance.LLMatcher
    if structure.kind == "regex":
        return str(matcher.grammar_from_regex(structure.text))
    if structure.kind == "grammar":
        return str(matcher.grammar_from_lark(structure.text))
    schema = {"type": "object"} if structure.kind == "json_object" else _schema(structure.text)
    overrides: Any = {"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))


def _schema(text: str) -> object:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return {} if schema is True else schema  # the schema that allows everything


def _one_line(text: str) -> str:
    """The message of a library, without its pictures of the place: those point into text of its own making."""
    lines = [line.strip() for line in text.replace("<non-verbose/>", "").splitlines()]
    message = "; ".join(line for line in lines if line and not set(line) <= set("^~ ") and " | " not in f" {line}")
    return message if len(message) <= 300 else message[:297] + "..."
