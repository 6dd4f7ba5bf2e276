"""What a request asks of sampling: one frozen value, every field checked where it is made. No torch.

Names and meanings are those of OpenAI's API and of vLLM where they have them. What depends on the model (token ids
within the vocabulary, lengths) is checked by `check_against`, so that nothing wrong ever reaches a step.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from modelworks.config import UserError, nearest, show_value

Kind = Literal["json_schema", "json_object", "regex", "grammar"]

MOST_SEQUENCES = 128  # n, best_of, beams
MOST_LOGPROBS = 100
MOST_ENTRIES = 1024  # of stop, stop_token_ids, bad_words, logit_bias
LONGEST_STRING = 1024  # characters of a stop string or a bad word
LONGEST_BAD_WORDS = 8192  # characters of all together: they are spelled in tokens between two steps (0.1 s)
LONGEST_STRUCTURE = 65536  # characters


@dataclass(frozen=True)
class Structure:
    """What the output must look like.

    kind: `json_schema` (text: the schema as JSON), `json_object` (any JSON object; text is empty), `regex` (the whole
    output matches it), `grammar` (Lark's notation, its start rule named `start`; see docs/sampling.md). Whether the
    text is a right schema, expression or grammar is found out by `structured.Compiler`, also before the request runs.
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            hint = nearest(str(self.kind), get_args(Kind))
            also = f" (did you mean `{hint}`?)" if hint else ""
            raise UserError(
                f"structure: got {show_value(self.kind)}, expected one of {', '.join(get_args(Kind))}{also}"
            )
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            expected = "no text" if self.kind == "json_object" else "its text"
            raise UserError(f"structure: {self.kind} got {show_value(self.text)}, expected {expected}")
        if len(self.text) > LONGEST_STRUCTURE:
            raise UserError(
                f"structure: the {self.kind} has {len(self.text)} characters, expected at most {LONGEST_STRUCTURE}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Structure:
        """Output that is JSON and valid under `schema`."""
        try:
            return cls("json_schema", json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"structure: the schema cannot be written as JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Structure:
        """Output that is any one JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Output that the whole of `pattern` matches."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Structure:
        """Output that the grammar `text` derives from its rule `start`."""
        return cls("grammar", text)


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when they end. Raises UserError that names the field.

    Number of results
        n: results. best_of: sequences generated, of which the n with the highest mean log-probability of a token are
        kept; None is n. beams: width of a beam search (then nothing is drawn); None is none. length_penalty: beams are
        ranked by their summed log-probability / length ** length_penalty. early_stopping: a beam search ends as soon
        as `beams` finished sequences exist.
    The distribution, in the order in which it is worked out
        logit_bias: added to the logits of token ids, -100 to 100. repetition_penalty: logits of tokens in prompt or
        output are divided by it where positive, multiplied where negative (Keskar et al. 2019).
        frequency_penalty, presence_penalty: subtracted from the logits of tokens in the output, the first times the
        number of times (OpenAI's definition). bad_words: texts that shall not be generated. min_tokens: so many
        tokens before the end token or one of stop_token_ids. allowed_token_ids: nothing else; None is everything.
        structure: what the output must look like. temperature: divides the logits; 0 is greedy, as is top_k = 1.
        top_k: the k most likely tokens (and those equal to the last); None is all. top_p: the fewest most likely tokens
        with a probability of top_p together (Holtzman et al. 2020). min_p: tokens at least min_p times as likely as
        the best (Nguyen et al. 2024). typical_p: the tokens whose information is nearest the distribution's entropy,
        with a probability of typical_p together (Meister et al. 2022).
        seed: of the draws; None: the engine gives each request another.
    The end
        max_tokens: of output; None: what the context leaves. stop: strings that end the output, left out of it unless
        include_stop. stop_token_ids: the same by token. ignore_eos: go on after the end token.
    Reports
        logprobs: natural log-probabilities of the chosen tokens and of so many most likely ones, of the model's own
        distribution (before everything above); None is none. prompt_logprobs: the same for the prompt's tokens.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None
    beams: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            if (value := getattr(self, name)) is not None or name in _REQUIRED:
                _check(name, value, _is_whole(value) and low <= value <= high, f"a whole number {_range(low, high)}")
        for name, (least, most) in _REAL.items():
            value = getattr(self, name)
            _check(name, value, _is_finite(value) and least <= value <= most, f"a number {_range(least, most)}")
        for name in ("top_p", "typical_p"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        for name in ("include_stop", "ignore_eos", "early_stopping"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        self._settle_lists()
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without a draw."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def n_sequences(self) -> int:
        """Sequences that are generated side by side."""
        return self.beams or self.best_of or self.n

    def check_against(self, vocab_size: int, max_model_len: int) -> None:
        """Raise UserError where a model with this vocabulary and context cannot do what is asked."""
        named: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise UserError(f"{name}: token id {wrong} is not in the vocabulary, expected 0 to {vocab_size - 1}")
        for name in ("max_tokens", "min_tokens"):
            value = getattr(self, name)
            if value is not None and value >= max_model_len:
                raise UserError(
                    f"{name}: got {value}, but prompt and output together have {max_model_len} tokens at most; "
                    f"expected at most {max_model_len - 1}"
                )

    def _settle_lists(self) -> None:
        for name in ("stop", "bad_words"):
            strings = _entries(name, getattr(self, name))
            right = all(isinstance(text, str) and 0 < len(text) <= LONGEST_STRING for text in strings)
            _check(name, strings, right, f"strings of 1 to {LONGEST_STRING} characters")
            object.__setattr__(self, name, strings)
        size = sum(map(len, self.bad_words))
        _check("bad_words", f"{size} characters", size <= LONGEST_BAD_WORDS, f"at most {LONGEST_BAD_WORDS} together")
        for name in ("stop_token_ids", "allowed_token_ids"):
            if (given := getattr(self, name)) is not None:
                ids = _entries(name, given, most=None if name == "allowed_token_ids" else MOST_ENTRIES)
                _check(
                    name, ids, all(_is_whole(token) and token >= 0 for token in ids), "token ids (whole numbers >= 0)"
                )
                object.__setattr__(self, name, ids)
        _check("allowed_token_ids", self.allowed_token_ids, self.allowed_token_ids != (), "at least one token id")
        bias = self.logit_bias
        _check("logit_bias", bias, isinstance(bias, Mapping), "a mapping of token ids to numbers")
        _check("logit_bias", bias, len(bias) <= MOST_ENTRIES, f"at most {MOST_ENTRIES} token ids")
        for token, value in bias.items():
            _check("logit_bias", token, _is_whole(token) and token >= 0, "token ids (whole numbers >= 0)")
            _check(f"logit_bias[{token}]", value, _is_finite(value) and -100 <= value <= 100, "a number -100 to 100")
        object.__setattr__(self, "logit_bias", dict(bias))
        structure = self.structure
        _check("structure", structure, structure is None or isinstance(structure, Structure), "a `Structure` or none")

    def _check_together(self) -> None:
        if self.best_of is not None:
            _check("best_of", self.best_of, self.best_of >= self.n, f"at least n ({self.n})")
        if self.max_tokens is not None:
            _check(
                "min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, f"<= max_tokens {self.max_tokens}"
            )
        if self.structure is not None and self.ignore_eos:
            raise UserError(
                "ignore_eos: a `structure` ends with the end token, so it cannot be ignored; drop one of both"
            )
        if self.beams is None:
            self._check_left_out(_OF_BEAMS, "is for beam search alone; set `beams`, or leave it out")
            return
        _check("beams", self.beams, self.beams >= self.n, f"at least n ({self.n})")
        self._check_left_out(_OF_DRAWS, "a beam search draws nothing; leave it out, or leave `beams` out")
        _check("temperature", self.temperature, self.temperature in (0, 1), "none (a beam search draws nothing)")

    def _check_left_out(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(SamplingParams, name):  # the class holds the defaults
                raise UserError(f"{name}: {why}")


_WHOLE: dict[str, tuple[int, float]] = {
    "n": (1, MOST_SEQUENCES),
    "best_of": (1, MOST_SEQUENCES),
    "beams": (1, MOST_SEQUENCES),
    "top_k": (1, math.inf),
    "min_tokens": (0, math.inf),
    "max_tokens": (1, math.inf),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, MOST_LOGPROBS),
    "prompt_logprobs": (0, MOST_LOGPROBS),
}
_REQUIRED = frozenset({"n", "min_tokens"})  # None is no value of theirs
_REAL = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),  # beyond, logits of a sound model overflow
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-math.inf, math.inf),
}
_OF_BEAMS = ("length_penalty", "early_stopping")
_OF_DRAWS = ("best_of", "top_k", "top_p", "min_p", "typical_p", "seed")


def _check(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise UserError(f"{name}: got {show_value(value)}, expected {expected}")


def _range(low: float, high: float) -> str:
    return f">= {low}" if high == math.inf else "that is finite" if low == -math.inf else f"from {low} to {high}"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    # Compared, not asked `isfinite`, which cannot take whole numbers beyond the range of floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _entries(name: str, given: object, most: int | None = MOST_ENTRIES) -> tuple[Any, ...]:
    _check(name, given, isinstance(given, list | tuple), "a list")
    entries: tuple[Any, ...] = tuple(given)  # type: ignore[arg-type]  # checked above
    _check(name, f"{len(entries)} entries", most is None or len(entries) <= most, f"at most {most}")
    return entries
