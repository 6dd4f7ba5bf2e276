"""Tokenisers: exact round trips, pieces, streaming, special tokens, and what transformers makes of the saved files."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from modelworks.config import TokenizerTraining, UserError
from modelworks.data import StreamDecoder, Tokenizer
from modelworks.data.tokenizers.pieces import pieces, training_pieces
from modelworks.data.tokenizers.training import train_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n" * 20,
    "The quick brown fox doesn't jump over 12,345 lazy dogs. " * 20,
    "naïve café 日本語のテキスト 🤗🤗 नमस्ते\r\n",
]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(TEXTS * 5, TokenizerTraining(train=request.param, vocab_size=380))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_tokenizer(TEXTS * 5, TokenizerTraining(vocab_size=380))


@given(text=st.text(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(st.text(max_size=60), st.data())
@settings(max_examples=150, deadline=None)
def test_streaming_gives_the_same_text_for_every_cut(bpe: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = bpe.encode(text, parse_special=False)
    # any ids, not only those of whole text: broken characters must come out alike too
    ids += data.draw(st.lists(st.integers(1, bpe.vocab_size - 1), max_size=6))
    decoder = StreamDecoder(bpe, start_of_text=True)
    parts = []
    while ids[sum(map(len, parts)) :]:
        parts.append(ids[sum(map(len, parts)) :][: data.draw(st.integers(1, 4))])
    streamed = [decoder.push_all(part) for part in parts]
    streamed.append(decoder.flush())
    assert "".join(streamed) == bpe.decode(ids) == bpe.backend.decode(ids)


def test_streaming_never_shows_half_a_character(bpe: Tokenizer) -> None:
    decoder = StreamDecoder(bpe)
    shown = [decoder.push(token) for token in bpe.encode("🤗é日")]
    assert "\ufffd" not in "".join(shown)
    assert decoder.flush() == ""
    half = bpe.encode("🦩")[:2]  # not in the training text: several tokens
    assert decoder.push_all(half) == ""
    assert decoder.flush() == "\ufffd"


@given(text=st.text(max_size=80) | st.text(" ▁\nae\u0301\u0308ιω", max_size=80))
@settings(max_examples=150, deadline=None)
def test_a_text_has_no_fewer_tokens_than_its_length_tells(tokenizer: Tokenizer, text: str) -> None:
    for source in (text, text + "<|endoftext|>" * 3, "e\u0301" + text):
        assert tokenizer.fewest_tokens(source) <= len(tokenizer.encode(source))


def test_how_few_tokens_a_text_has_is_told_only_where_no_character_is_lost(bpe: Tokenizer) -> None:
    longest = max(len(bpe.token_bytes(token)) for token in range(bpe.vocab_size))
    assert bpe.fewest_tokens("é" * 5000) == -(-10_000 // longest)
    rules = json.loads(bpe.to_json())
    vocabulary = {token: place for token, place in rules["model"]["vocab"].items() if token != "Ą"}  # byte 4
    rules["model"]["vocab"] = vocabulary
    lacking = Tokenizer(Backend.from_str(json.dumps(rules)), eos_id=0)
    assert lacking.encode("\x04" * 500) == []
    assert (lacking.fewest_tokens("\x04" * 500), lacking.fewest_tokens("\x04a" * 500)) == (0, -(-500 // longest))
    for change in ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
                   {"pre_tokenizer": {"type": "Whitespace"}}):  # fmt: skip
        rules = Backend.from_str(json.dumps(json.loads(bpe.to_json()) | change))
        assert Tokenizer(rules, eos_id=0).fewest_tokens(" " * 5000) == 0
    composing = Tokenizer(
        Backend.from_str(json.dumps(json.loads(bpe.to_json()) | {"normalizer": {"type": "NFC"}})), eos_id=0
    )
    shrunk = "\u03b9\u0308\u0301" * 500  # the worst that NFC does
    assert 0 < composing.fewest_tokens(shrunk) <= len(composing.encode(shrunk))


def test_other_threads_run_while_a_long_text_is_encoded(bpe: Tokenizer) -> None:
    text, begun, n_beats = "".join(TEXTS) * 400, threading.Event(), 0

    def work() -> None:
        bpe.encode(text[:10])
        begun.set()
        bpe.encode(text + "<|endoftext|>")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        n_beats += 1
        time.sleep(0)
    assert n_beats > 100, "`encode` of the backend holds the interpreter from beginning to end"


def test_a_template_is_compiled_once_for_all_conversations(bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "{% set seen = namespace(n=0) %}{% for m in messages %}{% set seen.n = seen.n + 1 %}{{ seen.n }}{% endfor %}"
    )
    talking = Tokenizer(bpe.backend, eos_id=0, chat_template=source)
    one, two = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}] * 2
    assert talking.render_chat(two) == "12"
    monkeypatch.setattr("jinja2.Environment.compile", None)
    assert talking.render_chat(one) == "1", "nothing is left of the first"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_deterministic(kind: str) -> None:
    texts = [Path(module.__file__).read_text() for module in (json, tempfile, shutil, subprocess, threading)]
    fingerprints = {
        train_tokenizer(texts, TokenizerTraining.model_validate({"train": kind, "vocab_size": 700})).fingerprint()
        for _ in range(3)
    }
    assert len(fingerprints) == 1


def test_a_document_starts_and_ends_with_the_special_token_and_holds_none_of_it(bpe: Tokenizer) -> None:
    text = "a <|endoftext|> b"
    ids = bpe.encode_document(text).tolist()
    assert (ids[0], ids[-1]) == (bpe.start_id, bpe.eos_id)
    assert bpe.eos_id not in ids[1:-1]
    assert bpe.decode(ids) == text
    assert bpe.encode(text).count(bpe.eos_id) == 1  # in a prompt it is the token
    assert bpe.encode_prompt("x")[0] == bpe.start_id
    assert bpe.encode_prompt("<|endoftext|>x").count(bpe.start_id) == 1


@given(st.text(st.sampled_from("ab 1\n\t_.,é日'"), max_size=400), st.integers(8, 64))
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_text_and_are_bounded(text: str, length: int) -> None:
    for cut in (pieces, training_pieces):
        parts = list(cut(text, length))
        assert "".join(parts) == text
        assert all(len(part) <= length for part in parts)


def test_long_text_has_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    text = "".join(f"{i} some words, 'quoted' x_{i}\r\n\n    indented_{i}()  \n" for i in range(4000))
    assert len(list(pieces(text))) > 5
    whole = tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == whole
    assert tokenizer.encode_document(text)[1:-1].tolist() == whole


@pytest.mark.parametrize("text", ["a" * 1_000_000, "0123456789abcdef" * 60_000, " " * 1_000_000, "日本" * 300_000])
def test_a_line_without_a_place_to_cut_comes_back(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode_document(text).tolist()) == text


def test_training_on_a_giant_word_is_not_quadratic() -> None:
    started = time.monotonic()
    tokenizer = train_tokenizer(["ab" * 500_000, "word " * 100], TokenizerTraining(vocab_size=300))
    assert time.monotonic() - started < 30
    assert tokenizer.decode(tokenizer.encode("abab word")) == "abab word"


def test_transformers_reads_what_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}\n{% endfor %}"
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, " lead", "x  ", "a<|endoftext|>b", ""]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
        if text:  # its own rule puts the start first, as a prompt of ours does
            assert theirs(text)["input_ids"] == tokenizer.encode_prompt(text)
        ids = tokenizer.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (tokenizer.eos_id, tokenizer.bos_id)
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == tokenizer.render_chat(messages)
    again = Tokenizer.load(tmp_path)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert (again.eos_ids, again.add_bos, again.chat_template) == (
        tokenizer.eos_ids,
        tokenizer.add_bos,
        tokenizer.chat_template,
    )
    tokenizer.chat_template = None


def test_a_template_cannot_reach_out_of_its_sandbox(bpe: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    hostile = Tokenizer(bpe.backend, eos_id=0, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="chat template"):
        hostile.render_chat(messages)
    refusing = Tokenizer(bpe.backend, eos_id=0, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        refusing.render_chat(messages)
    with pytest.raises(UserError, match="no chat template"):
        bpe.render_chat(messages)


def test_what_ends_a_text_is_what_any_of_the_published_files_says(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.eos_id, set(loaded.eos_ids)) == (bpe.eos_id, {bpe.eos_id, 5, 0, 7})


def test_limits_published_in_tokenizer_json_do_not_cut_documents(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    rules["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    text = "many more than four tokens here"
    assert Tokenizer.load(tmp_path).decode(Tokenizer.load(tmp_path).encode(text)) == text


def test_wrong_files_are_refused(tmp_path: Path, bpe: Tokenizer) -> None:
    bpe.save(tmp_path / "good")
    with pytest.raises(UserError, match=r"did you mean `.*good`"):
        Tokenizer.load(tmp_path / "god")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither tokenizer.json nor"):
        Tokenizer.load(tmp_path / "empty")
    (tmp_path / "x.model").write_bytes(b"\xff\xff not a model")
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer.load(tmp_path / "x.model")


def test_a_corpus_too_small_for_unigram_says_so() -> None:
    tokenizer = train_tokenizer(["a"], TokenizerTraining(train="bpe", vocab_size=1000))
    assert tokenizer.vocab_size == 257  # bytes and the end of text
    assert tokenizer.decode(tokenizer.encode("é b")) == "é b"
