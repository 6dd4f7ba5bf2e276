"""Outputs under a structure always parse, validate and match; what is wrong with a structure is said at the door."""

from __future__ import annotations

import json
import random
import re
import string
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from modelworks.checkpoint import LoadedModel
from modelworks.config import ModelConfig, TokenizerTraining, UserError
from modelworks.data import Tokenizer
from modelworks.data.tokenizers.training import train_tokenizer
from modelworks.models import Transformer, initialize
from modelworks.serve import Engine, EngineOptions
from modelworks.serve.params import SamplingParams, Structure
from modelworks.serve.sampler import Sampler
from modelworks.serve.structured import Compiler, Constraint

PADDED = 20  # columns of the logits beyond the tokeniser's vocabulary, as models have them
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
        "size": {"anyOf": [{"type": "number", "minimum": -5, "maximum": 5}, {"$ref": "#/$defs/no"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"no": {"const": False}},
}
EXPRESSIONS = [r"[a-z]{2,5}-\d{3}", r"(yes|no|maybe)( sir)?", r"[^x]{0,6}x", r"日本?語{1,3}"]
GRAMMAR = 'start: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" start ")"\n'


@pytest.fixture(scope="module", params=["bpe", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = 'The quick brown fox {"name": "Mia", "age": 7} doesn\'t jump over 12,345 lazy dogs. naïve café 日本語\n'
    if request.param == "bpe":
        return train_tokenizer([text] * 60, TokenizerTraining(vocab_size=320))
    import sentencepiece

    directory: Path = tmp_path_factory.mktemp("pieces")
    (directory / "text").write_text(text * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "m"),
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return Tokenizer.load(directory / "m.model")


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(tokenizer.vocab_size + PADDED, tokenizer)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, tokenizer.vocab_size + PADDED, tokenizer.eos_ids)


def written(sampler: Sampler, tokenizer: Tokenizer, params: list[SamplingParams]) -> list[str | None]:
    """Texts from random logits, side by side; None where max_tokens came first."""
    states = [sampler.start(each, [1, 2], seed) for seed, each in enumerate(params)]
    outputs: list[list[int]] = [[] for _ in params]
    open_ones = set(range(len(params)))
    generator = torch.Generator().manual_seed(0)
    for _ in range(max(each.max_tokens or 0 for each in params)):
        going = sorted(open_ones)
        if not going:
            break
        logits = torch.randn(len(going), tokenizer.vocab_size + PADDED, generator=generator) * 2
        logits[:, list(tokenizer.eos_ids)] += 2
        for place, sampled in zip(going, sampler.sample(logits, [states[each] for each in going]), strict=True):
            assert sampled.error is None
            outputs[place].append(sampled.token)
            states[place].accept(sampled.token)
            if sampled.token in tokenizer.eos_ids:
                open_ones.discard(place)
    return [None if place in open_ones else tokenizer.decode(tokens[:-1]) for place, tokens in enumerate(outputs)]


def test_outputs_are_what_their_structures_say(sampler: Sampler, tokenizer: Tokenizer) -> None:
    schema, anything, grammar = Structure.json_schema(PERSON), Structure.json_object(), Structure.grammar(GRAMMAR)
    structures = [schema] * 6 + [anything] * 4 + [Structure.regex(each) for each in EXPRESSIONS * 2] + [grammar] * 4
    params = [SamplingParams(structure=each, max_tokens=160, temperature=1.0) for each in structures]
    params[0] = SamplingParams(structure=schema, max_tokens=160, temperature=0.0)
    texts = written(sampler, tokenizer, params)
    finished = [(text, each) for text, each in zip(texts, structures, strict=True) if text is not None]
    assert {each.kind for _, each in finished} == {"json_schema", "json_object", "regex", "grammar"}
    is_person = jsonschema_rs.validator_for(PERSON).is_valid
    for text, structure in finished:
        if structure.kind == "json_schema":
            assert is_person(json.loads(text)), text
        elif structure.kind == "json_object":
            assert isinstance(json.loads(text), dict)
        elif structure.kind == "regex":
            assert re.fullmatch(structure.text, text), text
        else:
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", text), {}), int)
    for text in (text for text, each in finished if each.kind.startswith("json")):
        assert re.search(r"\s{33}", re.sub(r'"(\\.|[^"\\])*"', "", text)) is None, "white space has a limit"


def test_an_output_that_is_cut_is_reported_as_unfinished(sampler: Sampler, tokenizer: Tokenizer) -> None:
    params = [SamplingParams(structure=Structure.json_schema(PERSON), max_tokens=5)]
    assert written(sampler, tokenizer, params) == [None]


def test_min_tokens_yields_to_a_structure_that_is_whole(sampler: Sampler, tokenizer: Tokenizer) -> None:
    fixed = SamplingParams(structure=Structure.regex("abc"), min_tokens=40, max_tokens=50)
    longer = SamplingParams(
        structure=Structure.regex("a+"), min_tokens=8, max_tokens=60, logit_bias={tokenizer.eos_id: 50.0}
    )
    states = written(sampler, tokenizer, [fixed, longer])
    assert states[0] == "abc"
    assert states[1] is not None
    assert set(states[1]) == {"a"}
    assert len(states[1]) >= 8


def mask_of(constraint: Constraint, tokenizer: Tokenizer) -> list[int]:
    row = np.zeros(-(-(tokenizer.vocab_size + PADDED) // 32), np.int32)
    assert constraint.mask(row) is None
    return [int(token) for token in np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0]]


def test_forks_and_rollbacks_are_as_if_they_had_never_gone_elsewhere(compiler: Compiler, tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    constraint = compiler.constraint(Structure.json_schema(PERSON))
    path: list[int] = []
    for _ in range(25):
        allowed = mask_of(constraint, tokenizer)
        fork = constraint.fork()
        steps = 0
        for _ in range(draw.randint(1, 4)):  # away, and back again
            if constraint.finished:
                break
            assert constraint.accept(draw.choice(mask_of(constraint, tokenizer))) is None
            steps += 1
        constraint.rollback(steps)
        assert mask_of(constraint, tokenizer) == allowed == mask_of(fork, tokenizer)
        path.append(draw.choice([token for token in allowed if token not in tokenizer.eos_ids] or allowed))
        assert constraint.accept(path[-1]) is None
        afresh = compiler.constraint(Structure.json_schema(PERSON))
        assert [afresh.accept(token) for token in path] == [None] * len(path)
        assert mask_of(afresh, tokenizer) == mask_of(constraint, tokenizer)
        if constraint.finished:
            break


def test_the_end_is_known(compiler: Compiler, tokenizer: Tokenizer) -> None:
    constraint = compiler.constraint(Structure.regex("ab?"))
    assert not constraint.is_whole
    spelled = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    a, b = spelled[b"a"], spelled[b"b"]
    assert constraint.accept(a) is None
    assert (constraint.is_whole, constraint.finished) == (True, False)
    assert constraint.accept(b) is None
    assert constraint.finished
    assert mask_of(constraint, tokenizer) == sorted(tokenizer.eos_ids)
    assert "cannot go on" in (constraint.accept(a) or "")


def test_an_error_ends_one_request_alone(sampler: Sampler, tokenizer: Tokenizer) -> None:
    params = SamplingParams(structure=Structure.regex("[0-9]+"))
    wrong, right = sampler.start(params, [1], 0), sampler.start(params, [1], 1)
    wrong.accept(next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"z"))
    found = sampler.sample(torch.zeros(2, tokenizer.vocab_size + PADDED), [wrong, right])
    assert found[0].token == -1
    assert "structure" in (found[0].error or "")
    assert found[1].error is None
    assert set(tokenizer.token_bytes(found[1].token).decode()) <= set(string.digits)


WRONG: list[tuple[Structure, str]] = [
    (Structure.json_schema({"type": "strin"}), "Invalid type: strin"),
    (Structure.json_schema({"not": {"type": "string"}}), "Unimplemented keys.*not"),
    (Structure.json_schema({"$ref": "file:///etc/passwd"}), "retrieving it failed"),
    (Structure.json_schema({"$ref": "http://localhost:1/schema"}), "retrieving it failed"),
    (Structure("json_schema", "{"), "line 1"),
    (Structure("json_schema", "[" * 30000 + "]" * 30000), "nested too deeply"),
    (Structure.json_schema(False), "schema"),
    (Structure.regex("(a"), "unclosed group"),
    (Structure.regex(r"a(?=b)"), "look-ahead"),
    (Structure.regex(r"(a)\1"), "backreferences"),
    (Structure.grammar("start: missing"), "unknown name"),
    (Structure.grammar('other: "a"'), "no start rule"),
    (Structure.regex("a{3000000}"), "too many|took"),
    (Structure.regex("((a{100}){100}){100}"), "too many|took"),
]


@pytest.mark.parametrize(("structure", "message"), WRONG, ids=[f"{each.kind}-{n}" for n, (each, _) in enumerate(WRONG)])
def test_wrong_and_hostile_structures_are_refused_in_a_line(
    compiler: Compiler, structure: Structure, message: str
) -> None:
    for _ in range(2):  # the second time it is known, and costs nothing
        started = time.thread_time()
        with pytest.raises(
            UserError, match=f"^structure: the {structure.kind} cannot be used: .*({message})"
        ) as caught:
            compiler.constraint(structure)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert time.thread_time() - started < 0.01


def test_many_structures_are_not_all_kept(compiler: Compiler) -> None:
    for number in range(80):
        compiler.constraint(Structure.regex(f"a{{{number + 1}}}"))
    assert len(compiler._kept) == 64


def test_options_that_a_schema_brings_along_change_nothing(compiler: Compiler) -> None:
    options: dict[str, Any] = {"x-guidance": {"whitespace_pattern": ".*", "lenient": True}}
    with pytest.raises(UserError, match="Unimplemented"):
        compiler.constraint(Structure.json_schema({"not": {}, **options}))
    assert not compiler.constraint(Structure.json_schema(True)).finished, "allows every value"


def test_bad_words_are_not_written(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """The last token of a word is forbidden where its others came before, in the prompt too, within a text and after a
    blank: as transformers forbids sequences of tokens."""
    from transformers.generation.logits_process import NoBadWordsLogitsProcessor

    words = ("fox", "quick brown", "é", "z")
    spelled = [tokenizer.encode_continuation(text) for word in words for text in (word, f" {word}")]
    theirs = NoBadWordsLogitsProcessor(spelled, eos_token_id=tokenizer.eos_id)
    draw = random.Random(3)
    for first in (spelled[2][:-1], spelled[3][:1], [1, 2]):
        state, tokens = (
            sampler.start(SamplingParams(bad_words=words, temperature=0.0, logprobs=0), first, 0),
            list(first),
        )
        for _ in range(30):
            logits = torch.randn(1, tokenizer.vocab_size + PADDED)
            word = draw.choice(spelled)  # lure it into a bad word
            logits[0, word[draw.randrange(len(word))]] += 10
            expected = int(theirs(torch.tensor([tokens]), logits.clone()).argmax())
            assert sampler.sample(logits, [state])[0].token == expected
            state.accept(expected)
            tokens.append(expected)


def test_the_engine_says_how_structured_outputs_end() -> None:
    text = 'The quick brown fox {"name": "Mia", "age": 7}\n'
    tokenizer = train_tokenizer([text] * 60, TokenizerTraining(vocab_size=300))
    config = ModelConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=304, max_seq_len=256, init_std=0.3)
    model = Transformer(config)
    initialize(model, seed=0)
    options = EngineOptions(kv_cache_bytes=1 << 20, block_size=4, native="off")
    schema = Structure.json_schema(PERSON)
    with Engine(LoadedModel(model.eval(), tokenizer, config, "a tiny model"), options) as engine:
        params = SamplingParams(structure=schema, max_tokens=200, n=4, seed=1)
        (several,) = engine.generate(["fox"], params)
        reasons = [each.finish_reason for each in several.completions]
        assert "stop" in reasons
        for each in several.completions:
            if each.finish_reason == "stop":
                assert jsonschema_rs.validator_for(PERSON).is_valid(json.loads(each.text))
        (cut,) = engine.generate(["fox"], SamplingParams(structure=schema, max_tokens=3, temperature=0.0))
        assert cut.completions[0].finish_reason == "length"
        (beams,) = engine.generate(["fox"], SamplingParams(structure=Structure.regex("a{3}b?"), beams=3, max_tokens=9))
        assert beams.completions[0].text in ("aaa", "aaab")
        with pytest.raises(UserError, match="Invalid type"):
            engine.generate([[1]], SamplingParams(structure=Structure.json_schema({"type": "strin"})))
        assert engine.problems() == []
